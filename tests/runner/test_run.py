"""Whole runs on a made-up cache: what they write, what they refuse, and what the numbers mean."""

import json
import math

import pytest
import torch
from made_up import made_up_tokens, tokenizer_json

from atoll import faults
from atoll.checkpoint.load import list_checkpoints, load_checkpoint
from atoll.config.load import load_config
from atoll.data.cachewriter import write_cache
from atoll.errors import (
    AtollError,
    CacheError,
    ConfigError,
    LockedError,
    NonFiniteError,
    StorageError,
    UnavailableError,
    UsageError,
)
from atoll.files import folder_lock
from atoll.runner import run
from atoll.runner.progress import Silence
from atoll.runner.stop import StopRequest
from atoll.runner.trained import evaluate_trained, open_trained
from atoll.tensors import parameter_digest
from atoll.train import device

CPU = torch.device("cpu")


def lines(folder, event: str) -> list[dict]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] == event]


def steps_kept(folder) -> list[int]:
    return [listed.step for listed in list_checkpoints(folder / "checkpoints")]


@pytest.fixture(scope="module")
def finished(make_recipe, tmp_path_factory):
    """A finished run with a checkpoint after each of its 3 virtual epochs of 4 updates."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return run(
        make_recipe(
            training={"checkpoint_policy": "interval", "log_every": 3},
            runtime={"output_dir": folder},
        )
    )


def test_finished_run_leaves_every_file_and_agrees_with_itself(finished):
    result, folder = finished, finished.folder
    assert result.status == "finished"
    assert json.loads((folder / "result.json").read_text()) == result.facts
    assert {path.name for path in folder.iterdir()} >= {
        "resolved.yaml",
        "environment.json",
        "metrics.jsonl",
        "run.log",
        "result.json",
        "best.json",
        "loss.svg",
        "weights",
        "checkpoints",
    }
    facts = result.facts
    assert (facts["steps"], facts["total_steps"], facts["epochs_done"]) == (12, 12, 3)
    assert facts["training_targets"] == 12 * 128
    assert facts["tokens_per_second"] > 0
    assert facts["pending_prefetches"] == 0
    assert steps_kept(folder) == [4, 8, 12]
    last = load_checkpoint(folder / "checkpoints" / "step-00000012")
    assert last.manifest.parameter_digest == facts["parameter_digest"]
    assert last.manifest.run["cache_identity"] == facts["cache_identity"]
    assert facts["train_loss_nats_per_token"] < math.log(64)


def test_resolved_recipe_loads_by_itself_and_is_equal(recipe):
    config = recipe(epochs=1)
    folder = run(config).folder
    assert load_config([folder / "resolved.yaml"]).config == config


def test_metrics_hold_windows_epochs_and_the_end(finished):
    folder = finished.folder
    assert [line["step"] for line in lines(folder, "train")] == [3, 4, 6, 8, 9, 12]
    assert [line["updates"] for line in lines(folder, "train")] == [3, 1, 2, 2, 1, 3]
    assert [line["step"] for line in lines(folder, "evaluation")] == [4, 8, 12]
    (final,) = lines(folder, "final")
    assert final["targets"] == 699  # every held-out token but the first, padding excluded
    assert final["text_bytes"] == 700


def test_best_epoch_is_the_one_with_the_lowest_loss(finished):
    folder = finished.folder
    best = json.loads((folder / "best.json").read_text())
    evaluated = lines(folder, "evaluation")
    lowest = min(evaluated, key=lambda line: line["loss_nats_per_token"])
    assert (best["step"], best["epoch"]) == (lowest["step"], lowest["epoch"])
    assert best["loss_nats_per_token"] == lowest["loss_nats_per_token"]


def test_evaluating_the_run_again_gives_the_loss_of_its_end(finished):
    result = finished
    trained = open_trained(result.folder, device=CPU)
    assert trained.step == 12
    assert parameter_digest(trained.model.arena.named()) == result.facts["parameter_digest"]
    assert evaluate_trained(trained, full=True).facts() == result.facts["validation"]
    subset = lines(result.folder, "evaluation")[-1]
    again = evaluate_trained(trained, full=False)
    assert again.nats_per_token == subset["loss_nats_per_token"]
    checkpoint = open_trained(trained.weights, device=CPU)
    assert checkpoint.step == 12


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"checkpoint_policy": "none"}, []),
        ({"checkpoint_policy": "final"}, [12]),
        ({"checkpoint_policy": "interval", "checkpoint_epochs": 2}, [8, 12]),
        ({"checkpoint_policy": "explicit", "checkpoint_epochs": [1, 2]}, [4, 8]),
        ({"checkpoint_policy": "interval", "checkpoint_keep": 2}, [8, 12]),
    ],
)
def test_policy_decides_which_checkpoints_stay(recipe, policy, kept):
    assert steps_kept(run(recipe(training=policy)).folder) == kept


def test_samples_are_written_after_every_epoch_and_change_no_bit(recipe, finished):
    config = recipe(
        training={
            "sample_prompt": "w3 w10 w17",
            "sample_tokens": 5,
            "checkpoint_policy": "interval",
        }
    )
    result = run(config)
    samples = lines(result.folder, "sample")
    assert [line["step"] for line in samples] == [4, 8, 12]
    assert all(line["text"].startswith("w3 w10 w17") for line in samples)
    assert all(len(line["text"].split("w")) == 1 + 3 + 5 for line in samples)
    assert result.facts["state_digests"] == finished.facts["state_digests"]


def test_prefetch_and_log_interval_change_no_bit(recipe, tmp_path):
    digests = [
        run(
            recipe(
                training={"log_every": log_every},
                data={"prefetch": prefetch},
                runtime={"output_dir": tmp_path / f"{prefetch}-{log_every}"},
            )
        ).facts["state_digests"]
        for prefetch, log_every in ((True, 1), (False, 5))
    ]
    assert digests[0] == digests[1]


def test_second_run_in_a_folder_is_refused_with_both_ways_on(finished, recipe):
    config = recipe(runtime={"output_dir": finished.folder})
    before = (config.runtime.output_dir / "result.json").read_bytes()
    with pytest.raises(UsageError, match="a finished run") as raised:
        run(config)
    assert f"--resume {config.runtime.output_dir}" in str(raised.value.hint)
    assert "runtime.output_dir" in str(raised.value.hint)
    assert (config.runtime.output_dir / "result.json").read_bytes() == before


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "ddp"},
        {"kind": "diloco"},
        {"kind": "gossip", "topology": "complete", "scheme": "atc"},
    ],
)
def test_strategies_of_later_versions_are_refused_before_anything_is_made(recipe, strategy):
    config = recipe(strategy=strategy)
    with pytest.raises(UnavailableError, match=r"strategy\.(kind|placement)"):
        run(config)
    assert not config.runtime.output_dir.exists()


def test_exactness_is_switched_on_before_anything_asks_the_device(recipe, monkeypatch):
    """Asking a GPU what it can do starts CUDA, and cuBLAS must be told before."""
    asked = []
    resolve = device.resolve_amp

    def watched(*arguments):
        asked.append(torch.are_deterministic_algorithms_enabled())
        return resolve(*arguments)

    monkeypatch.setattr(device, "resolve_amp", watched)
    run(recipe(runtime={"device": "cpu", "deterministic": True}))
    assert asked
    assert all(asked)


def test_budget_beyond_the_cache_says_what_is_missing_and_what_helps(recipe):
    config = recipe(training={"tokens_per_parameters": 6.0, "epoch_tokens_per_parameters": 1.0})
    with pytest.raises(ConfigError, match="tokens are missing") as raised:
        run(config)
    for setting in ("data.passes", "training.tokens_per_parameters", "more text"):
        assert setting in str(raised.value.hint)
    assert not (config.runtime.output_dir / "resolved.yaml").exists()


def test_more_passes_give_the_missing_rows(recipe):
    ratio = {"tokens_per_parameters": 0.65, "epoch_tokens_per_parameters": 0.65}
    facts = run(recipe(training=ratio, data={"passes": 2})).facts
    assert facts["cursor"] == facts["steps"] * 8 > 12_000 // 16


def test_vocabulary_larger_than_the_model_is_refused(recipe):
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 32"):
        run(recipe(model={"vocab_size": 32}))


def test_missing_cache_is_prepared_first(recipe, tmp_path):
    for name, start in (("train.txt", 0), ("held_out.txt", 400)):
        table = [f"{i} times {i} is {i * i}, says the table." for i in range(start, start + 400)]
        (tmp_path / name).write_text("\n".join(table))
    heard = []

    class Listener(Silence):
        def note(self, text: str) -> None:
            heard.append(text)

        def work(self, what: str, done: int, total: int | None) -> None:
            heard.append(what)

    config = recipe(
        epochs=1,
        model={"vocab_size": 300},
        data={
            "cache_path": None,
            "cache_dir": tmp_path / "caches",
            "source": str(tmp_path / "train.txt"),
            "validation_source": str(tmp_path / "held_out.txt"),
        },
    )
    result = run(config, progress=Listener())
    assert result.status == "finished"
    assert heard[0].startswith(f"no token cache in {tmp_path / 'caches'}")
    assert "prepare: encode" in heard


def test_missing_cache_path_is_named(recipe, tmp_path):
    with pytest.raises(CacheError, match="holds no finished token cache"):
        run(recipe(data={"cache_path": tmp_path / "nowhere"}))


def test_damaged_cache_fails_the_run_and_the_result_says_so(recipe, cache_path, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(cache_path, copy)
    shard = copy / "train-00001.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(bytes(data))
    config = recipe(data={"cache_path": copy})
    with pytest.raises(CacheError, match="train-00001"):
        run(config)
    found = json.loads((config.runtime.output_dir / "result.json").read_text())
    assert found["status"] == "failed"
    assert "train-00001" in found["error"]


def test_tokenizer_that_drifted_is_refused(recipe, cache_path, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(cache_path, copy)
    (copy / "tokenizer.json").write_bytes((copy / "tokenizer.json").read_bytes() + b" ")
    with pytest.raises(CacheError, match="does not match its digest"):
        run(recipe(data={"cache_path": copy}))


def test_loss_that_is_not_a_number_stops_with_update_and_parameter(recipe):
    config = recipe(optimizer={"lr": 1e30, "grad_clip": None})
    with pytest.raises(NonFiniteError, match=r"update \d+: .*(parameter|loss)") as raised:
        run(config)
    assert raised.value.exit_code == 1
    found = json.loads((config.runtime.output_dir / "result.json").read_text())
    assert found["status"] == "failed"
    assert found["error"] == raised.value.message
    assert f"update {found['steps'] + 1}:" in found["error"]


def test_full_disk_during_a_checkpoint_fails_cleanly(recipe):
    config = recipe(epochs=1)
    faults.arm("checkpoint.tensors.before_fsync=enospc")
    with pytest.raises(StorageError, match="No space left"):
        run(config)
    assert json.loads((config.runtime.output_dir / "result.json").read_text())["status"] == "failed"


def test_memory_running_out_names_the_setting_to_halve(recipe, monkeypatch):
    from atoll.train.step import Update

    def fail(self, *, lr):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Update, "run", fail)
    with pytest.raises(AtollError, match="memory ran out on cpu") as raised:
        run(recipe())
    assert "training.micro_batch_size=2 (it is 4)" in str(raised.value.hint)


def test_stop_request_ends_after_the_update_with_a_checkpoint(recipe):
    faults.arm("train.after_update:6=interrupt")
    result = run(recipe())
    assert result.status == "interrupted"
    assert (result.step, result.facts["stopped_by"]) == (6, "SIGINT")
    assert result.facts["validation"] is None
    assert result.facts["pending_prefetches"] == 0
    assert steps_kept(result.folder) == [6]


def test_stop_without_checkpoints_keeps_none(recipe):
    faults.arm("train.after_update:6=interrupt")
    result = run(recipe(training={"checkpoint_policy": "none"}))
    assert (result.status, result.step) == ("interrupted", 6)
    assert steps_kept(result.folder) == []


def test_caller_may_stop_before_the_first_update(recipe):
    stop = StopRequest()
    stop.ask("requeue")
    result = run(recipe(), stop=stop)
    assert (result.status, result.step) == ("interrupted", 1)
    assert result.facts["stopped_by"] == "requeue"


class StopWhenTold(Silence):
    """Asks for a stop when a note begins with some text."""

    def __init__(self, stop: StopRequest, text: str) -> None:
        self._stop, self._text = stop, text

    def note(self, text: str) -> None:
        if text.startswith(self._text):
            self._stop.ask("SIGTERM")


def test_stop_while_an_epoch_is_reported_makes_no_further_update(recipe):
    stop = StopRequest()
    result = run(recipe(), stop=stop, progress=StopWhenTold(stop, "epoch 2"))
    assert (result.status, result.step, result.facts["epochs_done"]) == ("interrupted", 8, 2)
    assert steps_kept(result.folder) == [8]


def test_stop_while_the_end_is_scored_can_be_made_up_for(recipe, finished):
    stop = StopRequest()
    config = recipe()
    result = run(config, stop=stop, progress=StopWhenTold(stop, "scoring"))
    assert (result.status, result.step) == ("interrupted", 12)
    assert result.facts["validation"] is None
    resumed = run(config, resume=config.runtime.output_dir)
    assert resumed.status == "finished"
    assert resumed.facts["validation"] == finished.facts["validation"]


def test_two_jobs_in_one_folder_are_kept_apart(recipe):
    config = recipe()
    with folder_lock(config.runtime.output_dir), pytest.raises(LockedError, match="is in use"):
        run(config)


def test_cache_without_held_out_text_trains_and_judges_nothing(recipe, tmp_path):

    write_cache(
        tmp_path / "cache",
        train=made_up_tokens(3000, 0),
        shard_tokens=2048,
        vocab_size=64,
        tokenizer_json=tokenizer_json(),
    )
    facts = run(recipe(data={"cache_path": tmp_path / "cache"})).facts
    assert facts["status"] == "finished"
    assert facts["validation"] is None
    assert facts["best"] is None
