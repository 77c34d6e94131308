"""Finding and reading checkpoints: what is loaded has been checked, byte for byte."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.checkpoint.aside import move_aside
from atoll.checkpoint.records import MANIFEST, Manifest, rank_files, step_folders
from atoll.checkpoint.tensor_file import read_tensor_file
from atoll.checkpoint.verify import read_manifest, read_receipt, tensor_damages
from atoll.errors import CheckpointError
from atoll.tensors import Snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint in memory.

    Attributes:
        folder: Where it lies.
        manifest: What the group agreed on.
        snapshot: The state of this rank.
        binding: What decided this rank's numbers when it was written.
    """

    folder: Path
    manifest: Manifest
    snapshot: Snapshot
    binding: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Listed:
    """One folder with a checkpoint's name, as far as its manifest tells."""

    step: int
    folder: Path
    manifest: Manifest | None
    problem: str | None


def load_newest(folder: Path) -> Checkpoint | None:
    """Load the newest checkpoint that verifies; None where there is none at all.

    Folders of later steps that do not verify are moved to `aside/` (never deleted, never
    repaired), each with a warning that says what is wrong with it.

    Args:
        folder: A run's `checkpoints` folder, which this process has locked.

    Raises:
        CheckpointError: There are folders, and none verifies; says what is wrong with each. Then
            none is moved.
    """
    problems: list[tuple[Path, str]] = []
    for _, path in reversed(step_folders(folder)):
        try:
            found = load_checkpoint(path)
        except CheckpointError as error:
            problems.append((path, error.message))
            continue
        for later, problem in problems:
            logger.warning("%s does not verify: %s", later, problem)
            move_aside(later)
        return found
    unfinished = [path for path, _ in problems if not (path / MANIFEST).exists()]
    if len(unfinished) == len(problems):  # killed before the first one was complete
        for path in unfinished:
            move_aside(path)
        return None
    raise CheckpointError(
        "no checkpoint verifies:\n" + "\n".join(message for _, message in problems),
        hint=f"restore {folder} from a copy, or start again in another runtime.output_dir",
    )


def load_checkpoint(folder: Path, *, rank: int = 0) -> Checkpoint:
    """Load one checkpoint; the digests are taken of the very bytes that are returned.

    Raises:
        CheckpointError: It is incomplete or damaged; names the file, the tensor and the MiB.
    """
    manifest = read_manifest(folder)
    receipt = read_receipt(folder, manifest, rank)
    path = rank_files(folder, rank)[0]
    tensors, found = read_tensor_file(path)
    damages = tensor_damages(path, receipt, found)
    if damages:
        raise CheckpointError(
            "\n".join(map(str, damages[:5])),
            hint="an earlier checkpoint of the run may be sound: `atoll checkpoint list`",
        )
    return Checkpoint(folder, manifest, Snapshot(tensors, receipt.facts), receipt.binding)


def list_checkpoints(folder: Path) -> list[Listed]:
    """Return every folder that has a checkpoint's name, ascending; reads manifests only."""
    found = []
    for step, path in step_folders(folder):
        try:
            found.append(Listed(step, path, read_manifest(path), None))
        except CheckpointError as error:
            found.append(Listed(step, path, None, error.message))
    return found
