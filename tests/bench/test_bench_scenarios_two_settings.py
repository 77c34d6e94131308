"""Two settings of one recipe: equal rows and updates, losses of both, and what is refused."""

import json

import numpy as np
import pytest

from atoll.bench.contest import hold_contest
from atoll.bench.scenarios.two_settings import (
    Pair,
    compare_losses,
    load_pair,
    setting_contests,
)
from atoll.bench.timing import Stopwatch, nothing
from atoll.data.cachewriter import write_cache
from atoll.errors import ConfigError, UsageError

RECIPE = {
    "model": {
        "vocab_size": 64,
        "layers": 2,
        "width": 32,
        "heads": 2,
        "ffn_width": 48,
        "context_length": 16,
    },
    "training": {"batch_tokens": 128, "micro_batch_size": 8},
    "runtime": {"device": "cpu", "deterministic": True, "compile": False},
}
PLAIN = Stopwatch(settle=nothing)
"""Without the garbage collections between windows, which take most of the time of so small ones."""


@pytest.fixture
def pair(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(RECIPE))

    def make(*, a=(), b=(), common=(), **options):
        return Pair([file], common, a, b, updates=1, **options)

    return make


def held(pair, *, num_blocks=2):
    (record,) = [
        hold_contest(contest, seed=0, num_blocks=num_blocks, stopwatch=PLAIN)
        for contest in setting_contests(pair, num_blocks=num_blocks, seed=0)
    ]
    return record


def test_both_settings_make_the_same_updates_on_the_same_rows(pair):
    record = held(pair(b=["training.micro_batch_size=2"]))
    assert record["facts"]["differences"] == {"training.micro_batch_size": [8, 2]}
    assert (record["a"], record["b"]) == (
        "training.micro_batch_size=8",
        "training.micro_batch_size=2",
    )
    assert record["facts"]["targets_per_window"] == 128
    losses = record["outcome"]["loss_nats_per_target"]
    # 4 updates warm up; then 2 windows that size, 1 that warms, 16 of A/A and 4 of A/B, each of 1.
    assert [step for step, _, _ in losses] == list(range(5, 4 + 2 + 1 + 16 + 4 + 1))
    # Microbatches only change the order of sums in FP32; other rows would differ from 0.01 on.
    assert record["outcome"]["largest_relative_difference_of_loss"] < 1e-5


def test_settings_that_train_otherwise_are_compared_with_both_losses(pair):
    record = held(pair(a=["optimizer.lr=0.1"], b=["optimizer.lr=0.0001"]))
    assert record["outcome"]["largest_relative_difference_of_loss"] > 1e-3
    assert record["verdict"] in ("measured", "void")


def test_packed_models_are_compared_with_one_model(pair):
    packed = ["kind=gossip", "placement=packed", "models=4", "scheme=awc"]
    packed += ["topology=one_peer_exponential"]
    record = held(pair(b=[f"strategy.{word}" for word in packed]))
    assert record["facts"]["a"]["local_models"] == 1
    assert record["facts"]["b"]["local_models"] == 4


def test_placement_and_prefetch_are_compared_on_a_token_cache(pair, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 64, 20_000)
    cache = write_cache(tmp_path / "cache", train=tokens, vocab_size=64, shard_tokens=4_000)
    common = [f"data.cache_path={cache.folder}", "data.placement=pageable"]
    found = held(pair(common=common, b=["data.prefetch=false"], data="cache"))
    assert found["outcome"]["largest_relative_difference_of_loss"] == 0.0
    assert found["facts"]["data"] == "cache"


def test_other_rows_are_refused(pair, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 64, 20_000)
    cache = write_cache(tmp_path / "cache", train=tokens, vocab_size=64)
    other = pair(
        common=[f"data.cache_path={cache.folder}"], b=["data.shuffle_seed=1"], data="cache"
    )
    with pytest.raises(UsageError, match=r"not see the same rows: data\.shuffle_seed differs"):
        held(other)


def test_a_cache_too_small_for_all_windows_is_refused_before_anything_is_timed(pair, tmp_path):
    cache = write_cache(tmp_path / "cache", train=np.arange(640) % 64, vocab_size=64)
    small = pair(
        common=[f"data.cache_path={cache.folder}"], b=["data.prefetch=false"], data="cache"
    )
    with pytest.raises(ConfigError):
        held(small)


@pytest.mark.parametrize(
    ("b", "message", "hint"),
    [
        (["runtime.deterministic=false"], "runtime.deterministic differs", "--a 'atoll train"),
        (["runtime.cpu_threads=2"], "holds for a whole process", "--set runtime.cpu_threads="),
        (["training.batch_tokens=256"], "128 in A and 256 in B", "bench throughput"),
        (["model.context_length=8"], "not be the same rows", "give both the same"),
        (["evaluation.batch_size=3"], "no part in an update on synthetic rows", "two commands"),
        (["data.prefetch=false"], "only in data.prefetch", "--data cache"),
        ([], "A and B are the same recipe", "--a-set KEY=VALUE"),
    ],
)
def test_what_cannot_take_turns_is_refused_with_what_to_do(pair, b, message, hint):
    with pytest.raises(UsageError, match=message) as raised:
        load_pair(pair(b=b))
    assert hint in raised.value.hint


def test_losses_are_laid_side_by_side_where_both_were_measured():
    found = compare_losses({5: 4.0, 10: 3.0, 15: 2.0}, {10: 3.0, 15: 2.5})
    assert found["loss_nats_per_target"] == [[10, 3.0, 3.0], [15, 2.0, 2.5]]
    assert found["largest_relative_difference_of_loss"] == pytest.approx(0.2)
    assert compare_losses({5: 1.0}, {})["largest_relative_difference_of_loss"] is None
