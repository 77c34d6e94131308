"""AdamW over an arena, clipping and mixing included: one pass over flat weights and moments.

Shapes: N local models, P parameters of one model.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.config.optimizer import OptimizerConfig
from atoll.errors import StateMismatchError
from atoll.tensors import Snapshot, copy_to_cpu

MOMENTS = ("exp_avg", "exp_avg_sq")
MIXED_COLUMNS = 1 << 14
"""Columns that are mixed at a time: those of a few models fit a CPU's cache."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """How an update mixes the weights of packed local models.

    Attributes:
        shares_NN: float32 on the weights' device; row i holds the share of every local model in
            the mixed weights of model i. Rows and columns sum to 1.
        before: Mix, then update what was mixed (awc); otherwise update, then mix (atc).
    """

    shares_NN: Tensor
    before: bool


class AdamW:
    """Adam with decoupled weight decay on the first `decay_size` columns of every local model.

    Each row is cut into its decayed and its undecayed columns, and each cut is one tensor of
    torch's fused kernel, so the number of parameters does not matter for speed. Nothing but the
    moments is remembered: rate and step number come with each call.

    With `kernels` all of it, clipping and mixing included, is one pass of a kernel of our own.

    Attributes:
        exp_avg_NP: float32 first moments.
        exp_avg_sq_NP: float32 second moments.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """

    def __init__(
        self,
        data_NP: Tensor,
        grad_NP: Tensor,
        *,
        decay_size: int,
        config: OptimizerConfig,
        kernels: bool = False,
    ) -> None:
        """Start with moments of zero.

        Args:
            data_NP: float32 weights, changed in place by `step`.
            grad_NP: float32 gradients of the same shape.
            decay_size: Columns [0, decay_size) take weight decay; the others none.
            config: Betas, eps and decay.
            kernels: Whether to use `atoll.optim.adamw_kernel`; it needs CUDA and triton.
        """
        assert data_NP.shape == grad_NP.shape, (data_NP.shape, grad_NP.shape)
        assert 0 <= decay_size <= data_NP.shape[1], decay_size
        self.exp_avg_NP = torch.zeros_like(data_NP)
        self.exp_avg_sq_NP = torch.zeros_like(data_NP)
        self._config = config
        self._data_NP, self._grad_NP = data_NP, grad_NP
        self._decay_size, self._kernels = decay_size, kernels
        self._scalars_3 = torch.zeros(3, dtype=torch.float32, device=data_NP.device)
        self._step = torch.zeros((), dtype=torch.float32, device=data_NP.device)
        tensors = (data_NP, grad_NP, self.exp_avg_NP, self.exp_avg_sq_NP)
        decayed = [_rows(tensor[:, :decay_size]) for tensor in tensors]
        plain = [_rows(tensor[:, decay_size:]) for tensor in tensors]
        self._segments = [
            (segment, decay)
            for segment, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if segment[0]
        ]

    @torch.no_grad()
    def step(
        self,
        *,
        lr: float,
        step: int,
        factor_N: Tensor | None = None,
        mixing: Mixing | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Clip, update and mix the weights, in place.

        Args:
            lr: Rate of this update; 0 <= lr.
            step: Number of this update, counted from 1; decides the bias correction.
            factor_N: What each local model's gradients are multiplied by first; None for 1.
            mixing: How the local models mix; None where they do not.
            skip: float32 scalar on the device; where it is 1 no weight and no moment changes. It
                lets a bad gradient be held back without asking the device about it.
        """
        if self._kernels:
            self.prepare(lr=lr, step=step)
            self.apply(factor_N=factor_N, mixing=mixing, skip=skip)
            return
        if factor_N is not None:
            self._grad_NP.mul_(factor_N[:, None])
        if mixing is not None and mixing.before:
            mix(self._data_NP, mixing.shares_NN, skip=skip)
        self._update(lr=lr, step=step, skip=skip)
        if mixing is not None and not mixing.before:
            mix(self._data_NP, mixing.shares_NN, skip=skip)

    def prepare(self, *, lr: float, step: int) -> None:
        """Put the numbers of one update where `apply` reads them; not part of a captured update."""
        root = math.sqrt(1 - self._config.beta2**step)
        scalars = (lr, lr / (1 - self._config.beta1**step), 1 / root)
        for place, value in zip(self._scalars_3, scalars, strict=True):
            place.fill_(value)

    def apply(self, *, factor_N: Tensor | None, mixing: Mixing | None, skip: Tensor | None) -> None:
        """Make the prepared update, with `kernels` only; may be captured and replayed."""
        from atoll.optim.adamw_kernel import adamw

        adamw(
            self._data_NP,
            self._grad_NP,
            self.exp_avg_NP,
            self.exp_avg_sq_NP,
            self._scalars_3,
            decay_size=self._decay_size,
            betas=(self._config.beta1, self._config.beta2),
            eps=self._config.eps,
            weight_decay=self._config.weight_decay,
            factor_N=factor_N,
            shares_NN=None if mixing is None else mixing.shares_NN,
            before=mixing is not None and mixing.before,
            skip=skip,
        )

    def _update(self, *, lr: float, step: int, skip: Tensor | None) -> None:
        self._step.fill_(step)  # exact up to 2^24 updates
        for (data, grad, exp_avg, exp_avg_sq), decay in self._segments:
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                data,
                grad,
                exp_avg,
                exp_avg_sq,
                [],
                [self._step] * len(data),
                lr=lr,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                weight_decay=decay,
                eps=self._config.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=skip,
            )

    def moments(self) -> dict[str, Tensor]:
        """Return the live moments by name, [N, P] each."""
        return dict(zip(MOMENTS, (self.exp_avg_NP, self.exp_avg_sq_NP), strict=True))

    def snapshot(self) -> Snapshot:
        """Return copies of both moments, [N, P] in the arena's layout."""
        return Snapshot({name: copy_to_cpu(tensor) for name, tensor in self.moments().items()})

    def restore(self, saved: Snapshot) -> None:
        """Load what `snapshot` gave.

        Raises:
            StateMismatchError: Names, shapes or types differ; nothing has been changed.
        """
        own = self.moments()
        if {name: _form(tensor) for name, tensor in own.items()} != {
            name: _form(tensor) for name, tensor in saved.tensors.items()
        }:
            raise StateMismatchError(
                f"the saved moments {_forms(saved.tensors)} are not those of this optimizer "
                f"{_forms(own)}.",
                hint="restore a state of the same model",
            )
        for name, tensor in own.items():
            tensor.copy_(saved.tensors[name])


