"""Assembly of a batch against a bare numpy gather of the same rows.

Shapes: R rows of the group, B rows of a batch, T tokens of a row, U = T + 1.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
from pydantic import Field

from atoll.bench.contest import Contest, Target
from atoll.bench.timing import Condition
from atoll.config.base import Section
from atoll.data.cachewriter import write_cache
from atoll.data.loader import TokenLoader
from atoll.data.order import group_order
from atoll.errors import AtollError

SEED = 0


class BatchSettings(Section):
    rows: int = Field(default=128, ge=1)
    """Rows of a batch."""
    context_length: int = Field(default=1024, ge=1)
    """Tokens of a row."""
    group_tokens: int = Field(default=67_108_864, ge=2)
    """Tokens of the shard group that rows are taken from."""
    vocab_size: int = Field(default=32_000, ge=2)
    """Ids; decides whether tokens take 2 or 4 bytes."""
    window_seconds: float = Field(default=0.2, ge=0)
    """Shortest window."""


def batch_contests(settings: BatchSettings) -> Iterator[Contest]:
    """Yield the contest; the cache it reads is removed afterwards."""
    generator = np.random.default_rng(SEED)
    dtype = np.uint16 if settings.vocab_size <= 65_536 else np.uint32
    tokens = generator.integers(0, settings.vocab_size, settings.group_tokens, dtype=dtype)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        shard_tokens = -(-settings.group_tokens // 2)
        cache = write_cache(
            Path(folder) / "cache",
            train=tokens,
            vocab_size=settings.vocab_size,
            shard_tokens=shard_tokens,
        )
        loader = TokenLoader(
            cache, "train", context_length=settings.context_length, seed=SEED, group_shards=2
        )
        try:
            yield _contest(settings, tokens, loader)
        finally:
            loader.close()


def _contest(settings: BatchSettings, tokens: np.ndarray, loader: TokenLoader) -> Contest:
    rows, width = settings.rows, settings.context_length + 1
    num_batches = loader.num_rows // rows
    if num_batches < 1:
        raise AtollError(f"the group holds {loader.num_rows} rows, and a batch takes {rows}.")
    gathers = _gathers(tokens, loader.num_rows, rows, width)
    check_rows(loader, gathers, rows)
    chosen = _fastest(gathers, num_batches)
    ours, theirs = _cycle(num_batches), _cycle(num_batches)
    return Contest(
        name=f"batch, {rows} rows of {settings.context_length}",
        a=Condition("atoll", lambda: loader.batch(next(ours) * rows, rows)),
        b=Condition("numpy gather", lambda: gathers[chosen](next(theirs))),
        target=Target("time", 1.3),
        window_seconds=settings.window_seconds,
        facts={"gather": chosen, "batches_in_the_group": num_batches, "dtype": str(tokens.dtype)},
    )


def _gathers(
    tokens: np.ndarray, num_rows: int, rows: int, width: int
) -> dict[str, Callable[[int], np.ndarray]]:
    """Return bare ways to fill one preallocated int64 array with the rows of batch k."""
    order_R = group_order(SEED, 0, 0, num_rows, shuffled=True)
    strides = (width - 1) * tokens.itemsize, tokens.itemsize
    windows_RU = np.lib.stride_tricks.as_strided(tokens, (num_rows, width), strides)
    out_BU = np.empty((rows, width), np.int64)

    def fancy(k: int) -> np.ndarray:
        out_BU[...] = windows_RU[order_R[k * rows : (k + 1) * rows]]
        return out_BU

    def row_by_row(k: int) -> np.ndarray:
        for place, row in enumerate(order_R[k * rows : (k + 1) * rows].tolist()):
            out_BU[place] = windows_RU[row]
        return out_BU

    return {"index, then cast": fancy, "row by row": row_by_row}


def check_rows(
    loader: TokenLoader, gathers: dict[str, Callable[[int], np.ndarray]], rows: int
) -> None:
    """Compare the first and the last batch.

    Raises:
        AtollError: A gather takes other rows than the loader.
    """
    for name, gather in gathers.items():
        for k in (0, loader.num_rows // rows - 1):
            batch, bare_BU = loader.batch(k * rows, rows), gather(k)
            same_inputs = np.array_equal(batch.inputs_BT.numpy(), bare_BU[:, :-1])
            same_targets = np.array_equal(batch.targets_BT.numpy(), bare_BU[:, 1:])
            if not (same_inputs and same_targets):
                raise AtollError(f"batch {k} of the loader is not what `{name}` gathers.")


def _fastest(gathers: dict[str, Callable[[int], np.ndarray]], num_batches: int) -> str:
    """Return the bare gather that takes least, so that the loader is held against the best."""
    best: dict[str, float] = {}
    for name, gather in gathers.items():
        for k in range(min(50, 2 * num_batches)):
            started = perf_counter()
            gather(k % num_batches)
            elapsed_seconds = perf_counter() - started
            best[name] = min(best.get(name, elapsed_seconds), elapsed_seconds)
    return min(best, key=lambda name: best[name])


def _cycle(count: int) -> Iterator[int]:
    while True:
        yield from range(count)
