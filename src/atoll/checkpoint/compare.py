"""What differs between two states: every tensor and every scalar, of checkpoints or any folders."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.checkpoint.load import load_checkpoint
from atoll.checkpoint.records import MANIFEST
from atoll.checkpoint.tensor_file import read_tensor_file
from atoll.errors import UsageError
from atoll.files import MIB


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that is not bitwise equal on both sides.

    Attributes:
        name: Its name.
        reason: What differs, one clause.
        elements: How many elements differ bitwise, where both have one form.
        max_abs: Largest absolute difference, in float64; None where a NaN is in the way.
        first_mib: First MiB of its bytes that differs, counted from 0.
    """

    name: str
    reason: str
    elements: int | None = None
    max_abs: float | None = None
    first_mib: int | None = None


@dataclass(slots=True)
class Comparison:
    """The result; `equal` where no tensor and no scalar differs."""

    tensors_compared: int
    scalars_compared: int
    tensors: list[TensorDifference] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not self.tensors and not self.scalars


def compare(a: Path, b: Path) -> Comparison:
    """Compare two checkpoints, two folders of safetensors files, or two such files.

    Checkpoints are verified first; then every tensor, every fact of the state, and every binding
    fact is compared. Of foreign folders every tensor is.

    Raises:
        UsageError: One of them holds no tensors.
        CheckpointError: A checkpoint does not verify, or a file cannot be read.
    """
    (tensors_a, facts_a), (tensors_b, facts_b) = _read(a), _read(b)
    names = sorted(tensors_a.keys() | tensors_b.keys())
    flat_a, flat_b = flatten(facts_a), flatten(facts_b)
    keys = sorted(flat_a.keys() | flat_b.keys())
    return Comparison(
        tensors_compared=len(names),
        scalars_compared=len(keys),
        tensors=[
            difference
            for name in names
            if (difference := _difference(name, tensors_a.get(name), tensors_b.get(name)))
        ],
        scalars=describe_differences(flat_a, flat_b),
    )


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted keys; lists stay values."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat.update(flatten(inner, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def describe_differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line `key: was -> now` for each dotted key whose values differ."""
    absent = object()

    def show(value: Any) -> str:
        return "(absent)" if value is absent else repr(value)

    return [
        f"{key}: {show(was.get(key, absent))} -> {show(now.get(key, absent))}"
        for key in sorted(was.keys() | now.keys())
        if was.get(key, absent) != now.get(key, absent)
    ]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if (path / MANIFEST).is_file():
        found = load_checkpoint(path)
        return found.snapshot.tensors, {"state": found.snapshot.facts, "binding": found.binding}
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"{path} holds neither a checkpoint nor a safetensors file.",
            hint="name a step-... folder of a run, a folder with .safetensors files, or a file",
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        more, _ = read_tensor_file(file)
        twice = sorted(tensors.keys() & more.keys())
        if twice:
            raise UsageError(f"{path}: tensor {twice[0]} is in more than one file.")
        tensors.update(more)
    return tensors, {}


def _difference(name: str, a: Tensor | None, b: Tensor | None) -> TensorDifference | None:
    if a is None or b is None:
        return TensorDifference(name, f"only in the {'second' if a is None else 'first'}")
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return TensorDifference(
            name, f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
        )
    if a.numel() == 0:
        return None
    bytes_a, bytes_b = (t.reshape(-1).view(torch.uint8) for t in (a, b))
    if torch.equal(bytes_a, bytes_b):
        return None
    differs = (bytes_a != bytes_b).view(-1, a.element_size()).any(dim=1)
    gap = (a.reshape(-1)[differs].double() - b.reshape(-1)[differs].double()).abs().max().item()
    first = int(differs.to(torch.uint8).argmax())
    elements = int(differs.sum())
    return TensorDifference(
        name,
        f"{elements} of {a.numel()} elements differ",
        elements=elements,
        max_abs=gap if gap == gap else None,
        first_mib=first * a.element_size() // MIB,
    )
