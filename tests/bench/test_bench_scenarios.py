"""The built-in comparisons in small: both sides do the same work, and say so when they do not."""

import json

import numpy as np
import pytest

from atoll.bench.compare import run_blocks
from atoll.bench.scenarios.batch import check_rows
from atoll.bench.scenarios.choose import scenario
from atoll.bench.scenarios.prepare import check_tokens
from atoll.bench.scenarios.training import TrainingSettings, check_equal, paired_updates
from atoll.bench.timing import SYSTEM, time_window
from atoll.cli.main import run
from atoll.data.cachewriter import write_cache
from atoll.data.loader import TokenLoader
from atoll.errors import AtollError, DataError

SMALL_BATCH = ["group_tokens=4000", "context_length=16", "rows=4", "window_seconds=0"]
SMALL_TRAINING = ["context_length=8", "micro_rows=[2]", "modes=[eager]", "window_seconds=0"]


def test_the_batch_comparison_ends_in_one_json_document(capsys, tmp_path):
    settings = [part for name in SMALL_BATCH for part in ("--set", name)]
    output = tmp_path / "result.json"
    arguments = ["bench", "compare", "batch", "--blocks", "2", *settings, "--output", str(output)]
    run(arguments)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads(output.read_text())
    assert record["parameters"]["rows"] == 4
    (comparison,) = record["comparisons"]
    assert comparison["target"] == {"quantity": "time", "bound": 1.3}
    assert comparison["a_b"]["ratio"]["ratio"] > 0
    assert len(comparison["a_b"]["samples"]) == 8


def test_both_sides_of_the_batch_comparison_go_through_the_whole_group():
    _, contests = scenario("batch", SMALL_BATCH)
    for contest in contests:
        run_blocks(contest.a, contest.b, order=["ABBA"], repeats=200, stopwatch=SYSTEM)
        assert contest.facts["batches_in_the_group"] == (4000 - 1) // 16 // 4


def test_a_gather_of_other_rows_is_refused(tmp_path):
    tokens = np.arange(4000) % 251
    cache = write_cache(tmp_path / "cache", train=tokens, vocab_size=251)
    with TokenLoader(cache, "train", context_length=16, seed=0, group_shards=1) as loader:
        first = loader.batch(0, 4)
        bare = np.column_stack([first.inputs_BT.numpy(), first.targets_BT.numpy()[:, -1]])
        with pytest.raises(AtollError, match="of the loader is not what `planted`"):
            check_rows(loader, {"planted": lambda k: np.roll(bare, 1, axis=0)}, 4)


@pytest.mark.slow
def test_both_sides_of_training_start_from_equal_loss_and_gradient():
    _, contests = scenario("training", SMALL_TRAINING)
    (contest,) = contests
    facts = contest.facts["before_the_first_update"]
    ours, theirs = facts["loss_nats_per_token"]
    assert ours == pytest.approx(theirs, rel=1e-5)  # FP32 sums in another order
    for condition in (contest.a, contest.b):
        assert time_window(condition, repeats=1, stopwatch=SYSTEM) > 0


@pytest.mark.slow
def test_training_stays_equal_over_several_updates():
    ours, theirs, _ = paired_updates(TrainingSettings(context_length=8), rows=2, compiled=False)
    for _ in range(5):
        our, their = ours(), theirs()
    # AdamW divides by the root of its second moment, which turns rounding of tiny gradients into
    # steps of the size of the rate; measured 2e-6 over these updates.
    assert our[0] == pytest.approx(their[0], rel=1e-4)


@pytest.mark.parametrize(("loss", "norm"), [(2.001, 0.5), (2.0, 0.501)])
def test_models_that_do_not_agree_are_not_compared(loss, norm):
    with pytest.raises(AtollError, match="at equal weights is"):
        check_equal((2.0, 0.5), (loss, norm))


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(6):
        text = "".join(f"line {number} {line}: some words of text\n" for line in range(40))
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.mark.slow
def test_prepare_and_the_bare_tokenizer_give_equal_numbers_of_tokens(corpus):
    _, contests = scenario("prepare", [f"folder={corpus}", "vocab_size=300"])
    for contest in contests:
        assert contest.facts["documents"] == 6
        assert contest.facts["tokens"] > 6 * 40
        samples = run_blocks(contest.a, contest.b, order=["ABBA"], repeats=1, stopwatch=SYSTEM)
        assert all(sample.seconds > 0 for sample in samples)


def test_a_cache_of_another_text_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(path))
    cache = write_cache(tmp_path / "cache", train=np.zeros(7, np.int64), vocab_size=2)
    assert check_tokens(cache, path, ["abab", "aaa"]) == 7
    with pytest.raises(AtollError, match="the cache holds 7 tokens of text"):
        check_tokens(cache, path, ["abab", "aaab"])


def test_a_folder_without_text_is_refused(tmp_path):
    _, contests = scenario("prepare", [f"folder={tmp_path}"])
    with pytest.raises(DataError, match="holds no UTF-8 text file"):
        next(iter(contests))
