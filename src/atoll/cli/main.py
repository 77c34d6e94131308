"""The command `atoll`: mounts the verbs, and is the one place where errors become exit codes.

How a verb is written, one file per verb in this folder:

- `cli/train.py` defines a function named as the verb, `def train(config: ConfigOption, overrides:
  SetOption, ..., as_json: JsonOption = False) -> None`; parameters without default come first,
  `ConfigOption` and `SetOption` have none (they are empty lists when not given).
  A group (`cli/cache.py`) defines `app = command_group("...")` and `@app.command()` functions.
- At the top it imports `typer`, `pathlib`, `typing` and `atoll.cli.options`, nothing else: torch,
  pydantic and the rooms below are imported inside the function, so that `--help` stays fast.
- The docstring is the help: one sentence, then a paragraph that starts with a line holding only
  `\\b`, then `Examples:` with two lines `  atoll ...`; tests parse and run them.
- Each option's help is a sentence with unit and `Default: ...`.
- The body calls one function of a room below and prints. Data goes out through
  `atoll.cli.output.print_data` or `print_json` (standard output), remarks through `print_note`
  (standard error), so does progress.
- It catches nothing. An AtollError, wherever raised, ends in `run` below with its message, its
  hint and its exit code; another exception travels with its traceback and exits 1. A verb whose
  finding is bad news (a difference, a damage) prints it and then raises `typer.Exit(1)`.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from atoll import __version__
from atoll.errors import AtollError
from atoll.faults import arm

app = typer.Typer(
    name="atoll",
    help="Train language models, measure what that costs, and prove what it keeps.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

for _verb in ("demo", "prepare", "train", "evaluate", "generate", "export", "doctor"):
    if importlib.util.find_spec(f"atoll.cli.{_verb}"):
        app.command(_verb)(getattr(importlib.import_module(f"atoll.cli.{_verb}"), _verb))
for _group in ("cache", "checkpoint", "config", "bench"):
    if importlib.util.find_spec(f"atoll.cli.{_group}"):
        app.add_typer(importlib.import_module(f"atoll.cli.{_group}").app, name=_group)


def main() -> None:
    """Run the command line of this process and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    0 done; 1 a run, a check or a contract failed; 2 the user's mistake; 130 interrupted.
    """
    try:
        arm(os.environ.get("ATOLL_FAILPOINTS", ""))
        code = app(args=list(arguments), prog_name="atoll", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except typer.TyperException as error:
        _report(error.format_message(), None)
        return error.exit_code
    except AtollError as error:
        _report(error.message, error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Also log what only developers want to see.")
    ] = False,
) -> None:
    from atoll.log import configure_logging

    configure_logging(verbose=verbose)


def _report(message: str, hint: str | None) -> None:
    print(message, file=sys.stderr)
    if hint:
        print(f"\nhint: {hint}", file=sys.stderr)
