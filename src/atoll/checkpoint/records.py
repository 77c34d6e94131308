"""What a checkpoint's two kinds of JSON file hold, and the names of everything in its folder.

RUN/checkpoints/step-00000064/rank-000.safetensors   tensors of one rank
RUN/checkpoints/step-00000064/rank-000.json          its receipt: what it wrote, with digests
RUN/checkpoints/step-00000064/manifest.json          what the whole group agreed on; written last
RUN/checkpoints/aside/                               what did not become or stay a checkpoint
"""

import re
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from atoll.checkpoint.tensor_file import TensorDigest
from atoll.errors import AtollError, CheckpointError
from atoll.files import identity, read_json

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
ASIDE = "aside"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorRecord(_Record):
    """One tensor: its form, its digest, and the SHA-256 of each MiB of its bytes."""

    dtype: str
    shape: list[int]
    digest: str
    leaves: list[str]

    def content(self) -> TensorDigest:
        return TensorDigest(self.dtype, tuple(self.shape), tuple(self.leaves))


class Receipt(_Record):
    """What one rank wrote and read back."""

    format_version: Literal[1] = FORMAT_VERSION
    step: int
    generation: int
    rank: int
    world: int
    tensors_file: str
    tensors_bytes: int
    tensors_sha256: str
    tensors: dict[str, TensorRecord]
    facts: dict[str, Any]
    binding: dict[str, Any]
    binding_identity: str


class Member(_Record):
    """One rank's receipt, by digest."""

    rank: int
    receipt_file: str
    receipt_sha256: str
    tensors_bytes: int


class Previous(_Record):
    """The checkpoint that was the newest when this one was made."""

    folder: str
    manifest_sha256: str


class Manifest(_Record):
    """What the group agreed on. A reader of another format version refuses."""

    format_version: Literal[1] = FORMAT_VERSION
    step: int
    generation: int
    world: int
    members: list[Member]
    parameter_digest: str
    previous: Previous | None
    run: dict[str, Any]
    """Facts about the run: its config, cache_identity, loader_identity, source_hash, ..."""
    own_digest: str
    """Identity of everything above, so that damage to this file shows by itself."""


def seal(facts: dict[str, Any]) -> Manifest:
    """Return the manifest of these facts, with its own digest."""
    draft = Manifest(**facts, own_digest="")
    return draft.model_copy(update={"own_digest": own_digest(draft)})


def own_digest(manifest: Manifest) -> str:
    """Return the identity of everything in a manifest but its own digest."""
    return identity(manifest.model_dump(mode="json", exclude={"own_digest"}))


Record = TypeVar("Record", Receipt, Manifest)


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a receipt or a manifest.

    Raises:
        CheckpointError: It is missing, not JSON, of another format, or not what it should be.
    """
    try:
        found = read_json(path)
    except AtollError as error:
        raise CheckpointError(error.message) from error
    version = found.get("format_version") if isinstance(found, dict) else None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version!r}; this atoll reads {FORMAT_VERSION}.",
            hint="use the version of atoll that wrote it",
        )
    try:
        return kind.model_validate(found)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def step_folder(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after update `step`."""
    return folder / f"step-{step:08d}"


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every folder that has a checkpoint's name, ascending by step."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = re.fullmatch(r"step-(\d{8,})", path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found)


def rank_files(folder: Path, rank: int) -> tuple[Path, Path]:
    """Return the tensor file and the receipt of one rank."""
    return folder / f"rank-{rank:03d}.safetensors", folder / f"rank-{rank:03d}.json"
