"""Llama with a leading axis of N local models; N = 1 is the single model, on its own fast path.

Shapes: N local models, B rows, T tokens, M = B * T, D width, V vocabulary, F FFN width,
H query heads, K key/value heads, C channels of one head, R = C / 2 rotated pairs.
Activations are [M, D] for one model and [N, M, D] for several; attention folds N into the rows.
"""

import warnings
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from atoll.config.model import ModelConfig
from atoll.errors import UsageError
from atoll.model import gpu, rope
from atoll.model.arena import Arena
from atoll.model.attention import document_mask
from atoll.model.block import Block, embed, linear, norm
from atoll.model.loss import weighted_loss
from atoll.seeds import derive_seed


class Llama(nn.Module):
    """N equal Llama models over one arena.

    Parameters are views of `arena.data_NP`, and their `.grad` are views of `arena.grad_NP`, under
    the same names. Build it on its device: moving it would break those views and is refused.

    Attributes:
        config: The shape of one model.
        arena: Weights and gradients of all N models.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_models: int = 1,
        device: torch.device | str = "cpu",
        seed: int | None = 0,
        trainable: bool = True,
        kernels: bool = False,
        arena: Arena | None = None,
    ) -> None:
        """Allocate and initialize all weights, or stand on those of `arena`.

        Args:
            config: The shape of one model.
            num_models: N; every model starts with the same weights.
            device: Where the weights live from the start.
            seed: Run seed that the initial weights derive from, whatever N and device; None
                leaves zeros for a loader to fill.
            trainable: Whether gradients exist; without them the module is for inference.
            kernels: Whether a forward without gradients, under bfloat16 autocast and without
                document numbers, goes through `atoll.model.gpu`; it needs CUDA and triton.
            arena: Weights and gradients to use as they are; decides N and device.
        """
        super().__init__()
        self.config = config
        self.kernels = kernels
        if arena is None:
            matrices, scales = layout(config)
            self.arena = Arena(
                matrices=matrices,
                scales=scales,
                num_models=num_models,
                device=device,
                trainable=trainable,
            )
        else:
            self.arena, device, seed = arena, arena.data_NP.device, None
        self.embedding = self._parameter("embedding")
        self.layers = nn.ModuleList(
            Block(config, lambda name, layer=layer: self._parameter(f"layers.{layer}.{name}"))
            for layer in range(config.layers)
        )
        self.norm = self._parameter("norm")
        self.head = None if config.tied_embeddings else self._parameter("head")
        frequencies_R = rope.frequencies(config)
        cos_TR, sin_TR = rope.tables(torch.arange(config.context_length), frequencies_R)
        for name, table in (("frequencies", frequencies_R), ("cos", cos_TR), ("sin", sin_TR)):
            self.register_buffer(name, table.to(device), persistent=False)
        if seed is not None:
            self._initialize(seed)
        if self.arena.num_models > 1 and self.arena.grad_NP.numel():
            _hear_layout_warning()

    frequencies: Tensor
    cos: Tensor
    sin: Tensor

    def forward(
        self,
        inputs_NBT: Tensor,
        targets_NBT: Tensor,
        weights_NBT: Tensor | None = None,
        positions_NBT: Tensor | None = None,
        documents_NBT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of cross-entropies and the summed weight, float32 [N] each.

        Args:
            inputs_NBT: int64 token ids.
            targets_NBT: int64 ids of the next tokens, IGNORE where not counted.
            weights_NBT: Weight of each target, float32. Default: 1 for each counted target.
            positions_NBT: Positions within the document. Default: 0 ... T-1 in every row.
            documents_NBT: Document numbers; attention stays inside one. Default: one a row.
        """
        if self._scores_with_kernels(documents_NBT):
            return gpu.loss(self, inputs_NBT, targets_NBT, weights_NBT, positions_NBT)
        models = self.arena.num_models
        x = self._features(inputs_NBT, positions_NBT, documents_NBT)
        return weighted_loss(
            x.view(models, -1, x.shape[-1]),
            self.output_weight,
            targets_NBT.reshape(models, -1),
            None if weights_NBT is None else weights_NBT.reshape(models, -1),
        )

    def hidden(
        self,
        inputs_NBT: Tensor,
        positions_NBT: Tensor | None = None,
        documents_NBT: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after the last norm, [N, B, T, D]."""
        return self._features(inputs_NBT, positions_NBT, documents_NBT).view(*inputs_NBT.shape, -1)

    def logits(
        self,
        inputs_NBT: Tensor,
        positions_NBT: Tensor | None = None,
        documents_NBT: Tensor | None = None,
    ) -> Tensor:
        """Return the scores of every next token, float32 [N, B, T, V]."""
        x = self._features(inputs_NBT, positions_NBT, documents_NBT)
        return linear(x, self.output_weight).float().view(*inputs_NBT.shape, -1)

    @property
    def blocks(self) -> "tuple[Block, ...]":
        """The transformer blocks in order."""
        return cast("tuple[Block, ...]", tuple(self.layers))

    @property
    def output_weight(self) -> Tensor:
        """The output projection [N, V, D]: the embedding itself when tied."""
        return self.embedding if self.head is None else self.head

    def angles(self, positions: Tensor | None, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of positions, or of 0 ... num_tokens - 1: float32 [..., T, R]."""
        if positions is None and num_tokens <= self.cos.shape[0]:
            return self.cos[:num_tokens], self.sin[:num_tokens]
        if positions is None:
            positions = torch.arange(num_tokens, device=self.frequencies.device)
        return rope.tables(positions, self.frequencies)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients in place; they are never None, whatever is asked."""
        self.arena.grad_NP.zero_()

    def _scores_with_kernels(self, documents_NBT: Tensor | None) -> bool:
        free = documents_NBT is None and not torch.is_grad_enabled()
        return self.kernels and free and self._is_narrow()

    def _is_narrow(self) -> bool:
        kind = self.arena.data_NP.device.type
        return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16

    def _features(
        self, inputs_NBT: Tensor, positions_NBT: Tensor | None, documents_NBT: Tensor | None
    ) -> Tensor:
        models, rows, tokens = inputs_NBT.shape
        if positions_NBT is not None:
            positions_NBT = positions_NBT.reshape(models * rows, tokens)
        mask = None if documents_NBT is None else document_mask(documents_NBT.flatten(0, 1))
        cos, sin = self.angles(positions_NBT, tokens)
        x = embed(inputs_NBT.reshape(models, -1), self.embedding)
        if self.config.residual == "bfloat16" and self._is_narrow():
            x = x.to(torch.bfloat16)  # what the blocks add to it under autocast is narrow as well
        for layer in self.layers:
            x = layer(x, tokens, cos, sin, mask)
        return norm(x, self.norm, self.config.norm_eps)

    def _parameter(self, name: str) -> nn.Parameter:
        trainable = self.arena.grad_NP.numel() > 0
        parameter = nn.Parameter(self.arena.view(name), requires_grad=trainable)
        if trainable:
            parameter.grad = self.arena.grad_view(name)
        return parameter

    @torch.no_grad()
    def _initialize(self, seed: int) -> None:
        """Draw matrices on the CPU, each from its own stream, so that no layout changes them."""
        for name, place in self.arena.slices.items():
            if place.offset >= self.arena.decay_size:
                self.arena.view(name).fill_(1.0)
                continue
            generator = torch.Generator().manual_seed(derive_seed(seed, "initial weights", name))
            values = torch.empty(place.shape).normal_(std=self.config.init_std, generator=generator)
            self.arena.view(name).copy_(values)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        probe = self.arena.data_NP.new_empty(0)
        moved = fn(probe)
        if moved.device != probe.device or moved.dtype != probe.dtype:
            raise UsageError(
                f"this model lives on {probe.device} as {probe.dtype} and cannot be moved to "
                f"{moved.device} as {moved.dtype}: its parameters are views of one arena.",
                hint="build it there: Llama(config, device=...); use torch.autocast for bfloat16",
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Llama":
        arena = self.arena
        copy = Llama(
            self.config,
            num_models=arena.num_models,
            device=arena.data_NP.device,
            trainable=arena.grad_NP.numel() > 0,
            kernels=self.kernels,
        )
        copy.arena.data_NP.copy_(arena.data_NP)
        copy.arena.grad_NP.copy_(arena.grad_NP)
        copy.train(self.training)
        memo[id(self)] = copy
        return copy


def _hear_layout_warning() -> None:
    """Let torch say once, unheard, that strided gradients "may impair performance".

    Gradients of N models are strided like their parameters so that one arena holds them all, and
    they are added in place; torch's advice, a contiguous gradient, would be a copy more.
    """
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        parameter = nn.Parameter(torch.zeros(2, 2)[:, :1])
        parameter.grad = torch.zeros(2, 2)[:, :1]
        parameter.sum().backward()


def layout(
    config: ModelConfig,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of matrices and of norm scales by canonical name, in arena order."""
    width, ffn = config.width, config.ffn_width
    heads, channels = config.heads, rope.head_width(config)
    key_heads = config.kv_heads or heads
    matrices: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, width)}
    scales: dict[str, tuple[int, ...]] = {}
    for layer in range(config.layers):
        matrices |= {
            f"layers.{layer}.qkv": ((heads + 2 * key_heads) * channels, width),
            f"layers.{layer}.attention_out": (width, heads * channels),
            f"layers.{layer}.gate_up": (2 * ffn, width),
            f"layers.{layer}.mlp_out": (width, ffn),
        }
        scales |= {f"layers.{layer}.attention_norm": (width,), f"layers.{layer}.mlp_norm": (width,)}
    if not config.tied_embeddings:
        matrices["head"] = (config.vocab_size, width)
    return matrices, scales | {"norm": (width,)}
