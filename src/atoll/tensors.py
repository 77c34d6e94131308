"""Snapshots (named tensors and JSON facts) and the digests that name them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from atoll.files import MIB, canonical_json

IGNORE = -100
"""Target value of a position that no loss counts."""


@dataclass(slots=True)
class Snapshot:
    """A copy of some state: tensors on the CPU under stable dotted names, facts as JSON values."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def under(self, prefix: str) -> "Snapshot":
        """Return the part whose names start with `prefix.`, without it."""
        head = prefix + "."
        return Snapshot(
            {k.removeprefix(head): v for k, v in self.tensors.items() if k.startswith(head)},
            {k.removeprefix(head): v for k, v in self.facts.items() if k.startswith(head)},
        )

    def merge(self, prefix: str, other: "Snapshot") -> None:
        """Add all of `other` under `prefix.`; a name that is there already is a mistake of ours."""
        for name, tensor in other.tensors.items():
            assert f"{prefix}.{name}" not in self.tensors, name
            self.tensors[f"{prefix}.{name}"] = tensor
        for name, fact in other.facts.items():
            assert f"{prefix}.{name}" not in self.facts, name
            self.facts[f"{prefix}.{name}"] = fact


def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU copy that shares no storage with `tensor`."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """Return the digest of one tensor: SHA-256 over its header and the SHA-256 of each 1 MiB leaf.

    Two tensors have one digest when name, dtype, shape and every byte are equal; leaves can be
    hashed in parallel and compared one by one, which localises damage.
    """
    header = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
    tree = hashlib.sha256(canonical_json(header))
    for leaf in leaf_digests(tensor):
        tree.update(leaf)
    return tree.hexdigest()


def leaf_digests(tensor: torch.Tensor) -> list[bytes]:
    """Return the 32-byte SHA-256 of each MiB of the tensor's bytes, in order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    return [
        hashlib.sha256(data[start : start + MIB]).digest() for start in range(0, len(data), MIB)
    ]


def parameter_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return one digest for a set of named tensors, whatever order they come in."""
    return combine_digests({name: tensor_digest(name, tensors[name]) for name in tensors})


def combine_digests(digests: Mapping[str, str]) -> str:
    """Return the `parameter_digest` of tensors whose `tensor_digest` values are known by name."""
    tree = hashlib.sha256(b"atoll-parameters-1")
    for name in sorted(digests):
        tree.update(bytes.fromhex(digests[name]))
    return tree.hexdigest()
