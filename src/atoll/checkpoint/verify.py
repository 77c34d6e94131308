"""Checking a checkpoint against its own digests, down to the tensor and the MiB."""

from dataclasses import dataclass
from pathlib import Path

from atoll.checkpoint.records import (
    MANIFEST,
    Manifest,
    Receipt,
    own_digest,
    rank_files,
    read_record,
)
from atoll.checkpoint.save import model_digest
from atoll.checkpoint.tensor_file import FileDigest, TensorDigest, digest_tensor_file
from atoll.errors import CheckpointError
from atoll.files import identity, sha256_file


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is not as the records say.

    Attributes:
        file: The damaged file.
        problem: What is wrong with it, one sentence.
        tensor: The damaged tensor, where it can be told.
        mib: The damaged MiB of that tensor, counted from 0.
    """

    file: Path
    problem: str
    tensor: str | None = None
    mib: int | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


def verify_checkpoint(folder: Path) -> list[Damage]:
    """Return everything that is wrong with the checkpoint in `folder`; empty when it is sound."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [Damage(folder / MANIFEST, error.message)]
    damages = _chain_damages(folder, manifest)
    for member in manifest.members:
        tensors_file, receipt_file = rank_files(folder, member.rank)
        try:
            receipt = read_receipt(folder, manifest, member.rank)
        except CheckpointError as error:
            damages.append(Damage(receipt_file, error.message))
            continue
        try:
            found = digest_tensor_file(tensors_file)
        except CheckpointError as error:
            damages.append(Damage(tensors_file, error.message))
            continue
        damages += tensor_damages(tensors_file, receipt, found)
    return damages


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is no whole checkpoint: it has no {MANIFEST}.")
    manifest = read_record(path, Manifest)
    ranks = [member.rank for member in manifest.members]
    if ranks != list(range(manifest.world)):
        raise CheckpointError(f"{path} is damaged: {manifest.world} ranks, but members {ranks}.")
    if manifest.own_digest != own_digest(manifest):
        raise CheckpointError(f"{path} is damaged: its content is not what its digest names.")
    return manifest


def read_receipt(folder: Path, manifest: Manifest, rank: int) -> Receipt:
    """Read one rank's receipt and check it against the manifest.

    Raises:
        CheckpointError: It is missing, damaged, or not the one that the manifest names.
    """
    member = manifest.members[rank]
    path = folder / member.receipt_file
    if path != rank_files(folder, rank)[1] or not path.is_file():
        raise CheckpointError(f"{path} does not exist; the manifest names it.")
    if sha256_file(path) != member.receipt_sha256:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the manifest's.")
    receipt = read_record(path, Receipt)
    if receipt.binding_identity != identity(receipt.binding):
        raise CheckpointError(f"{path} is damaged: its binding is not the one it names.")
    if rank == 0 and model_digest(receipt) != manifest.parameter_digest:
        raise CheckpointError(f"{path} holds other weights than the manifest names.")
    return receipt


def tensor_damages(path: Path, receipt: Receipt, found: FileDigest) -> list[Damage]:
    """Compare what one pass over a tensor file found with what its receipt says."""
    if found.num_bytes != receipt.tensors_bytes:
        return [
            Damage(
                path, f"holds {found.num_bytes} bytes; its receipt says {receipt.tensors_bytes}."
            )
        ]
    damages = []
    for name in sorted(receipt.tensors.keys() | found.tensors.keys()):
        record, content = receipt.tensors.get(name), found.tensors.get(name)
        if record is None or content is None:
            where = "its receipt" if record is None else "the file"
            damages.append(Damage(path, f"tensor {name} is missing in {where}.", name))
        elif record.content() != content:
            damages += _leaf_damages(path, name, record.content(), content)
    if not damages and found.sha256 != receipt.tensors_sha256:
        damages.append(Damage(path, "its header is damaged: its SHA-256 is not the receipt's."))
    return damages


def _chain_damages(folder: Path, manifest: Manifest) -> list[Damage]:
    """Check the manifest that this one names as its predecessor, where it is still kept."""
    if manifest.previous is None:
        return []
    path = folder.parent / manifest.previous.folder / MANIFEST
    if not path.is_file() or sha256_file(path) == manifest.previous.manifest_sha256:
        return []
    return [Damage(path, f"is not the manifest that {folder.name} was written after.")]


def _leaf_damages(path: Path, name: str, wanted: TensorDigest, found: TensorDigest) -> list[Damage]:
    if (wanted.dtype, wanted.shape) != (found.dtype, found.shape):
        return [
            Damage(
                path,
                f"tensor {name} is {found.dtype} {list(found.shape)}; its receipt says "
                f"{wanted.dtype} {list(wanted.shape)}.",
                name,
            )
        ]
    return [
        Damage(path, f"tensor {name} is damaged in MiB {mib} of {len(wanted.leaves)}.", name, mib)
        for mib, (a, b) in enumerate(zip(wanted.leaves, found.leaves, strict=True))
        if a != b
    ]
