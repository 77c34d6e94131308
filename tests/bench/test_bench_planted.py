"""Planted slowdowns on a clock whose truth is known: rates against closed forms, blindness."""

import json
import math
import random
from collections import Counter
from itertools import pairwise

import pytest
from scipy import stats

from atoll.bench.compare import Sample
from atoll.bench.planted import (
    Measured,
    Plant,
    conditions,
    judge_run,
    outcome,
    planting,
    rate,
    score,
)
from atoll.bench.planted_study import (
    PlantedSettings,
    choose_length,
    line,
    planted_study,
    training_contender,
)
from atoll.bench.timing import Stopwatch, nothing
from atoll.cli.main import run
from atoll.errors import UsageError

PIECE_SECONDS = 1e-3


class FakeWork:
    """Pieces that move a clock; the time of each call is noisy, log-normally."""

    def __init__(self, *, noise: float, seed: int = 0) -> None:
        self.now, self._noise, self._random = 0.0, noise, random.Random(seed)
        self.stopwatch = Stopwatch(lambda: self.now, nothing)

    def repeat(self, pieces: int) -> None:
        self.now += pieces * PIECE_SECONDS * math.exp(self._random.gauss(0.0, self._noise))


def study(work, *, runs, percents, seed=0, num_blocks=12, said=None):
    return planted_study(
        PlantedSettings(runs=runs, percents=percents, minutes=1.0),
        command=["atoll"],
        seed=seed,
        num_blocks=num_blocks,
        repeat=work.repeat,
        stopwatch=work.stopwatch,
        note=nothing_of if said is None else said.append,
    )


def nothing_of(text):
    return None


def test_planted_sizes_are_recovered_and_told_apart_from_none():
    said: list[str] = []
    document = study(FakeWork(noise=0.01), runs=20, percents=(0, 2, 5, 10), said=said)
    for size in document["sizes"]:
        # The logarithm of a block's ratio has a spread of 0.01, a run's of 0.01 / sqrt(12); the
        # median of 20 runs of 1.25 / sqrt(20) of that. Four standard deviations.
        allowed = 4 * 100 * 1.25 * 0.01 / math.sqrt(12 * 20) * (1 + size["percent"] / 100)
        assert size["median_percent_found"] == pytest.approx(size["percent"], abs=allowed)
        assert size["sound_runs"] + size["void"] + size["too_few"] == size["runs"] == 20
    # At 5% and 10% the power is 1 - 1e-9 and more.
    assert [size["found"] for size in document["sizes"][2:]] == [
        size["sound_runs"] for size in document["sizes"][2:]
    ]
    assert [text.split(":")[0] for text in said[-4:]] == [
        f"planted {percent}%" for percent in (0, 2, 5, 10)
    ]


@pytest.mark.slow
def test_false_alarms_come_as_often_as_the_level_says():
    # 600 runs at 95% under pure noise, and A/A at 99% before each; 4 binomial standard deviations.
    runs = 600
    (size,) = study(FakeWork(noise=0.02, seed=1), runs=runs, percents=(0,))["sizes"]
    sound, alarms = size["sound_runs"], size["other_way"]
    assert abs(alarms - 0.05 * sound) <= 4 * math.sqrt(sound * 0.05 * 0.95)
    assert abs(size["void"] - 0.01 * runs) <= 4 * math.sqrt(runs * 0.01 * 0.99)
    held = size["intervals_that_hold_the_planted_ratio"]
    assert held["share"] == pytest.approx(1 - alarms / sound)


@pytest.mark.slow
def test_a_slowdown_near_the_noise_is_found_as_often_as_the_noncentral_t_says():
    noise, blocks, runs = 0.03, 12, 400
    (size,) = study(FakeWork(noise=noise, seed=2), runs=runs, percents=(2,))["sizes"]
    # A block's log ratio is normal: mean log 1.02, variance noise^2 (1/2 + 1/2).
    limit = stats.t.ppf(0.975, blocks - 1)
    shift = math.log(1.02) / noise * math.sqrt(blocks)
    power = float(stats.nct.sf(limit, blocks - 1, shift))
    sound = size["sound_runs"]
    assert 0.4 < power < 0.7
    assert abs(size["found"] - power * sound) <= 4 * math.sqrt(sound * power * (1 - power))
    assert size["other_way"] <= 3


def test_the_order_is_a_function_of_the_seed_and_balances_sides():
    plants = planting((0, 2, 5, 10), runs=20, seed=3)
    assert plants == planting((0, 2, 5, 10), runs=20, seed=3)
    assert plants != planting((0, 2, 5, 10), runs=20, seed=4)
    counts = Counter((plant.percent, plant.side) for plant in plants)
    assert set(counts.values()) == {10}
    changes = sum(one.percent != other.percent for one, other in pairwise(plants))
    assert changes > 40  # 60 expected of 79 in a shuffled order, 3 in a sorted one


