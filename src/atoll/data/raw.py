"""Bytes of source files: hashed as they are read, unpacked with bounded memory."""

import hashlib
import zlib
from collections.abc import Iterator
from typing import IO, Protocol

import zstandard

from atoll.data.sources import Compression, PlannedFile
from atoll.errors import DataError

# One read of a packed file may unpack to 1,032 (gzip) or 32,768 (zstd) times as much, so these
# sizes bound one unpacked piece to 16 and 128 MiB even for a file made to do harm.
_READ_BYTES: dict[Compression | None, int] = {None: 1 << 18, "gz": 1 << 14, "zst": 1 << 12}

_ZSTD_WINDOW_BYTES = 1 << 31


class DamagedStreamError(Exception):
    """A packed file ends early or holds what cannot be unpacked; carries where."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RawFile:
    """A source file read once from front to back.

    Attributes:
        position: Bytes read so far.
    """

    def __init__(self, planned: PlannedFile) -> None:
        """Open it.

        Raises:
            DataError: It cannot be opened.
        """
        self.planned = planned
        self.position = 0
        self._hash = hashlib.sha256()
        try:
            self._file: IO[bytes] = open(planned.location, "rb")  # noqa: SIM115 - see close
        except OSError as error:
            raise DataError(f"cannot read {planned.location}: {error.strerror}.") from error

    def read(self, num_bytes: int) -> bytes:
        """Read the next bytes; fewer only at the end of the file."""
        try:
            data = self._file.read(num_bytes)
        except OSError as error:
            raise DataError(f"cannot read {self.planned.location}: {error.strerror}.") from error
        self._hash.update(data)
        self.position += len(data)
        return data

    @property
    def prefix_sha256(self) -> str:
        """SHA-256 of the bytes read so far."""
        return self._hash.hexdigest()

    def finish(self) -> str:
        """Read what is left, and return the SHA-256 of the whole file.

        Raises:
            DataError: The file has another size than when it was found.
        """
        while self.read(1 << 20):
            pass
        if self.position != self.planned.bytes:
            raise DataError(
                f"{self.planned.location} changed while it was read: {self.planned.bytes:,} bytes "
                f"when it was found, {self.position:,} now.",
                hint="run `atoll prepare` again once nothing writes to the corpus",
            )
        return self.prefix_sha256

    def close(self) -> None:
        self._file.close()


def unpacked(raw: RawFile) -> Iterator[bytes]:
    """Give the content of a file in pieces, unpacked where it is packed.

    Raises:
        DamagedStreamError: The packed stream is cut or damaged.
    """
    compression = raw.planned.compression
    num_bytes = _READ_BYTES[compression]
    if compression is None:
        while data := raw.read(num_bytes):
            yield data
        return
    stream: _Stream | None = None
    num_streams = 0
    while data := raw.read(num_bytes):
        while data:
            if stream is None:
                if num_streams and not data.strip(b"\0"):
                    break  # padding after the last stream, as tar and tape leave it
                stream, num_streams = _open_stream(compression), num_streams + 1
            try:
                yield stream.decompress(data)
            except (zlib.error, zstandard.ZstdError) as error:
                raise DamagedStreamError(f"damaged before byte {raw.position}: {error}") from error
            data = stream.unused_data if stream.eof else b""
            if stream.eof:
                stream = None
    if stream is not None or not num_streams:
        raise DamagedStreamError(
            f"ends at byte {raw.position} before its {compression} stream does"
        )


class _Stream(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _open_stream(compression: Compression) -> _Stream:
    if compression == "gz":
        return zlib.decompressobj(wbits=31)
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
