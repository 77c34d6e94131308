"""Options and arguments that several verbs share, so that one name means one thing everywhere."""

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    list[Path],
    typer.Option(
        "--config",
        metavar="FILE",
        default_factory=list,
        show_default=False,
        help="Recipe: a YAML file, or the name of a shipped one such as `tiny`. Repeats: a later "
        "one overrides an earlier one. Default: every setting's own default.",
    ),
]

SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
        help="One setting as SECTION.NAME=VALUE, the value written as in YAML. Repeats, and wins "
        "over every --config. Default: none.",
    ),
]

JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document for machines instead of text."),
]

RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_CHECKPOINT",
        show_default=False,
        help="A run's folder (its newest weights are taken) or one checkpoint's folder.",
    ),
]


LocalModelOption = Annotated[
    int | None,
    typer.Option(
        "--local-model",
        metavar="I",
        help="One of a run's packed local models, counted from 0; it takes a checkpoint. "
        "Default: their average.",
    ),
]


OutputOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the document there. Default: none.")
]


def command_group(help: str) -> typer.Typer:
    """Return an empty group of verbs, such as `atoll cache ...`, that prints its help when bare."""
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)
