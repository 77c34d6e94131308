"""The group that rows are taken from, and the one being read for later: two slots, no more.

A slot is handed to the reader only after its rows have been copied or gathered, so batches that
cross groups must take the rows of one group before they ask for the next.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from atoll.data.groups import GroupSource
from atoll.data.order import Geometry, group_order
from atoll.data.placement import Placement
from atoll.data.reader import BackgroundReader
from atoll.data.rows import RowScatter
from atoll.data.trace import Activation, LoaderTrace
from atoll.errors import UsageError

GroupKey = tuple[int, int]
"""Pass and group, both from 0: they decide which rows come, and in which order."""

_NO_KEY: GroupKey = (-1, -1)


@dataclass(frozen=True, slots=True)
class ActiveGroup:
    """Rows of cursors [start, stop), complete and verified."""

    key: GroupKey
    start: int
    stop: int
    slot: Any
    rows: Any


@dataclass(frozen=True, slots=True)
class GroupLoader:
    """Makes groups; holds nothing that changes, so that both threads may use it in turn."""

    source: GroupSource
    placement: Placement
    geometry: Geometry
    seed: int
    shuffled: bool
    vocab_size: int

    def new_slot(self) -> Any:
        """Return memory that any group of the split fits in."""
        shape = self.geometry.max_rows, self.geometry.context_length + 1
        return self.placement.slot(shape, self.source.dtype, vocab_size=self.vocab_size)

    def read(self, key: GroupKey, slot: Any, stop: threading.Event | None) -> ActiveGroup:
        """Read, verify, shuffle and place a group; `stop` ends it with CancelledError."""
        group, num_rows = key[1], self.geometry.rows_in(key[1])
        rows_RU = self.placement.host(slot)[:num_rows]
        order_R = group_order(self.seed, *key, num_rows, shuffled=self.shuffled)
        origin = self.geometry.first_sequence(group) * self.geometry.context_length
        scatter = RowScatter(rows_RU, order_R, origin)
        self.source.read(group, scatter.add, stop=stop)
        scatter.finish()
        rows = self.placement.store(slot, num_rows)
        start = self.geometry.cursor_of(*key)
        return ActiveGroup(key, start, start + num_rows, slot, rows)


@dataclass(frozen=True, slots=True)
class _Prefetch:
    key: GroupKey
    slot: Any
    future: "Future[ActiveGroup]"


class GroupShelf:
    """Keeps the active group and, with `prefetch`, has a thread read the next one."""

    def __init__(
        self,
        loader: GroupLoader,
        *,
        num_rows: int,
        prefetch: bool,
        trace: LoaderTrace | None = None,
    ) -> None:
        """Start the reader where there will ever be a group to prefetch.

        Args:
            loader: Makes the groups.
            num_rows: Cursors that exist, over all passes.
            prefetch: Whether the next group is read ahead.
            trace: Collects activations.
        """
        self._loader = loader
        self._num_rows = num_rows
        self._trace = trace
        several = num_rows > loader.geometry.rows_in(0)
        self._reader = BackgroundReader[ActiveGroup]() if prefetch and several else None
        self._free: list[Any] = []
        self._pending: _Prefetch | None = None
        self._closed = False
        self.active: ActiveGroup | None = None

    @property
    def pending_prefetches(self) -> int:
        """Groups that were asked for and not taken yet, 0 or 1."""
        return int(self._pending is not None)

    @property
    def num_slots(self) -> int:
        """Groups held at most: the active one, and with prefetch the next."""
        return 1 if self._reader is None else 2

    def activate(self, cursor: int, *, batch: int) -> ActiveGroup:
        """Make the group of `cursor` the active one; rows of the old one are gone.

        Args:
            cursor: A row that the active group does not hold.
            batch: Number of the call that needs it, for the record.

        Raises:
            CacheError: The group is damaged; found by whichever thread read it.
            UsageError: The shelf is closed.
        """
        if self._closed:
            raise UsageError("the loader is closed.", hint="open a new one")
        started = self._trace.clock() if self._trace else 0.0
        place = self._loader.geometry.place(cursor)
        key = place.pass_index, place.group
        prefetched = self._pending is not None and self._pending.key == key
        ready = self._pending.future.done() if prefetched and self._pending else None
        self.active = self._take_pending() if prefetched else self._read_now(key)
        self._prefetch_next(self.active)
        if self._trace:
            seconds = self._trace.clock() - started
            group = place.group
            record = Activation(batch, group, cursor, prefetched, ready, seconds, started)
            self._trace.activations.append(record)
        return self.active

    def close(self) -> None:
        """Stop the reader, even in the middle of a read, and let go of all groups."""
        self._closed = True
        if self._reader is not None:
            self._reader.close()
        self._retire_active()
        self._pending = None
        self._free.clear()

    def _take_pending(self) -> ActiveGroup:
        pending = self._pending
        assert pending is not None
        error = pending.future.exception()
        self._pending = None
        if error is not None:
            self._free.append(pending.slot)
            raise error
        self._retire_active()
        return pending.future.result()

    def _read_now(self, key: GroupKey) -> ActiveGroup:
        self._drop_pending()
        self._retire_active()
        slot = self._take_slot()
        try:
            return self._loader.read(key, slot, None)
        except BaseException:
            self._free.append(slot)
            raise

    def _prefetch_next(self, active: ActiveGroup) -> None:
        if self._reader is None or active.stop >= self._num_rows:
            return
        place = self._loader.geometry.place(active.stop)
        key = place.pass_index, place.group
        slot = self._take_slot()
        work = partial(self._loader.read, key, slot)
        self._pending = _Prefetch(key, slot, self._reader.submit(work))

    def _drop_pending(self) -> None:
        """Give up what is being read; its slot is free afterwards."""
        if self._pending is None or self._reader is None:
            return
        # Interrupted while it waits, this must not leave a half-read group under its key.
        self._pending = replace(self._pending, key=_NO_KEY)
        self._reader.abandon(self._pending.future)
        self._free.append(self._pending.slot)
        self._pending = None

    def _retire_active(self) -> None:
        if self.active is not None:
            self._loader.placement.retire(self.active.slot)
            self._free.append(self.active.slot)
            self.active = None

    def _take_slot(self) -> Any:
        return self._free.pop() if self._free else self._loader.new_slot()
