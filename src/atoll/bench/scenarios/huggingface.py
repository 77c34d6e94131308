"""The alternative to atoll's update: transformers' Llama with torch's AdamW, set up at its best."""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from atoll.config.schema import RunConfig
from atoll.data.batch import Batch
from atoll.model.huggingface import save_pretrained
from atoll.model.llama import Llama

OPTIMIZERS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for loop": {"foreach": False},
}


class HuggingFaceUpdate:
    """One update: sdpa attention, shifted labels, clip_grad_norm_, AdamW in two decay groups.

    Calling it makes the update and returns its loss and the gradient norm before clipping.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Llama,
        batch: Batch,
        *,
        amp: torch.dtype | None,
        compiled: bool,
    ) -> None:
        """Copy `model`'s weights into a LlamaForCausalLM on the same device."""
        self._module = _same_model(model)
        self._forward: Any = (
            torch.compile(self._module, dynamic=False) if compiled else self._module
        )
        self._config, self._batch, self._amp = config.optimizer, batch, amp
        self._parameters = list(self._module.parameters())
        self._optimizer = self._adamw("fused")

    def choose_optimizer(self, *, calls: int = 20) -> str:
        """Take the fastest of torch's AdamW implementations and return its name.

        Each is tried with zero gradients and rate zero, so that no weight changes.
        """
        weights = copy.deepcopy(self._module.state_dict())
        seconds = {name: self._optimizer_seconds(name, calls) for name in OPTIMIZERS}
        self._module.load_state_dict(weights)
        chosen = min(seconds, key=lambda name: seconds[name])
        self._optimizer = self._adamw(chosen)
        return chosen

    def __call__(self) -> tuple[float, float]:
        self._optimizer.zero_grad(set_to_none=True)
        device = self._batch.inputs_BT.device.type
        with torch.autocast(device, dtype=self._amp, enabled=self._amp is not None):
            loss = self._forward(
                input_ids=self._batch.inputs_BT,
                labels=self._batch.targets_BT,
                shift_labels=self._batch.targets_BT,  # already shifted: T inputs, T targets
                use_cache=False,
            ).loss
        loss.backward()
        limit = self._config.grad_clip
        norm = nn.utils.clip_grad_norm_(self._parameters, float("inf") if limit is None else limit)
        self._optimizer.step()
        return float(loss.detach()), float(norm)

    def _adamw(self, implementation: str) -> torch.optim.AdamW:
        config = self._config
        matrices = [weight for weight in self._parameters if weight.dim() > 1]
        scales = [weight for weight in self._parameters if weight.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": scales, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            **OPTIMIZERS[implementation],
        )

    def _optimizer_seconds(self, implementation: str, calls: int) -> float:
        optimizer = self._adamw(implementation)
        for weight in self._parameters:
            weight.grad = torch.zeros_like(weight)
        _seconds(optimizer.step)
        best = min(_seconds(optimizer.step) for _ in range(calls))
        optimizer.zero_grad(set_to_none=True)
        return best


def _seconds(step: Callable[[], object]) -> float:
    started = perf_counter()
    step()
    return perf_counter() - started


def _same_model(model: Llama) -> nn.Module:
    """Export the model and let transformers load it, as a user would."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as name:
        folder = Path(name) / "model"
        save_pretrained(model, folder)
        twin: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
    return twin.to(model.arena.data_NP.device).train()
