"""Rows of one split of a token cache, as a pure function of the cursor.

At any moment one shard group is active and, with prefetch, the next one in the order of cursors is
read and verified by a background thread. Reading on in order never waits for a disk that keeps up;
a jump to another group is answered correctly and costs a read.

    batch(cursor, rows) -> places of those rows -> active group (exchanged where rows cross into
    the next) -> placement.gather -> Batch

Shapes: B rows, T tokens per row.
"""

from collections.abc import Callable, Iterator

import torch

from atoll.data.batch import IGNORE, Batch
from atoll.data.cache import Cache, SplitName
from atoll.data.groups import PIECE_BYTES, GroupReader, GroupSource
from atoll.data.order import ORDER_VERSION, split_geometry
from atoll.data.placement import Part, Placement, PlacementName, build_placement
from atoll.data.shelf import GroupLoader, GroupShelf
from atoll.data.trace import LoaderTrace
from atoll.errors import CacheError, ConfigError, UsageError
from atoll.files import identity


class TokenLoader:
    """A `Loader` over one split: shuffled whole sequences to train on, or all tokens in order.

    Training drops the last partial sequence. Validation keeps the order of the file and pads the
    last row; a batch may reach beyond it, and rows that do not exist are all padding: inputs 0,
    targets IGNORE. Not thread-safe: one loader for each thread that asks.
    """

    def __init__(
        self,
        cache: Cache,
        split: SplitName,
        *,
        context_length: int,
        seed: int,
        group_shards: int,
        passes: int = 1,
        prefetch: bool = True,
        placement: PlacementName | Placement = "pageable",
        device: torch.device | str = "cpu",
        trace: LoaderTrace | None = None,
        around_source: Callable[[GroupSource], GroupSource] | None = None,
    ) -> None:
        """Open the split; nothing is read before the first batch.

        Args:
            cache: A finished cache.
            split: "train" or "validation".
            context_length: T, targets of a row.
            seed: `data.shuffle_seed`, decides the order of training rows.
            group_shards: `data.shuffle_group_size`.
            passes: Traversals of the training split.
            prefetch: Whether a thread reads the next group ahead.
            placement: Where batches are made, by name or as an object.
            device: Where batches are wanted.
            trace: Collects measurements; without one nothing is measured.
            around_source: Returns what reads groups in place of the reader it is given.

        Raises:
            DataError: The split is missing or too short for one row.
            CacheError: A shard is missing or has another size than the manifest says.
            UnavailableError: The placement needs a GPU and there is none.
        """
        if passes < 1 or (passes > 1 and split == "validation"):
            raise UsageError(f"{passes} passes over the {split} split were asked for.")
        self._geometry = split_geometry(
            cache.manifest, split, context_length=context_length, group_shards=group_shards
        )
        self._cache = cache
        self._split: SplitName = split
        self._seed = seed
        self._passes = passes
        self._num_rows = passes * self._geometry.sequences
        self._trace = trace
        if isinstance(placement, str):
            placement = build_placement(placement, device, trace=trace)
        self._placement = placement
        source: GroupSource = GroupReader(cache, split, self._geometry, trace=trace)
        loader = GroupLoader(
            source=around_source(source) if around_source else source,
            placement=placement,
            geometry=self._geometry,
            seed=seed,
            shuffled=split == "train",
            vocab_size=cache.manifest.tokenizer.vocab_size,
        )
        self._shelf = GroupShelf(loader, num_rows=self._num_rows, prefetch=prefetch, trace=trace)
        self._num_batches = 0

    @property
    def identity(self) -> str:
        """SHA-256 over the cache, the split and all that decides the order of its rows."""
        return identity(
            {
                "cache": self._cache.manifest.cache_identity,
                "split": self._split,
                "context_length": self._geometry.context_length,
                "seed": self._seed,
                "group_shards": self._geometry.group_shards,
                "order_version": ORDER_VERSION,
            }
        )

    @property
    def num_rows(self) -> int:
        """Rows of all passes; for validation with the padded last one."""
        return self._num_rows

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the end of the split that no row covers: less than one sequence."""
        return self._geometry.dropped_tokens

    @property
    def pending_prefetches(self) -> int:
        """Groups asked of the background reader and not taken yet; 0 after `close`."""
        return self._shelf.pending_prefetches

    @property
    def peak_host_bytes(self) -> int:
        """Host memory that this loader holds at most: groups and permutations, without batches.

        One batch of B rows takes another 8 B (T + 1) bytes. `pageable` keeps the memory of up to
        three dead batches for new ones, `pinned` has a ring of eight.
        """
        return self._memory()[0]

    @property
    def peak_device_bytes(self) -> int:
        """Device memory that this loader holds at most, without batches."""
        return self._memory()[1]

    def batch(self, cursor: int, rows: int) -> Batch:
        """Return rows [cursor, cursor + rows); they own their memory.

        Args:
            cursor: Rows consumed before; 0 <= cursor < num_rows.
            rows: At least 1. In training all must exist; in validation rows after the last are
                padding.

        Raises:
            CacheError: A group does not match its digests, or the rows do not exist; then the
                message says how many tokens are missing.
        """
        if self._trace is None:
            return self._batch(cursor, rows)
        return self._trace.batch(lambda: self._batch(cursor, rows))

    def weight(self, cursor: int, rows: int) -> float:
        """Return the number of targets that count in those rows, from the geometry alone."""
        stop = self._stop_of(cursor, rows)
        return float(self._geometry.targets_before(stop) - self._geometry.targets_before(cursor))

    def require_rows(self, rows: int) -> None:
        """Refuse a budget of `rows` before anything runs.

        Raises:
            ConfigError: The passes over this split do not hold that many.
        """
        if rows > self._num_rows:
            message, hint = self._shortage(rows)
            raise ConfigError([message], hint=hint)

    def close(self) -> None:
        """Stop the background reader and release all groups; closing twice is allowed."""
        self._shelf.close()

    def __enter__(self) -> "TokenLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batch(self, cursor: int, rows: int) -> Batch:
        stop = self._stop_of(cursor, rows)
        self._num_batches += 1
        active = self._shelf.active
        if active is not None and active.start <= cursor and stop <= active.stop:
            parts = (Part(active.rows, cursor - active.start, stop - cursor),)
        else:
            parts = self._parts(cursor, stop)
        width = self._geometry.context_length + 1
        inputs_BT, targets_BT = self._placement.gather(parts, rows, width)
        if self._geometry.pads_last:
            targets_BT = self._ignore_padding(targets_BT, cursor)
        return Batch(inputs_BT, targets_BT)

    def _parts(self, cursor: int, stop: int) -> Iterator[Part]:
        """Give the rows [cursor, stop) group by group, making each group active in its turn."""
        while cursor < stop:
            active = self._shelf.active
            if active is None or not active.start <= cursor < active.stop:
                active = self._shelf.activate(cursor, batch=self._num_batches)
            count = min(stop, active.stop) - cursor
            yield Part(active.rows, cursor - active.start, count)
            cursor += count

    def _ignore_padding(self, targets_BT: torch.Tensor, cursor: int) -> torch.Tensor:
        """Return the targets with IGNORE wherever the split has no next token."""
        whole_rows, rest = divmod(self._geometry.targets, self._geometry.context_length)
        first = whole_rows - cursor
        if first >= len(targets_BT):
            return targets_BT
        # Inputs and targets share memory, and the padded ones differ.
        targets_BT = targets_BT.clone()
        if rest:
            targets_BT[first, rest:] = IGNORE
            first += 1
        targets_BT[first:] = IGNORE
        return targets_BT

    def _stop_of(self, cursor: int, rows: int) -> int:
        """Return the cursor after the last existing row of a request, or refuse the request."""
        stop = cursor + rows
        if 0 <= cursor < stop <= self._num_rows:
            return stop
        if cursor < 0 or rows < 1:
            raise UsageError(f"{rows} rows from cursor {cursor} were asked for.")
        if self._geometry.pads_last and cursor < self._num_rows:
            return self._num_rows
        message, hint = self._shortage(stop)
        raise CacheError(message, hint=hint)

    def _shortage(self, rows: int) -> tuple[str, str]:
        length, per_pass = self._geometry.context_length, self._geometry.sequences
        missing = (rows - self._num_rows) * length
        message = (
            f"{rows} sequences of {length} targets are needed; {self._passes} pass(es) over the "
            f"{self._split} split of {self._cache.folder} hold {self._num_rows}: "
            f"{missing} tokens are missing."
        )
        if self._split == "validation":
            return message, "ask for rows below num_rows"
        return message, (
            f"set data.passes to {-(-rows // per_pass)}, lower training.tokens_per_parameters, "
            "or prepare more text"
        )

    def _memory(self) -> tuple[int, int]:
        rows, length = self._geometry.max_rows, self._geometry.context_length
        slot_bytes = rows * (length + 1) * self._cache.dtype.itemsize
        host, device = self._placement.memory(slot_bytes, self._shelf.num_slots)
        # While a group is read: its permutation, the inverse, and the words both come from.
        return host + PIECE_BYTES + 3 * 8 * rows, device
