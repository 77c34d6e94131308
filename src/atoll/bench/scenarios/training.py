"""One update of atoll's Llama against transformers' LlamaForCausalLM of the same shape.

Both start from equal weights and see the same rows; forward, backward, clipping and AdamW are
timed, making of batches is not. Loss and gradient norm are compared before anything is timed.

Shapes: B rows, T tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from atoll.bench.contest import Contest, Target
from atoll.bench.scenarios.huggingface import HuggingFaceUpdate
from atoll.bench.timing import Condition
from atoll.config.base import Section
from atoll.config.load import load_config
from atoll.config.schema import RunConfig
from atoll.data.batch import Batch
from atoll.errors import AtollError
from atoll.model.llama import Llama
from atoll.optim.adamw import AdamW
from atoll.seeds import derive_seed
from atoll.strategy.single import Single
from atoll.train.device import resolve_amp, wait_for
from atoll.train.exact import torch_switches
from atoll.train.plan import UpdatePlan
from atoll.train.state import TrainState
from atoll.train.step import Update

LARGEST_DIFFERENCE = 1e-5
"""Relative difference of loss and gradient norm that FP32 sums in another order may make."""

OneUpdate = Callable[[], tuple[float, float]]
"""Makes one update; returns its loss in nats per token and its gradient norm before clipping."""


class TrainingSettings(Section):
    recipe: str = "tiny"
    """Recipe whose model, optimizer and clipping are used."""
    context_length: int | None = Field(default=None, ge=1)
    """Tokens of a row. Default: the recipe's."""
    micro_rows: tuple[int, ...] = (1, 4, 16)
    """Rows of one update, one contest each."""
    modes: tuple[Literal["eager", "compiled"], ...] = ("eager", "compiled")
    """How both run."""
    threads: int = Field(default=2, ge=1)
    """CPU threads of both."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    amp: Literal["none", "bf16"] = "none"
    """Autocast of both."""
    window_seconds: float = Field(default=0.5, ge=0)
    """Shortest window."""


def training_contests(settings: TrainingSettings) -> Iterator[Contest]:
    """Yield a contest for every mode and number of rows; each frees its models afterwards."""
    with torch_switches(deterministic=False, cpu_threads=settings.threads):
        for mode in settings.modes:
            for rows in settings.micro_rows:
                if mode == "compiled":
                    torch.compiler.reset()
                yield _contest(settings, rows, mode)


def paired_updates(
    settings: TrainingSettings, *, rows: int, compiled: bool
) -> tuple[OneUpdate, OneUpdate, dict[str, Any]]:
    """Return atoll's update, transformers' from equal weights on equal rows, and the facts."""
    config = load_config([Path(settings.recipe)]).config
    device = torch.device(settings.device)
    amp = resolve_amp(settings.amp, device)
    tokens = settings.context_length or config.model.context_length
    batch = _random_batch(config.model.vocab_size, rows, tokens, device)
    model = Llama(config.model, device=device, seed=0)
    ours = _atoll_update(config, model, _OneBatch(batch), rows, amp=amp, compiled=compiled)
    theirs = HuggingFaceUpdate(config, model, batch, amp=amp, compiled=compiled)
    facts = {
        "parameters": model.arena.num_parameters,
        "rows": rows,
        "tokens_per_row": tokens,
        "transformers_optimizer": theirs.choose_optimizer(),
    }
    return ours, theirs, facts


def _contest(settings: TrainingSettings, rows: int, mode: str) -> Contest:
    ours, theirs, facts = paired_updates(settings, rows=rows, compiled=mode == "compiled")
    facts["before_the_first_update"] = check_equal(ours(), theirs())
    device = torch.device(settings.device)
    return Contest(
        name=f"training, {rows} rows, {mode}",
        a=Condition("atoll", lambda: (ours(), wait_for(device))),
        b=Condition("transformers", lambda: (theirs(), wait_for(device))),
        target=Target("speed", 1.0),
        window_seconds=settings.window_seconds,
        facts=facts,
    )


def _atoll_update(
    config: RunConfig,
    model: Llama,
    loader: "_OneBatch",
    rows: int,
    *,
    amp: torch.dtype | None,
    compiled: bool,
) -> OneUpdate:
    """Return one update as the training loop makes it, its scalars read each time."""
    arena = model.arena
    optimizer = AdamW(
        arena.data_NP, arena.grad_NP, decay_size=arena.decay_size, config=config.optimizer
    )
    state = TrainState(0, 0, model, optimizer, Single(model))
    plan = UpdatePlan(rows, rows, config.optimizer.grad_clip, amp=amp, compiled=compiled)
    update = Update(state, loader, plan)

    def work() -> tuple[float, float]:
        update.run(lr=config.optimizer.lr)
        scalars = update.read()[-1]
        return scalars.losses[0], scalars.grad_norms[0]

    return work


def check_equal(ours: tuple[float, float], theirs: tuple[float, float]) -> dict[str, Any]:
    """Return both sides' loss and gradient norm at equal weights.

    Raises:
        AtollError: They differ by more than rounding: the two would not do equal work.
    """
    for name, our, their in zip(("loss", "gradient norm"), ours, theirs, strict=True):
        if abs(our - their) > LARGEST_DIFFERENCE * abs(their):
            raise AtollError(f"the {name} at equal weights is {our} here and {their} there.")
    return {"loss_nats_per_token": [ours[0], theirs[0]], "gradient_norm": [ours[1], theirs[1]]}


def _random_batch(vocab_size: int, rows: int, tokens: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(derive_seed(0, "bench", "rows", rows))
    tokens_BU = torch.randint(0, vocab_size, (rows, tokens + 1), generator=generator).to(device)
    return Batch(tokens_BU[:, :-1].contiguous(), tokens_BU[:, 1:].contiguous())


@dataclass(frozen=True, slots=True)
class _OneBatch:
    """A loader that gives the same rows whatever the cursor, at no cost."""

    rows: Batch
    identity: str = "one batch"
    num_rows: int = 2**62

    def batch(self, cursor: int, rows: int) -> Batch:
        return self.rows

    def weight(self, cursor: int, rows: int) -> float:
        return float(self.rows.targets_BT.numel())

    def close(self) -> None:
        return None
