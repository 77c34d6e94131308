"""Seeds, failpoints, logs and the error tree."""

import inspect
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll import errors, faults
from atoll.log import JsonLines
from atoll.seeds import derive_seed

PARTS = st.lists(st.text(max_size=5) | st.integers(), max_size=4)


@pytest.fixture(autouse=True)
def _no_failpoints():
    yield
    faults.disarm()


@given(st.integers(min_value=0), PARTS, PARTS)
def test_different_purposes_get_different_seeds(seed, one, other):
    if [(type(p), p) for p in one] != [(type(p), p) for p in other]:
        assert derive_seed(seed, *one) != derive_seed(seed, *other)


def test_derived_seeds_never_change_between_versions():
    assert derive_seed(0, "shuffle", 1, 2) == 3119316137189916130
    assert derive_seed(7) == 9271653234840938


def test_negative_seed_is_refused():
    with pytest.raises(errors.UsageError, match="seed is -1"):
        derive_seed(-1, "x")


def test_failpoint_acts_at_the_visit_it_was_armed_for():
    faults.arm("here:3=raise")
    faults.reach("here")
    faults.reach("elsewhere")
    faults.reach("here")
    with pytest.raises(faults.InjectedFault):
        faults.reach("here")


@pytest.mark.parametrize("text", ["x", "x=explode", "x:y=kill"])
def test_malformed_failpoint_is_refused_with_an_example(text):
    with pytest.raises(errors.UsageError, match="not of the form") as caught:
        faults.arm(text)
    assert "for example" in (caught.value.hint or "")


def test_line_torn_by_a_kill_is_dropped_when_metrics_go_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    lines = JsonLines(path)
    lines.write({"step": 2})
    lines.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_every_error_is_drawn_in_the_tree_of_its_module():
    classes = [
        c
        for _, c in inspect.getmembers(errors, inspect.isclass)
        if issubclass(c, errors.AtollError)
    ]
    missing = [c.__name__ for c in classes if c.__name__ not in (errors.__doc__ or "")]
    assert missing == []


def test_user_errors_exit_with_2_and_failures_with_1():
    codes = {c.__name__: c.exit_code for c in errors.UserError.__subclasses__()}
    assert set(codes.values()) == {2}
    assert {errors.CacheError.exit_code, errors.CheckpointError.exit_code} == {1}
    assert errors.InterruptedRunError.exit_code == 130
