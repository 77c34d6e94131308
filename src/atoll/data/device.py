"""Shard groups that live on the device that trains; see `atoll.data.placement`.

Tokens keep the cache's width (2 or 4 bytes) under the signed element type of that width, because
unsigned ones lack operations on some devices. Ids that use the sign bit are masked after widening.

Shapes: B rows of a batch, T tokens of a row, U = T + 1, R rows of a group.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from atoll.data.placement import Part, PlacementName, split_tokens
from atoll.data.trace import LoaderTrace


@dataclass(slots=True)
class DeviceSlot:
    """Device memory for one group, and the events after the last work that read it."""

    rows_RU: torch.Tensor
    last_use: list[Any] = field(default_factory=list)


class DevicePlacement:
    """Groups on the device; a batch is a slice of one, widened there, without host memory.

    A group is read into one pinned staging buffer and uploaded on a stream of its own by the thread
    that read it, which waits for the upload: an activation only exchanges references. With a CPU
    device everything runs on CPU tensors in the same way, without streams.
    """

    name: PlacementName = "device"

    def __init__(self, device: torch.device, *, trace: LoaderTrace | None = None) -> None:
        self._device = device
        self._trace = trace
        self._upload_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._readers: dict[int, torch.cuda.Stream] = {}
        self._staging = torch.empty(0)
        self._host = np.empty(0)
        self._mask: int | None = None

    def slot(self, shape: tuple[int, int], dtype: np.dtype[Any], *, vocab_size: int) -> DeviceSlot:
        signed = _SIGNED[dtype.itemsize]
        bits = 8 * dtype.itemsize
        self._mask = (1 << bits) - 1 if vocab_size > 1 << (bits - 1) else None
        # A loader opened under inference mode is filled by a thread that is not in it.
        with torch.inference_mode(False):
            if self._staging.shape != shape:
                pinned = self._upload_stream is not None
                self._staging = torch.empty(shape, dtype=signed, pin_memory=pinned)
                self._host = self._staging.numpy().view(dtype)
            slot = DeviceSlot(torch.empty(shape, dtype=signed, device=self._device))
        if self._upload_stream is not None:
            # The allocator may hand out memory that kernels enqueued on this stream still read.
            slot.last_use.append(torch.cuda.current_stream(self._device).record_event())
        return slot

    def host(self, slot: DeviceSlot) -> np.ndarray:
        return self._host

    def store(self, slot: DeviceSlot, num_rows: int) -> torch.Tensor:
        staged_RU, rows_RU = self._staging[:num_rows], slot.rows_RU[:num_rows]
        if self._upload_stream is None:
            return rows_RU.copy_(staged_RU)
        with torch.cuda.stream(self._upload_stream):
            for event in slot.last_use:
                self._upload_stream.wait_event(event)
            rows_RU.copy_(staged_RU, non_blocking=True)
        # Waited for here, so that the staging buffer is free and the rows are usable on any stream
        # without a further event. The step thread waits only where it reads a group itself.
        self._upload_stream.synchronize()
        slot.last_use.clear()
        return rows_RU

    def retire(self, slot: DeviceSlot) -> None:
        for stream in self._readers.values():
            slot.last_use.append(stream.record_event())
            slot.rows_RU.record_stream(stream)
        self._readers.clear()

    def gather(
        self, parts: Iterable[Part], num_rows: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = []
        for part in parts:
            if self._upload_stream is not None:
                stream = torch.cuda.current_stream(self._device)
                self._readers[stream.cuda_stream] = stream
            pieces.append(self._take(part))
        tokens_BU = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        missing = num_rows - len(tokens_BU)
        if missing:
            tokens_BU = torch.nn.functional.pad(tokens_BU, (0, 0, 0, missing))
        return split_tokens(tokens_BU)

    def memory(self, slot_bytes: int, num_slots: int) -> tuple[int, int]:
        # torch's pinned allocator rounds up to a power of two.
        pinned_bytes = 1 << (slot_bytes - 1).bit_length()
        host_bytes = slot_bytes if self._upload_stream is None else pinned_bytes
        return host_bytes, slot_bytes * num_slots

    def _take(self, part: Part) -> torch.Tensor:
        if self._trace is not None:
            return self._trace.stage("gather", lambda: self._widen(part))
        return self._widen(part)

    def _widen(self, part: Part) -> torch.Tensor:
        tokens_BU = part.rows[part.index : part.index + part.count].to(torch.int64)
        return tokens_BU if self._mask is None else tokens_BU.bitwise_and_(self._mask)


_SIGNED = {2: torch.int16, 4: torch.int32}
