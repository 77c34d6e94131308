"""Going on after a stop or a kill: the end is that of a run which never stopped."""

import json
import signal
import sys

import pytest
from in_a_process import run_in_a_process
from made_up import made_up_tokens, tokenizer_json

from atoll import faults
from atoll.checkpoint.load import list_checkpoints
from atoll.data.cachewriter import write_cache
from atoll.errors import StateMismatchError, UsageError
from atoll.runner import run

INTERVAL = {"checkpoint_policy": "interval"}


@pytest.fixture(scope="module")
def unbroken(make_recipe, tmp_path_factory):
    """The result of a run of 3 epochs (12 updates) that nothing stops."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return run(make_recipe(runtime={"output_dir": folder}, training=INTERVAL)).facts


def assert_same_end(found: dict, wanted: dict) -> None:
    for name in ("status", "steps", "cursor", "state_digests", "validation", "training_targets"):
        assert found[name] == wanted[name], name
    assert found["best"] == wanted["best"]


@pytest.mark.parametrize("step", [1, 4, 7, 11, 12])
def test_stopped_and_resumed_equals_unbroken(recipe, unbroken, step):
    config = recipe(training=INTERVAL)
    faults.arm(f"train.after_update:{step}=interrupt")
    stopped = run(config)
    faults.disarm()
    assert (stopped.status, stopped.step) == ("interrupted", step)
    resumed = run(config, resume=config.runtime.output_dir)
    assert resumed.facts["resumed_from_step"] == step
    assert_same_end(resumed.facts, unbroken)


def test_each_epoch_is_evaluated_once_also_when_stopped_at_its_end(recipe):
    config = recipe()
    faults.arm("train.after_update:4=interrupt")
    run(config)
    faults.disarm()
    run(config, resume=config.runtime.output_dir)
    records = map(
        json.loads, (config.runtime.output_dir / "metrics.jsonl").read_text().splitlines()
    )
    assert [r["step"] for r in records if r["event"] == "evaluation"] == [4, 8, 12]


def test_resuming_may_change_output_and_prefetch(recipe, unbroken):
    faults.arm("train.after_update:7=interrupt")
    config = recipe(training=INTERVAL)
    run(config)
    faults.disarm()
    other = recipe(training={"log_every": 1, "checkpoint_policy": "none"}, data={"prefetch": False})
    assert_same_end(run(other, resume=config.runtime.output_dir).facts, unbroken)


def test_other_folder_begins_at_the_newest_checkpoint_and_leaves_the_first_alone(
    recipe, unbroken, tmp_path
):
    config = recipe(training=INTERVAL)
    faults.arm("train.after_update:7=interrupt")
    run(config)
    faults.disarm()
    before = (config.runtime.output_dir / "result.json").read_bytes()
    other = recipe(training=INTERVAL, runtime={"output_dir": tmp_path / "other"})
    assert_same_end(run(other, resume=config.runtime.output_dir).facts, unbroken)
    assert (config.runtime.output_dir / "result.json").read_bytes() == before
    kept = [listed.step for listed in list_checkpoints(tmp_path / "other" / "checkpoints")]
    assert kept == [8, 12]


def test_other_recipe_is_refused_with_every_difference_and_changes_nothing(recipe):
    config = recipe(epochs=1)
    faults.arm("train.after_update:2=interrupt")
    run(config)
    faults.disarm()
    before = (config.runtime.output_dir / "resolved.yaml").read_bytes()
    other = recipe(epochs=1, optimizer={"lr": 0.5}, runtime={"seed": 3})
    with pytest.raises(StateMismatchError) as raised:
        run(other, resume=config.runtime.output_dir)
    assert "optimizer.lr: 0.01 -> 0.5" in raised.value.message
    assert "runtime.seed: 0 -> 3" in raised.value.message
    assert (config.runtime.output_dir / "resolved.yaml").read_bytes() == before


def test_finished_run_is_refused_and_says_how_to_train_on(recipe):
    config = recipe(epochs=1)
    run(config)
    with pytest.raises(UsageError, match="all 4 updates are made") as raised:
        run(config, resume=config.runtime.output_dir)
    assert "training.tokens_per_parameters" in str(raised.value.hint)


def test_longer_budget_of_a_held_rate_equals_the_long_run(recipe, tmp_path):
    wsd = {"name": "wsd", "warmup_steps": 2, "decay_fraction": 0.01}
    short = recipe(epochs=1, lr_schedule=wsd)
    run(short)
    # The last update of the short run decays from the full rate, so all its rates are held ones.
    longer = recipe(epochs=2, lr_schedule=wsd)
    resumed = run(longer, resume=short.runtime.output_dir)
    other = {"output_dir": tmp_path / "long"}
    whole = run(recipe(epochs=2, lr_schedule=wsd, runtime=other))
    assert resumed.facts["state_digests"] == whole.facts["state_digests"]


def test_other_tokens_are_refused(recipe, tmp_path):

    config = recipe(epochs=1)
    faults.arm("train.after_update:2=interrupt")
    run(config)
    faults.disarm()
    write_cache(
        tmp_path / "cache",
        train=made_up_tokens(12_000, 9),
        validation=made_up_tokens(700, 1),
        shard_tokens=2048,
        vocab_size=64,
        tokenizer_json=tokenizer_json(),
    )
    other = recipe(epochs=1, data={"cache_path": tmp_path / "cache"})
    with pytest.raises(StateMismatchError, match="cache_identity was"):
        run(other, resume=config.runtime.output_dir)


def test_folder_that_is_no_run_is_refused(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match=r"no run's folder: it has no resolved\.yaml"):
        run(recipe(), resume=tmp_path / "run")


def test_run_killed_before_its_first_checkpoint_starts_again(recipe, unbroken):
    config = recipe(training=INTERVAL)
    faults.arm("checkpoint.receipt.before_rename=raise")
    with pytest.raises(faults.InjectedFault):
        run(config)
    faults.disarm()
    resumed = run(config, resume=config.runtime.output_dir)
    assert resumed.facts["resumed_from_step"] is None
    assert_same_end(resumed.facts, unbroken)


processes = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


@processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "prefetch", "log_every"),
    [
        ("train.after_update:6=kill", True, 3),  # two updates after a checkpoint: made again
        ("train.after_update:6=kill", False, 1),
        ("checkpoint.tensors.before_rename:2=kill", True, 5),  # while the second is written
        ("checkpoint.manifest.after_rename:1=kill", False, 2),  # the first is just whole
    ],
)
def test_killed_and_resumed_equals_unbroken(recipe, unbroken, kill, prefetch, log_every):
    config = recipe(training=INTERVAL | {"log_every": log_every}, data={"prefetch": prefetch})
    assert run_in_a_process(config, fault=kill) == -signal.SIGKILL
    status = json.loads((config.runtime.output_dir / "result.json").read_text())["status"]
    assert status == "running"
    assert run_in_a_process(config, fault="", resume=True) == 0
    found = json.loads((config.runtime.output_dir / "result.json").read_text())
    assert found["resumed_from_step"] == 4
    assert_same_end(found, unbroken)


@processes
@pytest.mark.slow
def test_killed_twice_and_resumed_equals_unbroken(recipe, unbroken):
    config = recipe(training=INTERVAL)
    assert run_in_a_process(config, fault="train.after_update:5=kill") == -signal.SIGKILL
    again = run_in_a_process(config, fault="train.after_update:6=kill", resume=True)
    assert again == -signal.SIGKILL
    assert run_in_a_process(config, fault="", resume=True) == 0
    found = json.loads((config.runtime.output_dir / "result.json").read_text())
    assert found["resumed_from_step"] == 8
    assert_same_end(found, unbroken)
