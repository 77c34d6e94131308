"""Shard groups that live on the device that trains; see `atoll.data.placement`.

Tokens keep the cache's width (2 or 4 bytes) under a signed element type of that width: indexing
unsigned 16- and 32-bit tensors is not implemented on every device and version. Ids that use the
sign bit are masked after widening.

Shapes: B rows of a batch, T tokens of a row, U = T + 1, R rows of a group.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from atoll.data.placement import GroupRows, Part, PlacementName, split_tokens
from atoll.data.trace import LoaderTrace


@dataclass(slots=True)
class DeviceSlot:
    """Device memory for one group, and the events after the last work that read it."""

    tokens: torch.Tensor
    last_use: list[Any] = field(default_factory=list)


class DevicePlacement:
    """Groups on the device; a batch is a gather and a widening there, without host memory.

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
        self._staging = np.empty(0, np.uint16)
        self._mask: int | None = None

    def slot(self, size: int, dtype: np.dtype[Any], *, vocab_size: int) -> DeviceSlot:
        kind = _SIGNED[dtype.itemsize]
        bits = 8 * dtype.itemsize
        self._mask = (1 << bits) - 1 if vocab_size > 1 << (bits - 1) else None
        on_gpu = self._upload_stream is not None
        if self._staging.size < size or self._staging.dtype != dtype:
            staging = torch.empty(size, dtype=kind, pin_memory=on_gpu)
            self._staging = staging.numpy().view(dtype)
        slot = DeviceSlot(torch.empty(size, dtype=kind, device=self._device))
        if on_gpu:
            # The allocator may hand out memory that kernels enqueued on this stream still read.
            slot.last_use.append(torch.cuda.current_stream(self._device).record_event())
        return slot

    def host(self, slot: DeviceSlot) -> np.ndarray:
        return self._staging

    def store(
        self, slot: DeviceSlot, *, offset: int, context_length: int, order_R: np.ndarray
    ) -> GroupRows[torch.Tensor]:
        used = offset + len(order_R) * context_length + 1
        assert used <= len(slot.tokens)
        signed = self._staging.view(f"i{self._staging.itemsize}")
        self._upload(slot, torch.from_numpy(signed[:used]))
        shape, strides = (len(order_R), context_length + 1), (context_length, 1)
        windows_RU = torch.as_strided(slot.tokens, shape, strides, offset)
        return GroupRows(windows_RU, self._order(order_R))

    def reorder(
        self, rows: GroupRows[torch.Tensor], order_R: np.ndarray
    ) -> GroupRows[torch.Tensor]:
        return GroupRows(rows.windows_RU, self._order(order_R))

    def retire(self, slot: DeviceSlot, rows: GroupRows[torch.Tensor]) -> None:
        for stream in self._readers.values():
            slot.last_use.append(stream.record_event())
            slot.tokens.record_stream(stream)
            rows.order_R.record_stream(stream)
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
            return self._trace.stage("gather", lambda: self._gather(part))
        return self._gather(part)

    def _gather(self, part: Part) -> torch.Tensor:
        chosen = part.rows.order_R[part.index : part.index + part.count]
        tokens_BU = part.rows.windows_RU.index_select(0, chosen).to(torch.int64)
        return tokens_BU if self._mask is None else tokens_BU.bitwise_and_(self._mask)

    def _upload(self, slot: DeviceSlot, staged: torch.Tensor) -> None:
        """Copy what was read into the slot, after all work that still reads its old content."""
        if self._upload_stream is None:
            slot.tokens[: len(staged)].copy_(staged)
            return
        with torch.cuda.stream(self._upload_stream):
            for event in slot.last_use:
                self._upload_stream.wait_event(event)
            slot.tokens[: len(staged)].copy_(staged, non_blocking=True)
        # The reader thread waits, so that the staging buffer is free and the group is usable on
        # any stream without a further event. The step thread waits only if it reads itself.
        self._upload_stream.synchronize()
        slot.last_use.clear()

    def _order(self, order_R: np.ndarray) -> torch.Tensor:
        order = torch.from_numpy(order_R)
        if self._upload_stream is None:
            return order
        with torch.cuda.stream(self._upload_stream):
            uploaded = order.to(self._device)
        self._upload_stream.synchronize()
        return uploaded


_SIGNED = {2: torch.int16, 4: torch.int32}
