"""`atoll bench loader`: one trial of real training on a model of a few thousand parameters."""

import json
import math
import threading
from itertools import count

import numpy as np
import pytest

from atoll import faults
from atoll.bench.loader_figures import figures, update_of_call
from atoll.bench.loader_throttle import ThrottledSource
from atoll.bench.loader_trial import TrialRequest, run_trial
from atoll.cli.main import run
from atoll.config.model import ModelConfig, parameter_count
from atoll.config.schema import RunConfig
from atoll.data.cachewriter import write_cache
from atoll.data.reader import THREAD_NAME
from atoll.errors import AtollError, InterruptedRunError, UsageError

VOCAB = 64
ROWS = 32
STEPS_OF_A_GROUP = 4
BUDGET_STEPS = 40
RECORD_FIELDS = {
    "reads": {"split", "start", "stop", "bytes", "seconds", "thread", "storage_bytes"}
    | {"started_seconds"},
    "activations": {"batch", "group", "cursor", "prefetched", "ready", "seconds"}
    | {"started_seconds"},
}


@pytest.fixture(scope="module")
def cache_path(tmp_path_factory):
    """Ten groups of two shards; a group is 4 updates."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    folder = tmp_path_factory.mktemp("cache") / "tokens"
    shard_tokens = STEPS_OF_A_GROUP * ROWS * 16 // 2
    write_cache(
        folder,
        train=np.arange(20 * shard_tokens + 1) % VOCAB,
        validation=np.arange(100) % VOCAB,
        shard_tokens=shard_tokens,
        vocab_size=VOCAB,
        tokenizer_json=tokenizer.to_str().encode(),
    )
    return folder


@pytest.fixture
def recipe(cache_path):
    def make(*, layers=2, width=32, **data) -> RunConfig:
        model = {"vocab_size": VOCAB, "layers": layers, "width": width, "heads": 2}
        model |= {"ffn_width": 2 * width, "context_length": 16}
        ratio = BUDGET_STEPS * ROWS * 16 / parameter_count(ModelConfig(**model))
        return RunConfig.model_validate(
            {
                "model": model,
                "data": {"cache_path": cache_path} | data,
                "training": {
                    "batch_tokens": ROWS * 16,
                    "micro_batch_size": ROWS,
                    "tokens_per_parameters": ratio,
                    "epoch_tokens_per_parameters": ratio,
                    "log_every": 5,
                },
                "lr_schedule": {"warmup_steps": 2},
                "runtime": {"device": "cpu"},
            }
        )

    return make


def trial(config, *, steps=9, exclude=3, delay=0.0, **options):
    request = TrialRequest(steps=steps, exclude=exclude, read_delay_seconds=delay)
    return run_trial(config, request, command=["test"], **options)


def test_a_trial_ends_interrupted_after_exactly_its_last_update(recipe):
    record = trial(recipe())
    assert (record["status"], record["stopped_by"], record["steps"]) == (
        "interrupted",
        "SIGTERM",
        9,
    )
    assert [window["step"] for window in record["windows"]] == [3, 5, 9]
    assert record["training_targets"] == 9 * ROWS * 16
    assert record["pending_prefetches"] == 0
    assert record["gpu"] is None
    assert record["batch_seconds"]["count"] == 6
    for stage in ("pin", "copy_enqueue", "copy_gpu", "gather"):
        assert record[f"{stage}_seconds"] is None
    assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}


def test_groups_are_recorded_as_they_were_read_and_activated(recipe):
    record = trial(recipe())
    for name, fields in RECORD_FIELDS.items():
        assert {frozenset(entry) for entry in record[name]} == {frozenset(fields)}
    assert [
        (entry["batch"], entry["group"], entry["cursor"]) for entry in record["activations"]
    ] == [
        (1, 0, 0),
        (5, 1, 4 * ROWS),
        (9, 2, 8 * ROWS),
    ]
    assert [entry["prefetched"] for entry in record["activations"]] == [False, True, True]
    for entry in record["activations"]:
        first, last = entry["started_seconds"], entry["started_seconds"] + entry["seconds"]
        ends = [0.0, *record["update_end_seconds"]]
        assert ends[entry["batch"] - 1] <= first <= last <= ends[entry["batch"]]
    assert record["reads"][0]["thread"] == "MainThread"
    assert {read["thread"] for read in record["reads"][1:]} == {THREAD_NAME}


def test_calls_of_packed_models_and_microbatches_count_for_their_update(recipe):
    sections = recipe().model_dump(mode="json")
    sections["strategy"] = {
        "kind": "gossip",
        "placement": "packed",
        "models": 4,
        "topology": "one_peer_exponential",
        "scheme": "awc",
    }
    sections["training"]["micro_batch_size"] = ROWS // 4 // 2
    record = trial(RunConfig.model_validate(sections))
    assert record["calls_after_update"]["batch"] == [8 * step for step in range(1, 10)]
    assert record["batch_seconds"]["count"] == 6
    samples = record["samples"]["batch"]
    each = [math.fsum(samples[start : start + 8]) for start in range(3 * 8, 9 * 8, 8)]
    assert record["batch_seconds"]["total"] == math.fsum(each)
    updates = {update_of_call(record, entry["batch"]) for entry in record["activations"]}
    assert updates == {1, 5, 9}


def test_every_figure_is_computed_again_from_the_samples_in_the_file(recipe):
    record = json.loads(json.dumps(trial(recipe(prefetch=False))))
    again = figures(record)
    assert json.dumps(again) == json.dumps({name: record[name] for name in again})
    assert len(record["samples"]["batch"]) == record["steps"]


def test_a_trial_trains_what_a_run_trains(recipe, tmp_path):
    """The last window of a run that the same signal stops after the same update, bit for bit."""
    from atoll.runner.compose import run as train_run

    config = recipe()
    sections = config.model_dump(mode="json")
    sections["runtime"]["output_dir"] = str(tmp_path / "run")
    sections["training"]["checkpoint_policy"] = "none"
    faults.arm("train.after_update:9=interrupt")
    result = train_run(RunConfig.model_validate(sections))
    faults.disarm()
    assert (result.status, result.step) == ("interrupted", 9)
    record = trial(config, exclude=5)
    assert record["last_training_window_loss"] == result.facts["train_loss_nats_per_token"]


class TickingClock:
    """A clock that goes on by 1 ms whenever somebody looks, and by what somebody sleeps."""

    def __init__(self) -> None:
        self.ticks = count()
        self.slept_seconds = 0.0

    def __call__(self) -> float:
        return next(self.ticks) / 1000 + self.slept_seconds

    def sleep(self, seconds: float) -> None:
        self.slept_seconds += seconds


def test_a_slow_reader_without_prefetch_is_named_with_the_seconds_it_cost(recipe):
    clock = TickingClock()
    record = trial(recipe(prefetch=False), steps=24, delay=0.5, clock=clock, sleep=clock.sleep)
    assert clock.slept_seconds == 6 * 0.5
    found = record["exposure"]
    assert found["stage"] == "group_read"
    # The reads themselves and the ticks of the clock are lost as well.
    assert found["seconds_lost"] == pytest.approx(5 * 0.5, rel=0.1)


@pytest.mark.slow
def test_a_slow_reader_with_prefetch_is_named_with_the_seconds_it_cost(recipe):
    fast, slow = (trial(recipe(), steps=12, delay=delay) for delay in (0.0, 1.2))
    # What was lost is known from outside: how much longer the same updates took. A profile has to
    # say it within 10%; the delays are so long that a busy machine's updates do not blur that.
    windows = [record["exposure"]["window_seconds"] for record in (fast, slow)]
    assert slow["exposure"]["stage"] == "group_wait"
    assert slow["exposure"]["seconds_lost"] == pytest.approx(windows[1] - windows[0], rel=0.1)
    assert [entry["ready"] for entry in slow["activations"]] == [None, False, False]


def test_of_a_fast_reader_no_stage_is_exposed(recipe):
    record = trial(recipe(layers=6, width=128), steps=12)
    assert record["exposure"]["stage"] == "none"
    assert record["exposure"]["seconds_lost"] == 0


def test_a_delay_ends_when_the_read_is_stopped():
    from concurrent.futures import CancelledError

    class OnePiece:
        dtype = np.dtype(np.uint16)

        def read(self, group, take, *, stop=None):
            take(group, np.zeros(1, np.uint16))

    stop = threading.Event()
    stop.set()
    taken = []
    with pytest.raises(CancelledError):
        ThrottledSource(OnePiece(), delay_seconds=3600).read(7, taken.append, stop=stop)
    assert not taken


def test_another_signal_ends_the_trial_without_a_record(recipe):
    faults.arm("train.after_update:4=interrupt")
    with pytest.raises(InterruptedRunError, match="SIGINT ended the trial after update 4 of 9"):
        trial(recipe())


def test_a_stop_by_anything_but_the_trials_own_signal_is_an_error(recipe):
    faults.arm("train.after_update:9=interrupt")
    with pytest.raises(AtollError, match="stopped by SIGINT, with 0 pending"):
        trial(recipe())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3, "exclude": 3}, "3 of 3 updates are to be excluded"),
        (
            {"steps": 100_000},
            "a trial of 100000 updates was asked for, and the recipe's budget has",
        ),
        ({"delay": -1.0}, "reads cannot be 1 s faster"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(recipe, options, message):
    with pytest.raises(UsageError, match=message):
        trial(recipe(), **options)


def test_only_the_main_thread_may_make_a_trial(recipe):
    caught = []

    def attempt():
        with pytest.raises(UsageError, match="only the main thread hears") as error:
            trial(recipe())
        caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert caught


def test_the_command_prints_and_writes_one_document(recipe, tmp_path, capsys):
    from atoll.files import write_json

    file = tmp_path / "recipe.yaml"
    write_json(file, recipe().model_dump(mode="json"))
    output = tmp_path / "trial.json"
    arguments = ["--config", str(file), "--steps", "9", "--exclude", "5", "--prefetch", "off"]
    assert run(["bench", "loader", *arguments, "--output", str(output)]) == 0
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert record == json.loads(output.read_text())
    assert record["condition"] == "baseline"
    assert record["prefetch"] is False
    assert "exposed: " in said.err


def test_a_missing_cache_is_refused(recipe, tmp_path):
    with pytest.raises(UsageError, match="there is no finished token cache in"):
        trial(recipe(cache_path=tmp_path / "nothing"))


@pytest.mark.slow
def test_a_trial_of_a_series_is_a_process_that_imports_the_frozen_source(recipe, tmp_path):
    from atoll.bench import loader_series

    configs = {"baseline": recipe(), "candidate": recipe(prefetch=False)}
    request = loader_series.SeriesRequest(steps=9, exclude=5, num_blocks=1, seed=0)
    done = []

    def first_only(words, environment):
        if done:
            raise AtollError("one is enough")
        loader_series._run_process(words, environment)
        done.append(words)

    with pytest.raises(AtollError, match="one is enough"):
        loader_series.run_series(tmp_path, configs, request, run_one=first_only)
    record = json.loads((tmp_path / "trials" / "01-baseline.json").read_text())
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert record["source_hash"] == plan["source_hash"]
    # A checkout knows its revision; the frozen copy, which lies in none, does not.
    assert record["source_revision"] is None
    assert (record["condition"], record["position_in_allocation"]) == ("baseline", 1)
    assert figures(record)["exposure"] == record["exposure"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("placement", "stages"),
    [
        ("pageable", {"pin", "copy_enqueue", "copy_gpu"}),
        ("pinned", {"copy_enqueue", "copy_gpu"}),
        ("device", {"gather"}),
    ],
)
def test_every_placement_tells_its_stages_on_a_gpu(recipe, placement, stages):
    sections = recipe(placement=placement).model_dump(mode="json")
    sections["runtime"]["device"] = "cuda"
    record = trial(RunConfig.model_validate(sections))
    all_stages = {"pin", "copy_enqueue", "copy_gpu", "gather"}
    assert {name for name in all_stages if record[f"{name}_seconds"] is not None} == stages
    assert len(record["samples"]["device_gap"]) == len(record["samples"]["batch"]) == 9
    assert record["exposure"]["basis"] == "events on the GPU"
    assert record["gpu"]
