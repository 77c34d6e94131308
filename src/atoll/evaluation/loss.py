"""Token-weighted cross-entropy on held-out rows, in nats per token and in bits per byte.

Shapes: N local models, B rows of one forward, T tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.data.batch import Batch, Loader
from atoll.errors import DataError, NonFiniteError
from atoll.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class LossResult:
    """How well a model predicts some rows.

    Attributes:
        nats: Summed cross-entropy of all counted targets.
        targets: Summed weight of the counted targets; padding has none.
        rows: Sequences that were scored.
        text_bytes: UTF-8 bytes of the text behind these targets, None where it is not known.
    """

    nats: float
    targets: float
    rows: int
    text_bytes: float | None

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.targets

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that the model needs for a byte of the text; comparable across tokenizers."""
        return None if self.text_bytes is None else self.nats / math.log(2) / self.text_bytes

    def facts(self) -> dict[str, float | int | None]:
        """Return the figures under the names that artifacts use."""
        return {
            "loss_nats_per_token": self.nats_per_token,
            "bits_per_byte": self.bits_per_byte,
            "targets": self.targets,
            "sequences": self.rows,
            "text_bytes": self.text_bytes,
        }


def evaluate_loss(
    model: nn.Module,
    loader: Loader,
    *,
    rows: Sequence[int] | None = None,
    batch_size: int,
    text_bytes: int | None = None,
    amp: torch.dtype | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> LossResult | None:
    """Score rows of a split; every target counts by its weight, padding not at all.

    Args:
        model: One model (N = 1) with the forward of `Llama`.
        loader: The split.
        rows: Numbers of the rows, ascending. Default: all of them.
        batch_size: Rows of one forward; the result does not depend on it, but for rounding.
        text_bytes: UTF-8 bytes of the whole split's text; a part of the rows gets its share by
            targets.
        amp: Autocast type, None for none.
        should_stop: Asked before each forward.

    Returns:
        The result, or None where `should_stop` ended it early.

    Raises:
        DataError: None of the rows has a counted target.
        NonFiniteError: The loss is not a finite number.
    """
    rows = range(loader.num_rows) if rows is None else rows
    sums: list[Tensor] = []
    with torch.inference_mode():
        for batch in _batches(loader, rows, batch_size):
            if should_stop():
                return None
            columns = (batch.inputs_BT, batch.targets_BT, batch.weights_BT)
            columns += (batch.positions_BT, batch.documents_BT)
            kind = batch.inputs_BT.device.type
            with nullcontext() if amp is None else torch.autocast(kind, dtype=amp):
                nats_N, weight_N = model(*(None if c is None else c.unsqueeze(0) for c in columns))
            sums.append(torch.stack((nats_N[0], weight_N[0])))
    # One wait for the device; float64 on the host, so that many batches add up exactly enough.
    nats, targets = torch.stack(sums).cpu().double().sum(0).tolist() if sums else (0.0, 0.0)
    if not targets:
        raise DataError(
            f"{len(rows)} held-out sequences hold no target to score.",
            hint="raise data.validation_fraction, or give a larger data.validation_source",
        )
    if not math.isfinite(nats):
        raise NonFiniteError(
            f"the held-out loss over {targets:.0f} targets is {nats}.",
            hint="an earlier checkpoint may be sound; lower optimizer.lr or set "
            "optimizer.grad_clip",
        )
    share = None
    if text_bytes is not None:
        share = text_bytes * targets / loader.weight(0, loader.num_rows)
    return LossResult(nats, targets, len(rows), share)


def subset_rows(num_rows: int, *, count: int, seed: int) -> Sequence[int]:
    """Return `count` rows of a split, ascending, fixed by the seed; all rows where fewer exist."""
    if count >= num_rows:
        return range(num_rows)
    generator = torch.Generator().manual_seed(derive_seed(seed, "evaluation subset"))
    return sorted(torch.randperm(num_rows, generator=generator)[:count].tolist())


def _batches(loader: Loader, rows: Sequence[int], batch_size: int) -> Iterator[Batch]:
    """Yield the rows in groups of `batch_size`; neighbours are asked for in one call."""
    for start in range(0, len(rows), batch_size):
        parts = [loader.batch(first, count) for first, count in _runs(rows[start:][:batch_size])]
        yield parts[0] if len(parts) == 1 else _joined(parts)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of each stretch of consecutive numbers."""
    first = previous = rows[0]
    for row in rows[1:]:
        if row != previous + 1:
            yield first, previous + 1 - first
            first = row
        previous = row
    yield first, previous + 1 - first


def _joined(parts: list[Batch]) -> Batch:
    def join(column: list[Tensor | None]) -> Tensor | None:
        given = [part for part in column if part is not None]
        return torch.cat(given) if given else None

    return Batch(
        torch.cat([part.inputs_BT for part in parts]),
        torch.cat([part.targets_BT for part in parts]),
        join([part.weights_BT for part in parts]),
        join([part.positions_BT for part in parts]),
        join([part.documents_BT for part in parts]),
    )
