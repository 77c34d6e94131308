"""Files that are either complete or absent: durable writes, canonical JSON, digests, locks."""

import contextlib
import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from atoll.errors import AtollError, LockedError, StorageError
from atoll.faults import reach

MIB = 1 << 20


def canonical_json(value: Any) -> bytes:
    """Encode with sorted keys, no spaces, UTF-8 and no NaN: equal values give equal bytes."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def identity(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of `value`, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_bytes(data: bytes | memoryview) -> str:
    """Return the SHA-256 of `data`, 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path, *, drop_cache: bool = False) -> str:
    """Return the SHA-256 of a file read in pieces of 4 MiB.

    Args:
        path: The file.
        drop_cache: Ask the kernel to forget its pages first: the disk is read, not memory.
    """
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        if drop_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(4 * MIB)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


@contextlib.contextmanager
def atomic_file(path: Path, *, fault: str = "file") -> Iterator[IO[bytes]]:
    """Yield a binary file that appears under `path` complete and durable, or not at all.

    Temporary name in the same folder, write, fsync, rename, fsync of the folder. On an error the
    temporary file is removed and the old content of `path`, if any, stays.

    Args:
        path: The final name; its folder is created.
        fault: Prefix of the failpoints `<fault>.before_fsync`, `.before_rename`, `.after_rename`.

    Raises:
        StorageError: The file system refused, with what it said.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            reach(f"{fault}.before_fsync")
            os.fsync(file.fileno())
        reach(f"{fault}.before_rename")
        os.replace(temporary, path)
        reach(f"{fault}.after_rename")
        fsync_folder(path.parent)
    except OSError as error:
        remove_if_present(temporary)
        raise storage_error(error, path) from error
    except BaseException:
        remove_if_present(temporary)
        raise


def write_bytes(path: Path, data: bytes, *, fault: str = "file") -> None:
    """Write `data` durably under its final name; see `atomic_file`."""
    with atomic_file(path, fault=fault) as file:
        file.write(data)


def write_json(path: Path, value: Any, *, fault: str = "file") -> None:
    """Write `value` durably as indented JSON with sorted keys and a final line feed."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode("utf-8"), fault=fault)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        AtollError: The file is missing or is not JSON; names the file and the place in it.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise AtollError(f"{path} does not exist.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AtollError(f"{path} is not valid JSON: {error}.") from error


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries durable; Windows keeps them without being asked."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_if_present(path: Path) -> None:
    """Remove a file if it is there; a file system that refuses is not an error here."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def storage_error(error: OSError, path: Path) -> AtollError:
    """Say in the user's words what the file system refused for `path`."""
    hints = {
        errno.ENOSPC: "free space or choose another disk, then run the same command again: "
        "finished work is kept",
        errno.EDQUOT: "raise the quota or choose another disk, then run the same command again",
        errno.EROFS: "the file system is read-only; choose another folder",
        errno.EACCES: "choose a folder that this user may write to",
        errno.EPERM: "choose a folder that this user may write to",
    }
    reason = error.strerror or str(error)
    return StorageError(f"cannot write {path}: {reason}.", hint=hints.get(error.errno or 0))


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder for this process as long as the context lasts.

    The lock belongs to an open descriptor, so it ends with the process however that ends.

    Raises:
        LockedError: Another live process holds it.
        StorageError: The folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a+b")  # noqa: SIM115 - closed below, the lock lives with it
    except OSError as error:
        raise storage_error(error, folder / ".lock") from error
    try:
        if not _try_lock(file):
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "unknown"
            raise LockedError(
                f"{folder} is in use by another process (pid {holder}).",
                hint="wait for it to end, or give this job another folder",
            )
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        yield
    finally:
        file.close()


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
