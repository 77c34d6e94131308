"""The command `atoll`: mounts the verbs, and is the one place where errors become exit codes.

How a verb is written, one file per verb in this folder:

- `cli/train.py` defines a function named as the verb, `def train(config: ConfigOption, overrides:
  SetOption, ..., as_json: JsonOption = False) -> None`; parameters without default come first,
  `ConfigOption` and `SetOption` have none (they are empty lists when not given).
  A group (`cli/cache.py`) defines `app = command_group("...")` and `@app.command()` functions.
- At the top it imports `typer`, `pathlib`, `typing` and `atoll.cli.options`, nothing else: torch,
  pydantic and the rooms below are imported inside the function, so that `--help` stays fast.
- The docstring is the help: one sentence (66 characters fit the list in `atoll --help`), then a
  paragraph that starts with a line holding only `\\b`, then `Examples:` with two lines
  `  atoll ...`; tests parse them.
- Each option's help is a sentence with unit and `Default: ...`.
- The body calls one function of a room below and prints. Data goes out through
  `atoll.cli.output.print_data` or `print_json` (standard output), remarks through `print_note`
  (standard error), so does progress.
- It catches nothing. An AtollError, wherever raised, ends in `run` below with its message, its
  hint and its exit code; another exception travels with its traceback and exits 1. A verb whose
  finding is bad news (a difference, a damage) prints it and then raises `typer.Exit(1)`.
"""

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from atoll import __version__
from atoll.cli import (
    bench,
    cache,
    checkpoint,
    config,
    demo,
    doctor,
    evaluate,
    export,
    generate,
    prepare,
    train,
)
from atoll.cli.output import print_data, print_note
from atoll.errors import AtollError, InterruptedRunError
from atoll.faults import arm

app = typer.Typer(
    name="atoll",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.command()(demo.demo)
app.command()(prepare.prepare)
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(generate.generate)
app.command()(export.export)
app.command()(doctor.doctor)
app.add_typer(config.app, name="config")
app.add_typer(cache.app, name="cache")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run the command line of this process and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character shows its number instead of ending the program.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    0 done; 1 a run, a check or a contract failed; 2 the user's mistake; 130 interrupted.
    """
    try:
        arm(os.environ.get("ATOLL_FAILPOINTS", ""))
        code = app(args=list(arguments), prog_name="atoll", standalone_mode=False)
        sys.stdout.flush()
        if code == InterruptedRunError.exit_code:
            raise KeyboardInterrupt  # typer returns this code for one; no verb ends with it itself
    except typer.TyperException as error:
        _report(error.format_message(), _usage_hint(error))
        return error.exit_code
    except AtollError as error:
        _report(error.message, error.hint)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print_note("interrupted")
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); what Python flushes at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _print_version(asked: bool) -> None:
    if asked:
        print_data(__version__)
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            help="Print atoll's version and end. Default: off.",
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "-v", "--verbose", help="Log what developers want to see as well. Default: off."
        ),
    ] = False,
) -> None:
    """Train language models, measure what that costs, and prove what it keeps.

    Data goes to standard output, everything else to standard error. Exit codes: 0 done, 1 a run
    or a check failed, 2 what was asked cannot be done, 130 interrupted.

    \b
    Examples:
      atoll demo
      atoll train --config tiny
    """
    from atoll.log import configure_logging

    configure_logging(verbose=verbose)


def _report(message: str, hint: str | None) -> None:
    print_note(message)
    if hint:
        print_note(f"\nhint: {hint}")


def _usage_hint(error: typer.TyperException) -> str | None:
    if error.message.startswith("Usage:"):
        return None
    context: typer.Context | None = getattr(error, "ctx", None)
    if getattr(error, "option_name", None) in ("-v", "--verbose", "--version"):
        return f"it goes before the verb: atoll {getattr(error, 'option_name', '')} ..."
    return f"`{context.command_path if context else 'atoll'} --help` shows what there is"


if __name__ == "__main__":
    main()
