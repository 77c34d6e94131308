"""Trials of two conditions: their order, what is frozen, and going on after any interruption."""

from pathlib import Path

import pytest

from atoll.bench.loader_series import SeriesRequest, run_series, series_report, trial_order
from atoll.config.schema import RunConfig
from atoll.errors import AtollError, StateMismatchError
from atoll.files import read_json, write_json

REQUEST = SeriesRequest(steps=20, exclude=5, num_blocks=2, seed=3)


@pytest.fixture
def configs():
    return {
        "baseline": RunConfig.model_validate({"runtime": {"device": "cpu"}}),
        "candidate": RunConfig.model_validate(
            {"runtime": {"device": "cpu"}, "data": {"prefetch": False}}
        ),
    }


class Trials:
    """Stands for the processes: writes the record that each was asked for, or fails at one."""

    def __init__(self, *, fail_at: int | None = None, source: str | None = None) -> None:
        self.fail_at, self.source = fail_at, source
        self.made: list[tuple[str, str]] = []
        self.environments: list[dict[str, str]] = []

    def __call__(self, words, environment) -> None:
        options = dict(zip(words[5::2], words[6::2], strict=True))
        if int(options["--position"]) == self.fail_at:
            raise AtollError("failed")
        plan = read_json(Path(options["--output"]).parents[1] / "plan.json")
        self.made.append((options["--position"], options["--condition"]))
        self.environments.append(dict(environment))
        position = int(options["--position"])
        mean = 0.001 if options["--condition"] == "baseline" else 0.0005
        write_json(
            Path(options["--output"]),
            {
                "condition": options["--condition"],
                "position_in_allocation": position,
                "batch_seconds": {"mean": mean, "p99": 2 * mean},
                "tokens_per_second": 1000.0 + position,
                "source_hash": self.source or plan["source_hash"],
                "definitions": {},
                "samples": {"batch": [mean]},
                "calls_after_update": {},
                "update_end_seconds": [],
            },
        )


def test_both_conditions_have_the_same_mean_position_in_every_block():
    order = trial_order(10, seed=7)
    assert order[:2] == ["baseline", "baseline"]
    for start in range(2, len(order), 4):
        block = order[start : start + 4]
        assert block == block[::-1]
        assert sorted(block) == ["baseline"] * 2 + ["candidate"] * 2
    assert order == trial_order(10, seed=7)
    assert len({tuple(trial_order(4, seed=seed)) for seed in range(8)}) > 1


def test_a_series_that_failed_goes_on_with_the_trial_that_is_missing(tmp_path, configs):
    first, second, never = Trials(fail_at=4), Trials(), Trials(fail_at=1)
    with pytest.raises(AtollError, match="failed"):
        run_series(tmp_path, configs, REQUEST, run_one=first)
    report = run_series(tmp_path, configs, REQUEST, run_one=second)
    assert [position for position, _ in first.made] == ["1", "2", "3"]
    assert [position for position, _ in second.made] == [str(p) for p in range(4, 11)]
    assert [name for _, name in first.made + second.made] == trial_order(2, seed=3)
    assert run_series(tmp_path, configs, REQUEST, run_one=never) == report
    assert read_json(tmp_path / "report.json") == report


def test_neighbours_are_compared_and_raw_samples_stay_in_their_files(tmp_path, configs):
    report = run_series(tmp_path, configs, REQUEST, run_one=Trials())
    assert report["a_a"]["batch_mean_reduction_fraction"] == 0
    assert [found["batch_mean_reduction_fraction"] for found in report["comparisons"]] == [0.5] * 4
    for found in report["comparisons"]:
        places = found["baseline_position"], found["candidate_position"]
        assert abs(places[0] - places[1]) == 1
        assert found["throughput_change_fraction"] == (1000 + places[1]) / (1000 + places[0]) - 1
    assert not any("samples" in trial for trial in report["trials"])
    trials = [read_json(file) for file in sorted((tmp_path / "trials").iterdir())]
    assert series_report(read_json(tmp_path / "plan.json"), trials) == report


def test_every_trial_has_the_frozen_source_and_compiler_caches_of_its_own(tmp_path, configs):
    trials = Trials()
    run_series(tmp_path, configs, REQUEST, run_one=trials)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        folders = [environment[name] for environment in trials.environments]
        assert len(set(folders)) == len(folders) == 10
        assert not any(Path(folder).parent.exists() for folder in folders)
    assert {e["PYTHONPATH"] for e in trials.environments} == {str(tmp_path / "source")}
    assert (tmp_path / "source" / "atoll" / "__init__.py").is_file()
    assert not list((tmp_path / "source").rglob("__pycache__"))


def test_another_series_in_the_same_folder_is_refused(tmp_path, configs):
    run_series(tmp_path, configs, REQUEST, run_one=Trials())
    other = SeriesRequest(steps=21, exclude=5, num_blocks=2, seed=3)
    with pytest.raises(StateMismatchError, match="its request differ"):
        run_series(tmp_path, configs, other, run_one=Trials())
    with pytest.raises(StateMismatchError, match="its configs differ"):
        run_series(tmp_path, configs | {"candidate": configs["baseline"]}, REQUEST)


def test_frozen_source_that_was_changed_is_refused(tmp_path, configs):
    run_series(tmp_path, configs, REQUEST, run_one=Trials())
    with open(tmp_path / "source" / "atoll" / "errors.py", "a", encoding="utf-8") as file:
        file.write("# more\n")
    with pytest.raises(StateMismatchError, match="is not what it was"):
        run_series(tmp_path, configs, REQUEST, run_one=Trials())


def test_a_trial_that_ran_from_other_source_is_an_error(tmp_path, configs):
    with pytest.raises(AtollError, match="trial 1 ran from other source than was frozen"):
        run_series(tmp_path, configs, REQUEST, run_one=Trials(source="0" * 64))


def test_half_of_what_two_conditions_need_is_refused(capsys, tmp_path):
    from atoll.cli.main import run

    assert run(["bench", "loader", "--folder", str(tmp_path)]) == 2
    assert "two conditions need both --b-set and --folder" in capsys.readouterr().err
    assert run(["bench", "loader", "--b-set", "data.prefetch=false"]) == 2