@torch.no_grad()
def mix(data_NP: Tensor, shares_NN: Tensor, *, skip: Tensor | None = None) -> None:
    """Replace every model's weights by its shares of all models' weights, in place.

    Args:
        data_NP: Weights.
        shares_NN: Row i mixes model i.
        skip: Scalar on the device; where it is 1 nothing changes.
    """
    size = MIXED_COLUMNS if data_NP.device.type == "cpu" else data_NP.shape[1]
    for columns_NC in data_NP.split(size, dim=1):
        mixed_NC = shares_NN @ columns_NC
        if skip is not None:
            mixed_NC = torch.where(skip > 0, columns_NC, mixed_NC)
        columns_NC.copy_(mixed_NC)


def reference_step(
    data_NP: Tensor,
    grad_NP: Tensor,
    exp_avg_NP: Tensor,
    exp_avg_sq_NP: Tensor,
    *,
    decay_size: int,
    config: OptimizerConfig,
    lr: float,
    step: int,
    factor_N: Tensor | None = None,
    mixing: Mixing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new weights and moments, written as the paper writes them: the twin of `AdamW.step`.

    Works in the precision of its inputs and changes none of them.
    """
    if factor_N is not None:
        grad_NP = grad_NP * factor_N.to(grad_NP.dtype)[:, None]
    if mixing is not None and mixing.before:
        data_NP = mixing.shares_NN.to(data_NP.dtype) @ data_NP
    decay_P = torch.zeros(data_NP.shape[1], dtype=data_NP.dtype, device=data_NP.device)
    decay_P[:decay_size] = config.weight_decay
    exp_avg_NP = config.beta1 * exp_avg_NP + (1 - config.beta1) * grad_NP
    exp_avg_sq_NP = config.beta2 * exp_avg_sq_NP + (1 - config.beta2) * grad_NP**2
    mean_NP = exp_avg_NP / (1 - config.beta1**step)
    square_NP = exp_avg_sq_NP / (1 - config.beta2**step)
    data_NP = data_NP * (1 - lr * decay_P) - lr * mean_NP / (square_NP.sqrt() + config.eps)
    if mixing is not None and not mixing.before:
        data_NP = mixing.shares_NN.to(data_NP.dtype) @ data_NP
    return data_NP, exp_avg_NP, exp_avg_sq_NP


def _rows(segment_NP: Tensor) -> list[Tensor]:
    return list(segment_NP.unbind(0)) if segment_NP.numel() else []


def _form(tensor: Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype)


def _forms(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "(none)"
