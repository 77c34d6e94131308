"""Where shard groups live and how rows become a batch.

pageable  groups in host memory; each batch is a new int64 array, pinned and copied for a GPU
pinned    groups in host memory; rows are written straight into pinned memory, then copied
device    groups in GPU memory in the cache's own element type; a batch is widened there

Every batch owns its memory: nothing that the loader does later changes it. `inputs_BT` and
`targets_BT` are views of one [B, T + 1] buffer, since each target is the next input; they are not
contiguous, and a change to one shows in the other. All placements give the same rows.

Shapes: B rows of a batch, T tokens of a row, U = T + 1, R rows of a group.
"""

import ctypes
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from atoll.data.trace import LoaderTrace
from atoll.errors import UnavailableError, UsageError

PlacementName = Literal["pageable", "pinned", "device"]


@dataclass(frozen=True, slots=True)
class Part:
    """`count` rows of one group from the `index`-th read on; `rows` is what `store` returned."""

    rows: Any
    index: int
    count: int


class Placement(Protocol):
    """Storage for groups, and the making of batches from them.

    The step thread calls `slot`, `retire` and `gather`; whichever thread reads a group calls `host`
    and `store`, one group at a time.
    """

    @property
    def name(self) -> PlacementName:
        """What the recipe calls it."""
        ...

    def slot(self, shape: tuple[int, int], dtype: np.dtype[Any], *, vocab_size: int) -> Any:
        """Return memory for a group of up to [R, U] tokens, all of them ids below `vocab_size`."""
        ...

    def host(self, slot: Any) -> np.ndarray:
        """Return the host array of that shape that rows are written to before `store`."""
        ...

    def store(self, slot: Any, num_rows: int) -> Any:
        """Make the first rows of the host array usable; on return they are complete."""
        ...

    def retire(self, slot: Any) -> None:
        """Take note that the slot's rows are asked for no more and it may be filled again."""
        ...

    def gather(
        self, parts: Iterable[Part], num_rows: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs_BT and targets_BT of `num_rows` rows of `width` = U tokens.

        Rows beyond the parts are 0. The rows of one part are taken before the next part is asked
        for, because its group may take the place of theirs.
        """
        ...

    def memory(self, slot_bytes: int, num_slots: int) -> tuple[int, int]:
        """Return the (host, device) bytes that so many slots of so many bytes take."""
        ...


def resolve_placement(
    name: Literal["auto", "pageable", "pinned", "device"], device: torch.device | str
) -> PlacementName:
    """Return what `data.placement` means on `device`: `auto` is device on a GPU, else pageable."""
    if name != "auto":
        return name
    return "device" if torch.device(device).type == "cuda" else "pageable"


def build_placement(
    name: PlacementName, device: torch.device | str, *, trace: LoaderTrace | None = None
) -> Placement:
    """Return the placement called `name` for batches on `device`.

    Raises:
        UnavailableError: `pinned` or `device` was asked for without a CUDA device.
    """
    device = torch.device(device)
    if name != "pageable" and device.type != "cuda":
        raise UnavailableError(
            f"data.placement is {name!r}, which needs a CUDA device; the device is {device}.",
            hint="set data.placement to auto or pageable",
        )
    match name:
        case "pageable":
            return HostPlacement(PageableBatches(device, trace=trace))
        case "pinned":
            return HostPlacement(PinnedBatches(device, trace=trace))
        case "device":
            from atoll.data.device import DevicePlacement

            return DevicePlacement(device, trace=trace)


class HostBatches(Protocol):
    """Memory for one batch on the host, and its way to the device."""

    @property
    def name(self) -> PlacementName:
        """What the recipe calls this way."""
        ...

    def buffer(self, num_rows: int, width: int) -> np.ndarray:
        """Return int64 memory [num_rows, width] for the next batch."""
        ...

    def deliver(self, buffer_BU: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets on the device; called once for each buffer."""
        ...


class HostPlacement:
    """Groups in host memory; `batches` decides how rows reach the device.

    `batches` may be exchanged between two batches of one loader, to compare ways on equal ground.
    """

    def __init__(self, batches: HostBatches) -> None:
        self.batches = batches

    @property
    def name(self) -> PlacementName:
        return self.batches.name

    def slot(self, shape: tuple[int, int], dtype: np.dtype[Any], *, vocab_size: int) -> np.ndarray:
        return np.empty(shape, dtype)

    def host(self, slot: np.ndarray) -> np.ndarray:
        return slot

    def store(self, slot: np.ndarray, num_rows: int) -> np.ndarray:
        return slot[:num_rows]

    def retire(self, slot: np.ndarray) -> None:
        """Nothing to do: a batch is a copy, finished before `gather` returns."""

    def gather(
        self, parts: Iterable[Part], num_rows: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        buffer_BU = self.batches.buffer(num_rows, width)
        row = 0
        for part in parts:
            rows_BU = part.rows[part.index : part.index + part.count]
            buffer_BU[row : row + part.count] = rows_BU
            row += part.count
        if row < num_rows:
            buffer_BU[row:] = 0
        return self.batches.deliver(buffer_BU)

    def memory(self, slot_bytes: int, num_slots: int) -> tuple[int, int]:
        return slot_bytes * num_slots, 0


class PageableBatches:
    """An int64 array for each batch; for a GPU it is pinned and copied without waiting."""

    name: PlacementName = "pageable"

    def __init__(self, device: torch.device, *, trace: LoaderTrace | None = None) -> None:
        self._device = device
        self._trace = trace
        self._pool = _BufferPool()

    def buffer(self, num_rows: int, width: int) -> np.ndarray:
        return self._pool.take(num_rows, width)

    def deliver(self, buffer_BU: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if self._device.type == "cpu":
            return torch.from_numpy(buffer_BU[:, :-1]), torch.from_numpy(buffer_BU[:, 1:])
        tokens_BU = torch.from_numpy(buffer_BU)
        if self._device.type != "cuda":
            return split_tokens(tokens_BU.to(self._device))
        # The caching host allocator keeps a pinned block until the copies from it have run, on
        # whichever streams they were enqueued.
        if self._trace is None:
            return split_tokens(tokens_BU.pin_memory().to(self._device, non_blocking=True))
        pinned_BU = self._trace.stage("pin", tokens_BU.pin_memory)
        return split_tokens(self._trace.copy(pinned_BU, self._device))


class _BufferPool:
    """Memory of dead batches for new ones: fresh pages cost as much as a batch.

    An array is handed out over a lease, an object that exports the memory. Whatever is made of the
    array, also what torch holds, keeps the lease alive; when it dies the memory is free again.
    """

    def __init__(self, *, keep: int = 3) -> None:
        self._keep = keep
        self._free: list[np.ndarray] = []
        self._leases: dict[int, tuple[weakref.ref[Any], np.ndarray]] = {}

    def take(self, num_rows: int, width: int) -> np.ndarray:
        """Return int64 memory [num_rows, width] that nothing else refers to."""
        size = num_rows * width
        memory = self._free.pop() if self._free else None
        if memory is None or memory.size < size:
            memory = np.empty(size, np.int64)
        lease = (ctypes.c_int64 * size).from_buffer(memory.data)
        reference = weakref.ref(lease, self._returned)
        self._leases[id(reference)] = reference, memory
        return np.ndarray((num_rows, width), np.int64, memoryview(lease))

    def _returned(self, reference: weakref.ref[Any]) -> None:
        _, memory = self._leases.pop(id(reference))
        if len(self._free) < self._keep:
            self._free.append(memory)


class PinnedBatches:
    """A ring of pinned buffers that rows are written into; an event guards each until it is copied.

    The host may run `depth` copies ahead of the GPU; one more waits for the oldest.
    """

    name: PlacementName = "pinned"

    def __init__(
        self, device: torch.device, *, depth: int = 8, trace: LoaderTrace | None = None
    ) -> None:
        if depth < 1:
            raise UsageError(f"the ring has {depth} buffers; it needs at least 1.")
        self._device = device
        self._trace = trace
        self._ring = [_PinnedBuffer() for _ in range(depth)]
        self._next = 0

    def buffer(self, num_rows: int, width: int) -> np.ndarray:
        slot = self._ring[self._next]
        slot.copied.synchronize()
        if slot.array.size < num_rows * width:
            slot.tokens = torch.empty(num_rows * width, dtype=torch.int64, pin_memory=True)
            slot.array = slot.tokens.numpy()
        return slot.array[: num_rows * width].reshape(num_rows, width)

    def deliver(self, buffer_BU: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        slot = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        pinned_BU = slot.tokens[: buffer_BU.size].view(buffer_BU.shape)
        if self._trace is None:
            tokens_BU = pinned_BU.to(self._device, non_blocking=True)
        else:
            tokens_BU = self._trace.copy(pinned_BU, self._device)
        slot.copied.record(torch.cuda.current_stream(self._device))
        return split_tokens(tokens_BU)


class _PinnedBuffer:
    """Pinned memory, the same as an array, and the event after the last copy from it."""

    def __init__(self) -> None:
        self.tokens = torch.empty(0, dtype=torch.int64)
        self.array = self.tokens.numpy()
        self.copied = torch.cuda.Event(blocking=True)


def split_tokens(tokens_BU: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs_BT and targets_BT as views of the tokens of each row."""
    return tokens_BU[:, :-1], tokens_BU[:, 1:]
