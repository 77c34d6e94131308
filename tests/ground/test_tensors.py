"""Snapshots and digests."""

import hashlib

import pytest
import torch

from atoll.files import MIB
from atoll.tensors import Snapshot, copy_to_cpu, leaf_digests, parameter_digest, tensor_digest


def test_snapshot_parts_come_back_under_their_prefix():
    part = Snapshot({"w": torch.ones(2)}, {"step": 3})
    whole = Snapshot()
    whole.merge("optimizer", part)
    back = whole.under("optimizer")
    assert torch.equal(back.tensors["w"], part.tensors["w"])
    assert back.facts == {"step": 3}


def test_copy_shares_no_storage():
    original = torch.zeros(3)
    copy = copy_to_cpu(original)
    original.fill_(1)
    assert copy.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_digest_does_not_depend_on_strides(dtype):
    matrix = torch.arange(12).reshape(3, 4).to(dtype)
    assert tensor_digest("m", matrix.t()) == tensor_digest("m", matrix.t().contiguous())


def test_digest_depends_on_name_type_shape_and_every_bit():
    base = torch.zeros(4)
    changed = base.clone()
    changed[3] = -0.0
    others = [("x", base), ("m", base.double()), ("m", base.reshape(2, 2)), ("m", changed)]
    digests = {tensor_digest("m", base), *(tensor_digest(name, t) for name, t in others)}
    assert len(digests) == 5


def test_leaves_are_the_digests_of_each_mebibyte():
    tensor = torch.arange(MIB // 4 + 5, dtype=torch.int32)
    data = tensor.numpy().tobytes()
    assert leaf_digests(tensor) == [
        hashlib.sha256(data[:MIB]).digest(),
        hashlib.sha256(data[MIB:]).digest(),
    ]


def test_digest_of_a_set_does_not_depend_on_its_order():
    a, b = torch.ones(2), torch.zeros(3)
    assert parameter_digest({"a": a, "b": b}) == parameter_digest({"b": b, "a": a})
    assert parameter_digest({"a": a, "b": b}) != parameter_digest({"a": b, "b": a})


def test_empty_tensor_has_a_digest():
    assert len(tensor_digest("none", torch.empty(0))) == 64
