"""`atoll bench compare` end to end, with shell commands that take next to no time."""

import json
import sys

import pytest

from atoll.bench.document import overall
from atoll.cli.main import run

QUICK = f'"{sys.executable}" -S -c pass'
FAILING = f'"{sys.executable}" -S -c "raise SystemExit(3)"'


@pytest.fixture
def quick_record(capsys):
    """Return (exit code, stdout, stderr) of a comparison of a command with itself."""
    code = run(["bench", "compare", "--a", QUICK, "--b", QUICK, "--blocks", "2", "--seed", "11"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
def test_two_commands_are_compared_and_the_last_line_is_one_document(quick_record):
    code, out, err = quick_record
    record = json.loads(out.strip().splitlines()[-1])
    assert record["order_seed"] == 11
    assert record["scenario"] == "commands"
    assert {"python", "torch", "numpy"} <= set(record["versions"])
    assert record["machine"]["cores"] >= 1
    assert len(record["comparisons"][0]["a_b"]["samples"]) == 8
    assert code == (0 if record["verdict"] == "measured" else 1)
    assert "A/A" in err
    assert out.count("\n") == 1


def test_a_command_that_fails_is_named_with_its_exit_code(capsys):
    code = run(["bench", "compare", "--a", FAILING, "--b", FAILING, "--blocks", "2"])
    assert code == 1
    captured = capsys.readouterr()
    assert "command A ended with exit code 3" in captured.err
    assert "hint: both commands must succeed each time" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--a", "true"],
        ["batch", "--a", "true", "--b", "true"],
        ["--a", "true", "--b", "true", "--b-set", "data.prefetch=false"],
        ["planted", "--config", "tiny"],
    ],
)
def test_a_half_given_comparison_is_refused(arguments, capsys):
    assert run(["bench", "compare", *arguments]) == 2
    assert "either the name of a built-in comparison" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--a", "true", "--b", "true", "--set", "rows=1"], "--set has no meaning for two command"),
        (["batch", "--at-least", "1"], "--at-least has no meaning for a built-in comparison"),
        (["planted", "--data", "cache", "--updates", "3"], "--data, --updates has no meaning"),
        (["--config", "tiny", "--b-set", "x=1", "--timeout", "3"], "for two settings"),
    ],
)
def test_an_option_of_another_kind_of_comparison_is_refused(arguments, said, capsys):
    assert run(["bench", "compare", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_two_equal_recipes_are_refused_with_what_to_do(capsys):
    arguments = ["--config", "smoke", "--a-set", "optimizer.lr=0.01"]
    assert run(["bench", "compare", *arguments]) == 2
    captured = capsys.readouterr()
    assert "A and B are the same recipe." in captured.err
    assert "hint: give --a-set KEY=VALUE or --b-set KEY=VALUE" in captured.err
    assert captured.out == ""


def test_parameters_that_do_not_exist_are_all_named(capsys):
    arguments = ["--set", "row=8", "--set", "rows", "--set", "context_length=x"]
    assert run(["bench", "compare", "batch", *arguments]) == 2
    said = capsys.readouterr().err
    assert "--set row=8: there is no parameter row. Did you mean rows?" in said
    assert "--set rows: it must have the form NAME=VALUE." in said
    assert "--set context_length=x" in said


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        (["pass", "pass"], "pass"),
        (["pass", "undecided"], "undecided"),
        (["undecided", "fail", "pass"], "fail"),
        (["too few", "undecided"], "too few"),
        (["fail", "void"], "void"),
        (["measured"], "measured"),
    ],
)
def test_the_worst_verdict_speaks_for_all(verdicts, worst):
    assert overall(verdicts) == worst
