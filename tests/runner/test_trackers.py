"""Writers of metrics that are extras."""

import importlib.util

import pytest

from atoll.errors import UnavailableError
from atoll.runner import run
from atoll.runner.trackers import TensorBoardTracker, WandbTracker, check_trackers, open_trackers


def test_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"runtime\.trackers names wandb") as raised:
        check_trackers(["wandb"])
    assert raised.value.hint is not None
    assert "pip install 'atoll[wandb]'" in raised.value.hint


def test_no_trackers_need_nothing(tmp_path):
    assert open_trackers([], folder=tmp_path, config={}) == []


def test_tensorboard_files_hold_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    tracker.write({"train/loss_nats_per_token": 2.5}, step=7)
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    (scalar,) = events.Scalars("train/loss_nats_per_token")
    assert (scalar.step, scalar.value) == (7, 2.5)


class StandInWandb:
    """Has what the tracker uses of wandb, and remembers it."""

    def __init__(self) -> None:
        self.started, self.lines, self.finished = [], [], False

    def init(self, **settings):
        self.started.append(settings)
        return self

    def log(self, numbers, *, step):
        self.lines.append((step, numbers))

    def finish(self) -> None:
        self.finished = True


def test_wandb_run_is_named_by_its_folder_and_goes_on_when_resumed(tmp_path):
    wandb = StandInWandb()
    for _ in range(2):
        tracker = WandbTracker(wandb, folder=tmp_path / "tiny", config={"model": {"width": 4}})
        tracker.write({"train/lr": 0.1}, step=3)
        tracker.close()
    first, second = wandb.started
    assert first["name"] == "tiny"
    assert first["dir"] == str(tmp_path / "tiny")
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"
    assert first["config"] == {"model": {"width": 4}}
    assert wandb.lines == [(3, {"train/lr": 0.1})] * 2
    assert wandb.finished


def test_run_writes_its_metrics_to_tensorboard(recipe):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run(recipe(epochs=1, runtime={"trackers": ["tensorboard"]})).folder
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("evaluation/loss_nats_per_token")] == [4]
    assert "train/targets_per_second" in events.Tags()["scalars"]


def test_missing_tracker_is_refused_before_the_folder_is_made(recipe, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = recipe(runtime={"trackers": ["wandb"]})
    with pytest.raises(UnavailableError):
        run(config)
    assert not config.runtime.output_dir.exists()
