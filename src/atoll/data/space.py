"""Room on the disk: looked at before a long job begins, and on the way."""

import shutil
from collections.abc import Callable
from pathlib import Path

from atoll.data.plan import Plan
from atoll.errors import StorageError
from atoll.files import MIB

FreeBytes = Callable[[Path], int]

RESERVE_BYTES = 16 * MIB
"""Kept free for the small files that close a phase."""

# Text of a file at four bytes a token: ids of two bytes once staged and once in the shards, and a
# tenth for indexes. Real corpora with larger vocabularies need less, packed files need more, so
# this bounds from below what is checked first; the rest is checked on the way.
_BYTES_PER_SOURCE_BYTE = 1.1


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write on the disk of an existing folder."""
    return shutil.disk_usage(folder).free


def require_space(plan: Plan, folder: Path, *, done_bytes: int, free: FreeBytes) -> None:
    """Refuse to begin what cannot end.

    Args:
        plan: The files to read.
        folder: Folder of the cache.
        done_bytes: Source bytes that an earlier attempt has encoded already.
        free: Says how much room there is.

    Raises:
        StorageError: The disk has less room than the cache needs at least.
    """
    needed = int((plan.bytes - done_bytes) * _BYTES_PER_SOURCE_BYTE) + RESERVE_BYTES
    require_bytes(needed, folder, free=free, what=f"a cache of {plan.bytes / 1e6:,.0f} MB of text")


def require_bytes(needed: int, folder: Path, *, free: FreeBytes, what: str) -> None:
    """Refuse to write what does not fit.

    Raises:
        StorageError: The disk has less room; finished work is kept.
    """
    available = free(folder)
    if available < needed:
        raise StorageError(
            f"{what} needs about {needed / MIB:,.0f} MiB in {folder}, and {available / MIB:,.0f} "
            "MiB are free.",
            hint="free space or set data.cache_dir to another disk, then run the same command "
            "again: finished work is kept",
        )
