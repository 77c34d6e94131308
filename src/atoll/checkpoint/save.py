"""Writing a checkpoint: tensors, read back and hashed; then the receipt; then the manifest."""

import errno
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.checkpoint.aside import move_aside
from atoll.checkpoint.records import (
    MANIFEST,
    Member,
    Previous,
    Receipt,
    TensorRecord,
    rank_files,
    seal,
    step_folder,
    step_folders,
)
from atoll.checkpoint.tensor_file import digest_tensor_file, digest_tensors, write_tensor_file
from atoll.errors import CheckpointError
from atoll.faults import reach
from atoll.files import fsync_folder, identity, remove_if_present, sha256_file, storage_error
from atoll.files import write_json as write_json_file
from atoll.tensors import Snapshot, combine_digests

logger = logging.getLogger(__name__)


def save_checkpoint(
    folder: Path,
    snapshot: Snapshot,
    *,
    step: int,
    binding: Mapping[str, Any],
    run: Mapping[str, Any],
    generation: int = 1,
) -> Path:
    """Write the checkpoint of a group of one rank and return its folder.

    Each file is complete and durable before the next begins, and the tensors are read back from
    the disk and compared before anything vouches for them. Only the manifest, written last and
    only once, makes the folder a checkpoint; a process killed before leaves the earlier ones
    as they were.

    Args:
        folder: The run's `checkpoints` folder, which this process has locked.
        snapshot: The state; tensors named `model.<canonical>` are the model's weights.
        step: Finished updates.
        binding: What decides the rank's numbers besides the state.
        run: Facts for the manifest: config, cache_identity and whatever else names the run.
        generation: Group starts so far.

    Raises:
        CheckpointError: There is one of this step already, or the disk gave back other bytes.
        StorageError: The file system refused.
    """
    target = step_folder(folder, step)
    previous = _newest(folder)
    _make_room(target)
    receipt = _write_rank(target, snapshot, step, binding, generation)
    receipt_file = rank_files(target, 0)[1]
    member = Member(
        rank=0,
        receipt_file=receipt_file.name,
        receipt_sha256=sha256_file(receipt_file),
        tensors_bytes=receipt.tensors_bytes,
    )
    manifest = seal(
        {
            "step": step,
            "generation": generation,
            "world": 1,
            "members": [member],
            "parameter_digest": model_digest(receipt),
            "previous": previous,
            "run": dict(run),
        }
    )
    write_exclusively(target / MANIFEST, manifest.model_dump(mode="json"))
    logger.info("saved %s, %.1f MB", target, receipt.tensors_bytes / 1e6)
    return target


def model_digest(receipt: Receipt) -> str:
    """Return the `parameter_digest` of the weights that a receipt vouches for.

    Each weight counts under its canonical name, without `model.`, so that the same digest names
    the same weights in a checkpoint, in an export and in memory.
    """
    weights = {
        name.removeprefix("model."): record.content()
        for name, record in receipt.tensors.items()
        if name.startswith("model.")
    }
    return combine_digests({name: content.digest(name) for name, content in weights.items()})


def write_exclusively(path: Path, value: Any) -> None:
    """Write JSON durably under a name that must not exist yet.

    Raises:
        CheckpointError: The name is taken.
        StorageError: The file system refused.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    write_json_file(draft, value, fault="checkpoint.manifest.draft")
    try:
        reach("checkpoint.manifest.before_rename")
        _take_name(draft, path)
        reach("checkpoint.manifest.after_rename")
        fsync_folder(path.parent)
    except FileExistsError as error:
        raise CheckpointError(f"{path} exists already; it is never written twice.") from error
    except OSError as error:
        raise storage_error(error, path) from error
    finally:
        remove_if_present(draft)


def _make_room(target: Path) -> None:
    """Create the checkpoint's folder; one that an earlier attempt left unfinished goes aside."""
    if (target / MANIFEST).exists():
        raise CheckpointError(f"{target} is a checkpoint already; it is never written twice.")
    if target.exists():
        move_aside(target)
    try:
        target.mkdir(parents=True)
        fsync_folder(target.parent)
    except OSError as error:
        raise storage_error(error, target) from error


def _take_name(draft: Path, path: Path) -> None:
    """Give `draft` a name that nothing has; a link refuses a taken name, POSIX rename does not."""
    try:
        os.link(draft, path)
    except OSError as error:
        # Some file systems have no links; there the folder's lock keeps others from the name.
        unsupported = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
        if error.errno not in unsupported or path.exists():
            raise
        os.rename(draft, path)


def _write_rank(
    target: Path, snapshot: Snapshot, step: int, binding: Mapping[str, Any], generation: int
) -> Receipt:
    tensors_file, receipt_file = rank_files(target, 0)
    expected = digest_tensors(snapshot.tensors)
    write_tensor_file(tensors_file, snapshot.tensors, fault="checkpoint.tensors")
    try:
        found = digest_tensor_file(tensors_file, drop_cache=True)
        reach("checkpoint.tensors.after_read_back")
    except OSError as error:
        raise storage_error(error, tensors_file) from error
    wrong = sorted(name for name in expected if found.tensors.get(name) != expected[name])
    if wrong or len(found.tensors) != len(expected):
        raise CheckpointError(
            f"{tensors_file}: the disk gave back other bytes than were written "
            f"(tensor {', '.join(wrong[:5])}).",
            hint="check the disk and the memory of this machine; earlier checkpoints are intact",
        )
    receipt = Receipt(
        step=step,
        generation=generation,
        rank=0,
        world=1,
        tensors_file=tensors_file.name,
        tensors_bytes=found.num_bytes,
        tensors_sha256=found.sha256,
        tensors={
            name: TensorRecord(
                dtype=content.dtype,
                shape=list(content.shape),
                digest=content.digest(name),
                leaves=list(content.leaves),
            )
            for name, content in expected.items()
        },
        facts=snapshot.facts,
        binding=dict(binding),
        binding_identity=identity(binding),
    )
    write_json_file(receipt_file, receipt.model_dump(mode="json"), fault="checkpoint.receipt")
    return receipt


def _newest(folder: Path) -> Previous | None:
    for _, path in reversed(step_folders(folder)):
        if (path / MANIFEST).is_file():
            return Previous(folder=path.name, manifest_sha256=sha256_file(path / MANIFEST))
    return None
