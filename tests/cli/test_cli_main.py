"""The frame of the command line: help, errors, exit codes, streams."""

import errno
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import astuple

import pytest
import typer
from typer.main import get_command

from atoll import __version__, errors
from atoll.cli import main

HEAVY = ("torch", "pydantic", "numpy", "yaml", "rich", "transformers")


def commands(command, path=()):
    """Yield (words, command) of every verb."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield path, command
    for name, child in inner.items():
        yield from commands(child, (*path, name))


VERBS = dict(commands(get_command(main.app)))


def examples(words):
    """Return the example command lines in the help of a verb, without `atoll`."""
    lines = (VERBS[words].help or "").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.strip().startswith("atoll ")]


def failing(error):
    """Return an app whose only verb raises `error`, mounted as atoll's own is."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command()
    def verb() -> None:
        raise error

    return app


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from atoll.cli.main import run\n"
        "code = run(['--help'])\n"
        f"print(code, sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "0 []\n"
    assert done.stdout.startswith("Usage: atoll [OPTIONS] COMMAND")


@pytest.mark.parametrize("words", sorted(VERBS), ids=" ".join)
def test_every_verb_has_one_sentence_and_two_examples_that_parse(words):
    first = (VERBS[words].help or "").strip().split("\n\n")[0]
    assert first.endswith(".")
    assert ". " not in first
    assert len(examples(words)) >= 2
    for example in examples(words):
        assert tuple(example[: len(words)]) == words
        VERBS[words].make_context("atoll", example[len(words) :])


@pytest.mark.parametrize("words", sorted(VERBS), ids=" ".join)
def test_every_option_has_a_help_that_ends_its_sentence(words):
    for parameter in VERBS[words].params:
        text = getattr(parameter, "help", None) or ""
        assert text.endswith("."), f"{' '.join(words)} {parameter.name}: {text!r}"


def test_version_is_data(atoll):
    assert astuple(atoll("--version")) == (0, f"{__version__}\n", "")


def test_no_arguments_print_the_help_as_an_error(atoll):
    outcome = atoll()
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("Usage: atoll [OPTIONS] COMMAND")
    assert "hint" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["confg"], "No such command 'confg'. Did you mean 'config'?", "`atoll --help` shows"),
        (["config", "shw"], "No such command 'shw'. Did you mean 'show'?", "`atoll config --help`"),
        (
            ["config", "show", "--confg", "x"],
            "No such option: --confg",
            "`atoll config show --help`",
        ),
        (["config", "show", "x"], "Got unexpected extra argument", "`atoll config show --help`"),
        (["config", "show", "--set"], "Option '--set' requires an argument.", "`atoll --help`"),
        (["config", "show", "-v"], "No such option: -v", "it goes before the verb: atoll -v ..."),
    ],
)
def test_a_wrong_command_line_exits_2_with_a_hint(atoll, arguments, message, hint):
    outcome = atoll(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(message)
    assert f"\n\nhint: {hint}" in outcome.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("Found this.", hint="do that"), 2),
        (errors.ConfigError(["one", "two"], hint="do that"), 2),
        (errors.CacheError("Damaged.", hint="do that"), 1),
        (errors.InterruptedRunError("Stopped.", hint="do that"), 130),
    ],
)
def test_an_error_of_ours_prints_message_and_hint_and_sets_the_code(
    atoll, monkeypatch, error, code
):
    monkeypatch.setattr(main, "app", failing(error))
    assert astuple(atoll()) == (code, "", f"{error.message}\n\nhint: do that\n")


def test_an_error_without_hint_is_its_message_alone(atoll, monkeypatch):
    monkeypatch.setattr(main, "app", failing(errors.DataError("Empty.")))
    assert atoll().err == "Empty.\n"


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), typer.Abort()])
def test_ctrl_c_exits_130_and_says_so(atoll, monkeypatch, raised):
    monkeypatch.setattr(main, "app", failing(raised))
    outcome = atoll()
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted\n")


def test_a_verb_that_found_bad_news_exits_1_without_more_words(atoll, monkeypatch):
    monkeypatch.setattr(main, "app", failing(typer.Exit(1)))
    outcome = atoll()
    assert (outcome.code, outcome.err) == (1, "")


def test_an_unknown_error_travels(monkeypatch):
    monkeypatch.setattr(main, "app", failing(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError, match="ours"):
        main.run([])


def test_an_unknown_error_of_the_system_travels(monkeypatch):
    monkeypatch.setattr(main, "app", failing(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        main.run([])


def test_a_reader_that_went_away_is_no_error_message():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli.main", "config", "show"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_failpoints_named_in_the_environment_are_armed(atoll, monkeypatch):
    monkeypatch.setenv("ATOLL_FAILPOINTS", "nonsense")
    outcome = atoll("config", "show")
    assert outcome.code == 2
    assert outcome.err.startswith("failpoint 'nonsense' is not of the form name[:hit]=action.\n")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_failpoint_kills_the_process_where_it_stands():
    code = (
        "import typer\n"
        "from atoll.cli import main\n"
        "from atoll.faults import reach\n"
        "main.app = typer.Typer()\n"
        "main.app.command()(lambda: [print('before', flush=True), reach('here'), print('after')])\n"
        "main.main()"
    )
    environment = {**os.environ, "ATOLL_FAILPOINTS": "here=kill"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "before\n")
