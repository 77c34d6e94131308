"""Our tensor files against the safetensors library, and what damage looks like."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from atoll.checkpoint.tensor_file import (
    DTYPES,
    digest_tensor_file,
    digest_tensors,
    read_tensor_file,
    write_tensor_file,
)
from atoll.errors import CheckpointError
from atoll.files import sha256_file
from atoll.tensors import tensor_digest


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@st.composite
def tensor_sets(draw):
    names = draw(st.lists(st.text("abcé.0_", min_size=1, max_size=8), max_size=6, unique=True))
    shapes = st.lists(st.integers(0, 5), max_size=3)
    return {
        name: random_tensor(draw(st.sampled_from(list(DTYPES.values()))), draw(shapes), i)
        for i, name in enumerate(names)
    }


@settings(deadline=None, max_examples=40)
@given(tensors=tensor_sets())
def test_the_library_reads_what_we_write(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    write_tensor_file(path, tensors, fault="test")
    library = load_file(path)
    ours, found = read_tensor_file(path)
    assert library.keys() == ours.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for other in (library[name], ours[name]):
            assert other.dtype == tensor.dtype
            assert torch.equal(other, tensor)
        assert found.tensors[name].digest(name) == tensor_digest(name, tensor)
    assert found == digest_tensor_file(path)
    assert found.sha256 == sha256_file(path)


def test_we_read_what_the_library_writes(tmp_path):
    tensors = {"b": torch.randn(3, 4), "a": torch.arange(5), "s": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found, digests = read_tensor_file(tmp_path / "x.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    assert digests.tensors == digest_tensors(tensors)


def test_leaves_beyond_the_first_mib_are_hashed_one_by_one(tmp_path):
    tensor = torch.arange(700_000, dtype=torch.float32)
    write_tensor_file(tmp_path / "x.safetensors", {"x": tensor}, fault="test")
    assert len(digest_tensor_file(tmp_path / "x.safetensors").tensors["x"].leaves) == 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "it holds 167 bytes, its header describes 168"),
        (lambda data: data + b"x", "it holds 169 bytes, its header describes 168"),
        (lambda data: data[:4], "header length is impossible"),
        (lambda data: b"\xff" * 8 + data[8:], "header length is impossible"),
        (lambda data: data.replace(b"F32", b"Q32", 1), "header cannot be read"),
        (lambda data: data.replace(b"[0,8]", b"[4,8]", 1), "misplaces tensor b"),
    ],
)
def test_broken_file_is_refused_with_its_name(tmp_path, damage, message):
    path = tmp_path / "x.safetensors"
    write_tensor_file(path, {"b": torch.arange(1), "a": torch.ones(2)}, fault="test")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=message) as raised:
        read_tensor_file(path)
    assert str(path) in raised.value.message


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.safetensors"):
        read_tensor_file(tmp_path / "none.safetensors")


def test_header_is_aligned_and_canonical(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensor_file(path, {"b": torch.ones(1), "a": torch.ones(2)}, fault="test")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert list(json.loads(data[8 : 8 + length])) == ["__metadata__", "a", "b"]
