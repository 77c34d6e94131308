"""Held-out loss against a naive loop over tokens, and bits per byte against their definition."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.model import ModelConfig
from atoll.data.batch import IGNORE, Batch
from atoll.data.cachewriter import write_cache
from atoll.data.loader import TokenLoader
from atoll.errors import DataError, NonFiniteError
from atoll.evaluation.loss import evaluate_loss, subset_rows
from atoll.model.llama import Llama

CONTEXT = 8
CONFIG = ModelConfig(
    vocab_size=50, layers=1, width=16, heads=2, ffn_width=16, context_length=CONTEXT, init_std=0.5
)
TOKENS = np.random.default_rng(0).integers(0, 50, 101)
TEXT_BYTES = 237
# Sums of about a hundred FP32 losses, each right to a few units in the last place.
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(CONFIG, trainable=False)


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    cache = write_cache(
        tmp_path_factory.mktemp("cache"), train=TOKENS, validation=TOKENS, shard_tokens=40
    )
    with TokenLoader(cache, "validation", context_length=CONTEXT, seed=0, group_shards=1) as opened:
        yield opened


def naive(model: Llama, tokens: np.ndarray, rows) -> tuple[float, int]:
    """Add up -log p(next token), one row and one token at a time, in float64."""
    nats, targets = 0.0, 0
    for row in rows:
        piece = torch.from_numpy(tokens[row * CONTEXT : (row + 1) * CONTEXT + 1])
        scores = model.logits(piece[None, None, :-1])[0, 0].double().log_softmax(-1)
        for place, token in enumerate(piece[1:].tolist()):
            nats -= float(scores[place, token])
            targets += 1
    return nats, targets


@pytest.mark.parametrize("batch_size", [1, 3, 5, 100])
def test_full_split_equals_a_naive_loop_whatever_the_batch(model, loader, batch_size):
    found = evaluate_loss(model, loader, batch_size=batch_size, text_bytes=TEXT_BYTES)
    nats, targets = naive(model, TOKENS, range(13))
    assert found is not None
    assert (found.targets, found.rows) == (targets, 13) == (100, 13)
    assert found.nats == pytest.approx(nats, rel=ROUNDING)
    assert found.nats_per_token == pytest.approx(nats / 100, rel=ROUNDING)


def test_bits_per_byte_of_the_full_split_are_its_bits_over_its_bytes(model, loader):
    found = evaluate_loss(model, loader, batch_size=4, text_bytes=TEXT_BYTES)
    nats, _ = naive(model, TOKENS, range(13))
    assert found is not None
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / TEXT_BYTES, rel=ROUNDING)


def test_uniform_model_costs_log_of_the_vocabulary(loader):
    flat = Llama(CONFIG.model_copy(update={"init_std": 1e-8}), trainable=False)
    found = evaluate_loss(flat, loader, batch_size=4, text_bytes=100)
    assert found is not None
    assert found.nats_per_token == pytest.approx(math.log(50), rel=ROUNDING)
    assert found.bits_per_byte == pytest.approx(math.log2(50), rel=ROUNDING)  # a target a byte


@settings(deadline=None, max_examples=20)
@given(rows=st.sets(st.integers(0, 12), min_size=1), batch_size=st.integers(1, 5))
def test_any_rows_equal_a_naive_loop_over_them(model, loader, rows, batch_size):
    rows = sorted(rows)
    found = evaluate_loss(model, loader, rows=rows, batch_size=batch_size, text_bytes=TEXT_BYTES)
    nats, targets = naive(model, TOKENS, rows)
    assert found is not None
    assert found.targets == targets
    assert found.nats == pytest.approx(nats, rel=ROUNDING)
    share = TEXT_BYTES * targets / 100
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / share, rel=ROUNDING)


def test_weights_count_each_target_by_its_weight(model):
    class Weighted:
        identity, num_rows = "", 1

        def batch(self, cursor, rows):
            targets = torch.tensor([[1, 2, IGNORE, 4]])
            return Batch(torch.tensor([[5, 6, 7, 8]]), targets, torch.tensor([[2.0, 0.5, 9.0, 0]]))

        def weight(self, cursor, rows):
            return 2.5

        def close(self):
            return None

    found = evaluate_loss(model, Weighted(), batch_size=1)
    scores = model.logits(torch.tensor([[[5, 6, 7, 8]]]))[0, 0].double().log_softmax(-1)
    assert found is not None
    assert found.targets == 2.5
    wanted = -float(2.0 * scores[0, 1] + 0.5 * scores[1, 2])
    assert found.nats == pytest.approx(wanted, rel=ROUNDING)
    assert found.bits_per_byte is None


def test_subset_is_fixed_by_its_seed_and_in_order():
    rows = subset_rows(5000, count=1024, seed=3)
    assert rows == subset_rows(5000, count=1024, seed=3)
    assert rows != subset_rows(5000, count=1024, seed=4)
    assert len(set(rows)) == 1024
    assert list(rows) == sorted(rows)
    assert 0 <= rows[0] <= rows[-1] < 5000


def test_subset_of_a_small_split_is_all_of_it():
    assert list(subset_rows(5, count=1024, seed=0)) == [0, 1, 2, 3, 4]


def test_stopped_evaluation_has_no_result(model, loader):
    asked = iter([False, True])
    assert evaluate_loss(model, loader, batch_size=1, should_stop=lambda: next(asked)) is None


def test_rows_without_targets_are_refused(model, loader):
    with pytest.raises(DataError, match="no target to score"):
        evaluate_loss(model, loader, rows=[], batch_size=1)


def test_loss_that_is_not_a_number_is_refused(loader):
    broken = Llama(CONFIG, trainable=False)
    broken.arena.view("norm").fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="held-out loss over 100 targets is nan"):
        evaluate_loss(broken, loader, batch_size=4)
