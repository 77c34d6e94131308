"""Attention sees what it may and nothing else."""

import pytest
import torch

from atoll.config.model import ModelConfig
from atoll.model.attention import attention, document_mask
from atoll.model.exact_attention import takes_exactly


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_a_causal_mask_equals_no_mask(key_heads):
    q, k, v = draw(2, 4, 9, 8, seed=0), *(draw(2, key_heads, 9, 8, seed=s) for s in (1, 2))
    mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    torch.testing.assert_close(attention(q, k, v), attention(q, k, v, mask_BTT=mask))


def test_neighbouring_queries_share_a_key_head():
    q, k, v = draw(1, 4, 5, 8, seed=0), draw(1, 2, 5, 8, seed=1), draw(1, 2, 5, 8, seed=2)
    wide = [tensor.repeat_interleave(2, dim=1) for tensor in (k, v)]
    torch.testing.assert_close(attention(q, k, v), attention(q, *wide))


def test_a_document_mask_is_causal_and_stays_inside():
    documents = torch.tensor([[7, 7, 3, 3, 3, 7]])
    expected = [
        [
            row >= column and int(documents[0, row]) == int(documents[0, column])
            for column in range(6)
        ]
        for row in range(6)
    ]
    assert document_mask(documents)[0, 0].tolist() == expected


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ({"width": 320, "heads": 5}, True),
        ({"width": 128, "heads": 1}, True),
        ({"width": 320, "heads": 5, "kv_heads": 5}, True),
        ({"width": 128, "heads": 4, "kv_heads": 2}, False),
        ({"width": 24, "heads": 2}, False),
        ({"width": 512, "heads": 2}, False),
    ],
)
def test_only_shapes_that_both_halves_take_are_paired_for_exactness(shape, taken):
    assert takes_exactly(ModelConfig(**shape)) is taken
