"""`atoll cache`: look into token caches and check them."""

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import ConfigOption, JsonOption, SetOption, command_group
from atoll.cli.output import print_data, print_json, print_note

app = command_group("Look into token caches and check them.")

CacheArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="CACHE",
        show_default=False,
        help="A cache's folder. Default: the one that --config and --set name.",
    ),
]


@app.command()
def show(
    config: ConfigOption,
    overrides: SetOption,
    cache: CacheArgument = None,
    as_json: JsonOption = False,
) -> None:
    """Print what a token cache holds and what was left out of it.

    \b
    Examples:
      atoll cache show --config tiny
      atoll cache show caches/3d208290ab3d607e --json
    """
    from atoll.cli.cache_report import facts_of, summary_of
    from atoll.data.cache import Cache

    opened = Cache(_folder(cache, config, overrides))
    if as_json:
        print_json(facts_of(opened))
    else:
        print_data(summary_of(opened))


@app.command()
def verify(
    config: ConfigOption,
    overrides: SetOption,
    cache: CacheArgument = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a token cache and name each damaged file and MiB.

    Exits 0 where all is well and 1 where something is damaged.

    \b
    Examples:
      atoll cache verify --config tiny
      atoll cache verify caches/3d208290ab3d607e --json
    """
    from dataclasses import asdict

    from atoll.cli.prepare_progress import show_progress
    from atoll.data.verify import verify_cache

    folder = _folder(cache, config, overrides)
    with show_progress() as see:
        damages = verify_cache(folder, see=see)
    if as_json:
        print_json({"folder": str(folder), "damages": [asdict(damage) for damage in damages]})
    else:
        print_data("\n".join(map(str, damages)) or f"{folder}: every byte is as it was written")
    if damages:
        print_note(
            "\nhint: restore these files from a copy, or remove the folder and prepare again; "
            "the result has the same bytes"
        )
        raise typer.Exit(1)


@app.command()
def explain(
    config: ConfigOption,
    overrides: SetOption,
    cache: CacheArgument = None,
    step: Annotated[
        int,
        typer.Option("--step", metavar="N", help="The update, counted from 1. Default: 1."),
    ] = 1,
    row: Annotated[
        int | None,
        typer.Option(
            "--row",
            metavar="N",
            show_default=False,
            help="Only this row of the update, counted from 0. Default: all rows.",
        ),
    ] = None,
    document: Annotated[
        str | None,
        typer.Option(
            "--document",
            metavar="SOURCE:NUMBER",
            show_default=False,
            help="Instead, list the updates that train on this document of the training split. "
            "Default: none.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the documents and the text that an update of a recipe trains on.

    Nothing is trained and no GPU is needed; only the rows that are asked for are read.

    \b
    Examples:
      atoll cache explain --config tiny --step 1 --row 0
      atoll cache explain caches/3d208290ab3d607e --config tiny --document stdlib:17
    """
    from dataclasses import asdict

    from atoll.cli.explain_report import (
        row_order,
        rows_text,
        sightings_text,
        split_document,
    )
    from atoll.config.load import load_config
    from atoll.data.cache import Cache
    from atoll.data.explain import explain_update, updates_of_document

    recipe = load_config(config, overrides).config
    opened = Cache(_folder(cache, config, overrides))
    order = row_order(recipe)
    if document is not None:
        source, number = split_document(document)
        found = updates_of_document(opened, source=source, document=number, **order)
        text = sightings_text(document, found)
    else:
        rows = None if row is None else range(row, row + 1)
        found = explain_update(opened, step=step, rows=rows, **order)
        text = rows_text(step, found)
    if as_json:
        print_json([asdict(item) for item in found])
    else:
        print_data(text)


def _folder(cache: Path | None, config: list[Path], overrides: list[str]) -> Path:
    if cache is not None:
        return _existing(cache)
    from atoll.config.load import load_config
    from atoll.data.settings import locate

    recipe = load_config(config, overrides).config
    return locate(recipe.data, recipe.model)


def _existing(cache: Path) -> Path:
    from atoll.data.cache import MANIFEST_NAME
    from atoll.errors import UsageError

    if not (cache / MANIFEST_NAME).is_file():
        raise UsageError(
            f"{cache} holds no finished token cache (no {MANIFEST_NAME}).",
            hint="name the folder that `atoll prepare` printed, or its recipe with --config and "
            "--set",
        )
    return cache
