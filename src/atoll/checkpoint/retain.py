"""Removing old checkpoints, never the newest one that verifies."""

import logging
import shutil
from pathlib import Path

from atoll.checkpoint.records import MANIFEST, step_folders
from atoll.checkpoint.verify import verify_checkpoint
from atoll.files import fsync_folder

logger = logging.getLogger(__name__)


def retain(folder: Path, *, keep: int) -> list[Path]:
    """Remove all but the newest `keep` checkpoints and return what was removed.

    Nothing is removed that is not older than a checkpoint which was just verified, and folders
    without a manifest are left alone.

    Args:
        folder: A run's `checkpoints` folder, which this process has locked.
        keep: How many stay; 1 <= keep.
    """
    assert keep >= 1, keep
    whole = [path for _, path in step_folders(folder) if (path / MANIFEST).is_file()]
    if len(whole) <= keep:
        return []
    newest_sound = next(
        (i for i in range(len(whole) - 1, -1, -1) if not verify_checkpoint(whole[i])), 0
    )
    old = whole[: min(len(whole) - keep, newest_sound)]
    for path in old:
        # Without its manifest it is no checkpoint any more, however far the removal gets.
        (path / MANIFEST).unlink()
        fsync_folder(path)
        shutil.rmtree(path)
        logger.info("removed %s; the newest %d stay", path, keep)
    return old
