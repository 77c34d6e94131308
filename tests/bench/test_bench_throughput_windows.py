"""Orders, rates, ratios and the price, with made-up windows; roofs with a clock of our own."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.bench.roofs import Roofs, against_floors, floors, measure_roofs
from atoll.bench.throughput_exact import ORDER, both_ways, price
from atoll.bench.throughput_windows import Window, rates, speed_ratio, window_order
from atoll.bench.timing import Stopwatch, nothing
from atoll.config.model import ModelConfig
from atoll.errors import AtollError, UsageError
from atoll.model.cost import update_parts

MODES = ("single", "packed", "sequential")


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 3), st.integers(1, 12), st.integers(0, 2**63))
def test_a_linear_drift_cancels_in_every_block(num_modes, num_blocks, seed):
    modes = MODES[:num_modes]
    order = window_order(modes, windows=2 * num_blocks, seed=seed)
    assert len(order) == num_blocks
    for block in order:
        for mode in modes:
            places = [place for place, found in enumerate(block) if found == mode]
            assert len(places) == 2
            assert sum(places) == 2 * num_modes - 1


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 3), st.integers(1, 12), st.integers(0, 2**63))
def test_each_mode_begins_as_often_as_the_others(num_modes, num_blocks, seed):
    modes = MODES[:num_modes]
    begun = Counter(block[0] for block in window_order(modes, windows=2 * num_blocks, seed=seed))
    counts = [begun[mode] for mode in modes]
    assert max(counts) - min(counts) <= 1


def test_the_seed_decides_who_begins():
    begun = {window_order(MODES, windows=2, seed=seed)[0][0] for seed in range(30)}
    assert begun == set(MODES)


def test_one_mode_has_windows_without_pairs():
    assert window_order(["single"], windows=3, seed=0) == [("single",)] * 3


def test_an_odd_number_of_windows_of_two_modes_is_refused():
    with pytest.raises(UsageError, match="3 windows of each of 2 modes"):
        window_order(MODES[:2], windows=3, seed=0)


def windows_of(*blocks):
    """Return windows of packed (first and last of each block) and sequential."""
    order = ("packed", "sequential", "sequential", "packed")
    return [
        Window(mode, number, seconds, None)
        for number, block in enumerate(blocks)
        for mode, seconds in zip(order, block, strict=True)
    ]


def test_a_rate_is_a_median_with_its_extremes_and_leaves_warm_up_out():
    windows = [Window("packed", None, 100.0, 7)]
    windows += [Window("packed", 0, seconds, 5) for seconds in (1.0, 2.0, 4.0)]
    windows += [Window("single", 0, 50.0, None)]
    found = rates(windows, "packed", targets=8)
    assert found["targets_per_second"] == {"median": 4.0, "min": 2.0, "max": 8.0}
    assert found["seconds"] == [1.0, 2.0, 4.0]
    assert found["warm_up_seconds"] == [100.0]
    # A replayed graph asks for no memory: what its recording took counts.
    assert found["peak_device_bytes"] == 7


def test_a_speed_ratio_is_paired_by_block_with_an_interval_of_four():
    blocks = [
        (1.0, 2.0, 2.0, 1.0),
        (1.1, 2.0, 2.0, 1.1),
        (1.0, 2.1, 2.1, 1.0),
        (1.0, 2.0, 2.0, 1.0),
    ]
    found = speed_ratio(windows_of(*blocks), "packed", "sequential")
    assert found["verdict"] == "faster"
    assert found["interval"]["low"] < found["ratio"] < found["interval"]["high"]
    assert found["ratio"] == pytest.approx((2 * 2 / 1.1 * 2.1 * 2) ** 0.25)
    assert len(found["block_log_time_ratios"]) == found["num_blocks"] == 4
    turned = speed_ratio(windows_of(*blocks), "sequential", "packed")
    assert turned["verdict"] == "slower"
    assert turned["ratio"] == pytest.approx(1 / found["ratio"])


def test_an_interval_that_holds_one_is_undecided():
    blocks = [(1.0, 1.1, 1.1, 1.0), (1.1, 1.0, 1.0, 1.1)] * 2
    assert speed_ratio(windows_of(*blocks), "packed", "sequential")["verdict"] == "undecided"


def test_three_blocks_are_too_few_for_an_interval():
    found = speed_ratio(windows_of(*[(1.0, 2.0, 2.0, 1.0)] * 3), "packed", "sequential")
    assert (found["verdict"], found["interval"]) == ("too few", None)
    assert found["ratio"] == pytest.approx(2.0)


def test_too_many_disturbed_blocks_are_void():
    quiet, disturbed = (1.0, 2.0, 2.0, 1.0), (9.0, 2.0, 2.0, 1.0)
    found = speed_ratio(windows_of(*[quiet] * 3, *[disturbed] * 2), "packed", "sequential")
    assert (found["verdict"], found["interval"], found["void_blocks"]) == ("void", None, [3, 4])


def test_one_disturbed_block_is_left_out():
    quiet, disturbed = (1.0, 2.0, 2.0, 1.0), (9.0, 2.0, 2.0, 1.0)
    found = speed_ratio(windows_of(*[quiet] * 4, disturbed), "packed", "sequential")
    assert (found["verdict"], found["void_blocks"]) == ("faster", [4])
    assert found["interval"]["num_blocks"] == 4


def document(rate):
    entry = {"targets_per_window": 10, "targets_per_second": {"median": rate}}
    return {
        "device": {"type": "cpu"},
        "config_identity": "x",
        "modes": {"packed": entry | {"seconds": [10 / rate]}},
    }


def test_the_price_is_that_of_two_pairs_without_an_interval():
    # Deterministic in places 2 and 3: 10% slower in the first pair, 19% in the second.
    found = price([document(rate) for rate in (100.0, 90.0, 81.0, 100.0)], "packed")
    assert found["percent_by_pair"] == pytest.approx([10.0, 19.0])
    assert found["percent"] == pytest.approx(100 * (1 - (0.9 * 0.81) ** 0.5))
    assert found["interval"] is None
    assert found["targets_per_second"]["on"] == pytest.approx(
        {"median": 85.5, "min": 81.0, "max": 90.0}
    )


def test_both_conditions_run_in_turn_and_each_is_traced_once():
    calls = []

    def run_one(words):
        calls.append(list(words))
        return document(100.0)

    found = both_ways(["--seed", "1"], trace=True, command=[], note=nothing_of, run_one=run_one)
    assert [words[3] for words in calls] == list(ORDER) == ["off", "on", "on", "off"]
    assert [words[4] for words in calls] == ["--trace", "--trace", "--no-trace", "--no-trace"]
    assert len(found["runs"]) == 4
    assert found["price"]["packed"]["percent"] == pytest.approx(0.0, abs=1e-12)


def nothing_of(line):
    return None


def test_a_roof_is_the_best_sample_and_keeps_all():
    # Each sample reads the clock twice; two of ten do not count.
    product, copy = [9.0, 9.0, 4.0, 2.0, *[5.0] * 6], [9.0, 9.0, *[8.0] * 7, 4.0]
    ticks = iter([moment for seconds in (*product, *copy) for moment in (0.0, seconds)])
    found = measure_roofs(
        torch.device("cpu"),
        torch.float32,
        gemm_size=4,
        copy_bytes=64,
        stopwatch=Stopwatch(lambda: next(ticks), nothing),
    )
    assert found.flops_per_second == 2 * 4**3 / 2.0
    assert found.bytes_per_second == 2 * 64 / 4.0
    assert found.facts["gemm_seconds"] == product[2:]
    assert found.facts["copy_seconds"] == copy[2:]


ROOFS = Roofs(790e12, 4.3e12, {})


def found_floors():
    parts = update_parts(ModelConfig(), local_targets=16_384, micro_targets=16_384, narrow=True)
    return floors(parts, ROOFS)


def test_floors_take_the_longer_time_of_each_kernel_and_add_up():
    found = found_floors()
    parts = {(part["term"], part["name"]): part for part in found["parts"]}
    loss = parts["loss", "one pass"]
    assert loss["floor_ns_per_target"] == pytest.approx(128_000 / 4.3e3)
    head = parts["gemm", "head forward"]
    assert head["floor_ns_per_target"] == pytest.approx(20_480_000 / 790e3)
    total = sum(entry["floor_ns_per_target"] for entry in found["terms"].values())
    assert total == pytest.approx(found["total_ns_per_target"])
    assert found["terms"]["other"]["floor_ns_per_target"] == 0
    absorbed = sum(p["floor_ns_per_target"] for p in found["parts"] if p["absorbable"])
    assert found["absorbed_ns_per_target"] == pytest.approx(total - absorbed)


def test_what_remains_is_measured_minus_floor_and_names_the_largest():
    found = found_floors()
    floor = {term: entry["floor_ns_per_target"] for term, entry in found["terms"].items()}
    measured = {term: 2 * value for term, value in floor.items()} | {"other": 3.0}
    against = against_floors(measured, found, pause=1.0)
    assert against["terms"]["gemm"]["share_of_roof"] == pytest.approx(0.5)
    assert against["terms"]["other"]["share_of_roof"] is None
    assert against["remaining_ns_per_target"] == pytest.approx(sum(floor.values()) + 4.0)
    assert against["largest_remaining"]["term"] == "gemm"
    assert sum(entry["share_of_time"] for entry in against["terms"].values()) == pytest.approx(1)
    assert against_floors(measured, found, pause=1e6)["largest_remaining"]["term"] == "pauses"


@pytest.mark.slow
def test_a_process_that_fails_is_named_with_its_exit_code():
    words = ["--config", "there-is-no-such-recipe"]
    with pytest.raises(AtollError, match="exit code 2"):
        both_ways(words, trace=False, command=[], note=nothing_of)
