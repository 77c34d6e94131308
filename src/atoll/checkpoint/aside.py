"""Putting away what is not a checkpoint: kept for a person to look at, never read again."""

import logging
import os
from pathlib import Path

from atoll.checkpoint.records import ASIDE
from atoll.files import fsync_folder, storage_error

logger = logging.getLogger(__name__)


def move_aside(path: Path) -> Path:
    """Move a folder into `aside/` beside it, under a name that is free, and return that.

    Raises:
        StorageError: The file system refused.
    """
    parent = path.parent / ASIDE
    number = 1
    while (target := parent / f"{path.name}-{number}").exists():
        number += 1
    try:
        parent.mkdir(exist_ok=True)
        os.rename(path, target)
        fsync_folder(parent)
        fsync_folder(path.parent)
    except OSError as error:
        raise storage_error(error, target) from error
    logger.warning("moved %s, which is no whole checkpoint, to %s", path, target)
    return target