def test_a_size_given_twice_is_refused():
    with pytest.raises(UsageError, match="given twice"):
        planting((2, 2), runs=1, seed=0)


@pytest.mark.parametrize("plant", [Plant(0, "A"), Plant(2, "A"), Plant(10, "B")])
def test_conditions_repeat_as_often_as_planted_and_do_not_tell(plant):
    done: list[int] = []
    a, b = conditions(plant, done.append, pieces=300)
    a.work()
    b.work()
    extra = 3 * plant.percent
    assert done == ([300 + extra, 300] if plant.side == "A" else [300, 300 + extra])
    assert (a.name, b.name) == ("A", "B")


def test_findings_follow_from_the_samples_in_the_document_alone():
    document = study(FakeWork(noise=0.02), runs=3, percents=(0, 5), seed=9)
    read = json.loads(json.dumps(document))
    assert read == document
    for record in read["runs"]:
        aa, ab = ([Sample(*row) for row in record[name]] for name in ("a_a", "a_b"))
        again = judge_run(Measured((0.0, 0.0), aa, ab))
        assert {key: record[key] for key in again} == again
        assert len(ab) == 48
        assert len(aa) == 24


@pytest.mark.parametrize(
    ("plant", "found", "expected"),
    [
        (Plant(5, "A"), "slower", "found"),
        (Plant(5, "A"), "faster", "other way"),
        (Plant(5, "B"), "faster", "found"),
        (Plant(0, "A"), "slower", "other way"),
        (Plant(0, "B"), "faster", "other way"),
        (Plant(0, "A"), "undecided", "undecided"),
        (Plant(5, "B"), "void", "void"),
        (Plant(5, "B"), "too few", "too few"),
    ],
)
def test_a_finding_is_laid_beside_what_was_planted(plant, found, expected):
    assert outcome(plant, found) == expected


def test_void_and_few_runs_are_counted_apart_from_rates():
    words = ["slower", "void", "too few", "undecided", "faster"]
    judged = [{"finding": w, "time_ratio": 1.05, "low": 1.0, "high": 1.1} for w in words]
    (size,) = score([Plant(5, "A")] * 5, judged)
    assert (size["found"], size["other_way"], size["undecided"]) == (1, 1, 1)
    assert (size["void"], size["too_few"], size["sound_runs"]) == (1, 1, 3)
    assert size["detection_rate"]["share"] == pytest.approx(1 / 3)
    assert "void 1, too few 1" in line(size)


def test_rates_have_exact_intervals():
    found = rate(20, 20)
    assert (found["low"], found["high"]) == pytest.approx((0.025 ** (1 / 20), 1.0), rel=1e-9)
    found = rate(0, 20)
    assert (found["low"], found["high"]) == pytest.approx((0.0, 1 - 0.025 ** (1 / 20)), rel=1e-9)
    assert rate(0, 0) is None


def test_windows_are_as_long_as_the_minutes_allow():
    work = FakeWork(noise=0.0)
    settings = PlantedSettings(runs=2, percents=(0, 5), minutes=10.0)
    length = choose_length(settings, work.repeat, num_blocks=12, stopwatch=work.stopwatch)
    windows = 4 * (2 + 4 * 6 + 4 * 12)
    assert length.pieces % 100 == 0
    assert 600 - 0.1 * windows < windows * length.pieces * PIECE_SECONDS <= 600 + 1e-6
    assert length.minutes == pytest.approx(windows * length.pieces * PIECE_SECONDS / 60)


def test_sizes_that_are_no_slowdown_are_refused(capsys):
    assert run(["bench", "compare", "planted", "--set", "percents=[-2]"]) == 2
    assert "--set percents.0=-2" in capsys.readouterr().err


@pytest.mark.slow
def test_the_study_runs_on_real_work_and_ends_in_one_document(capsys):
    words = ["runs=1", "percents=[0]", "minutes=0.001"]
    words = [part for word in words for part in ("--set", word)]
    assert run(["bench", "compare", "planted", "--blocks", "2", *words]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert document["sizes"][0]["runs"] == 1
    assert document["pieces_per_window"] >= 100
    assert "planted 0%: false alarms in" in captured.err


def test_pieces_of_training_are_updates_on_one_row():
    with training_contender("smoke") as contender:
        contender.run(3)
        assert (contender.states[0].step, contender.states[0].cursor) == (3, 3)
