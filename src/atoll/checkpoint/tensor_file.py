"""Named tensors in one safetensors file, written once and hashed in leaves of 1 MiB.

The format is the library's own (`safetensors.torch.load_file` reads these files). It is written
here because a checkpoint needs what the library does not offer: writing without a second copy in
memory, and one pass over the file that yields the tensors together with the digest of each MiB.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from atoll.errors import CheckpointError
from atoll.files import MIB, atomic_file, canonical_json
from atoll.tensors import leaf_digests

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the library's own limit


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """What names the exact content of one tensor.

    Attributes:
        dtype: As torch prints it, for example torch.float32.
        shape: Sizes.
        leaves: SHA-256 of each MiB of its bytes, hexadecimal, in order.
    """

    dtype: str
    shape: tuple[int, ...]
    leaves: tuple[str, ...]

    def digest(self, name: str) -> str:
        """Return what `tensors.tensor_digest` returns for this content under `name`."""
        header = {"name": name, "dtype": self.dtype, "shape": list(self.shape)}
        tree = hashlib.sha256(canonical_json(header))
        for leaf in self.leaves:
            tree.update(bytes.fromhex(leaf))
        return tree.hexdigest()


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What one pass over a tensor file found."""

    sha256: str
    num_bytes: int
    tensors: dict[str, TensorDigest]


def digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorDigest]:
    """Return the digests of tensors in memory."""
    return {
        name: TensorDigest(
            str(tensor.dtype),
            tuple(tensor.shape),
            tuple(leaf.hex() for leaf in leaf_digests(tensor)),
        )
        for name, tensor in tensors.items()
    }


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], *, fault: str) -> None:
    """Write CPU tensors durably under `path`, complete or not at all.

    Args:
        path: The final name.
        tensors: Contiguous CPU tensors.
        fault: Prefix of the failpoints, see `files.atomic_file`.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in order:
        tensor = tensors[name]
        stop = start + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path, fault=fault) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_bytes_of(tensors[name]))


def digest_tensor_file(path: Path, *, drop_cache: bool = False) -> FileDigest:
    """Hash a tensor file without keeping its tensors; needs 1 MiB of memory.

    Args:
        path: The file.
        drop_cache: Ask the kernel to forget its pages first, so that the disk is read, not memory.

    Raises:
        CheckpointError: The file is missing or its header is not that of a tensor file.
    """
    return _walk(path, {}, keep=False, drop_cache=drop_cache)


def read_tensor_file(path: Path) -> tuple[dict[str, Tensor], FileDigest]:
    """Read all tensors together with the digests of the very bytes that were read.

    Raises:
        CheckpointError: The file is missing or its header is not that of a tensor file.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _walk(path, tensors, keep=True, drop_cache=False)


def _walk(path: Path, tensors: dict[str, Tensor], *, keep: bool, drop_cache: bool) -> FileDigest:
    try:
        with open(path, "rb", buffering=0) as file:
            if drop_cache and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(file.fileno()).st_size
            whole = hashlib.sha256()
            header = _read_header(file, size, whole, path)
            found = {}
            for name, dtype, shape, num_bytes in header:
                tensor = torch.empty(shape, dtype=dtype) if keep else None
                into = None if tensor is None else _bytes_of(tensor)
                leaves = tuple(_read_leaves(file, num_bytes, whole, path, into))
                found[name] = TensorDigest(str(dtype), shape, leaves)
                if tensor is not None:
                    tensors[name] = tensor
            return FileDigest(whole.hexdigest(), size, found)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}.") from error


def _read_header(
    file: IO[bytes], size: int, whole: Any, path: Path
) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
    """Return (name, dtype, shape, bytes) in file order; the file stands at the first tensor."""
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{path} is damaged: its header length is impossible.")
    text = _read_exactly(file, length, path)
    whole.update(head + text)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        found = [
            (name, DTYPES[e["dtype"]], tuple(map(int, e["shape"])), *map(int, e["data_offsets"]))
            for name, e in entries.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read ({error}).") from error
    found.sort(key=lambda entry: (entry[3], entry[4]))
    place = 0
    for name, dtype, shape, start, stop in found:
        wanted = dtype.itemsize
        for extent in shape:
            wanted *= extent
        if start != place or stop - start != wanted:
            raise CheckpointError(f"{path} is damaged: its header misplaces tensor {name}.")
        place = stop
    if 8 + length + place != size:
        raise CheckpointError(
            f"{path} is damaged: it holds {size} bytes, its header describes {8 + length + place}."
        )
    return [(name, dtype, shape, stop - start) for name, dtype, shape, start, stop in found]


def _read_leaves(
    file: IO[bytes], num_bytes: int, whole: Any, path: Path, into: memoryview | None
) -> Iterator[str]:
    """Yield the digest of each MiB; the bytes go to `into` where it is given."""
    scratch = memoryview(bytearray(min(MIB, num_bytes))) if into is None else into
    for start in range(0, num_bytes, MIB):
        count = min(MIB, num_bytes - start)
        leaf = scratch[:count] if into is None else scratch[start : start + count]
        done = 0
        while done < count:
            step = file.readinto(leaf[done:])  # pyright: ignore[reportAttributeAccessIssue]
            if not step:
                raise CheckpointError(f"{path} ended while it was read.")
            done += step
        whole.update(leaf)
        yield hashlib.sha256(leaf).hexdigest()


def _read_exactly(file: IO[bytes], num_bytes: int, path: Path) -> bytes:
    parts = []
    while num_bytes:
        part = file.read(num_bytes)
        if not part:
            raise CheckpointError(f"{path} ended while it was read.")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's own bytes; writing to them writes the tensor."""
    assert tensor.is_contiguous(), tensor.shape
    assert tensor.device.type == "cpu", tensor.device
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
