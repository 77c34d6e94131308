"""`atoll bench loader`: what the loader of a recipe costs in real training."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import ConfigOption, OutputOption, SetOption


class PlacementName(enum.StrEnum):
    pageable = "pageable"
    pinned = "pinned"
    device = "device"


class SwitchName(enum.StrEnum):
    on = "on"
    off = "off"


StepsOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        show_default=False,
        help="Updates of the trial, at least 1 and above --exclude. Default: 2100.",
    ),
]
ExcludeOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        show_default=False,
        help="First updates that no figure holds, at least 0. Default: 100.",
    ),
]
PlacementOption = Annotated[
    PlacementName | None,
    typer.Option(show_default=False, help="Overrides data.placement. Default: as the recipe says."),
]
PrefetchOption = Annotated[
    SwitchName | None,
    typer.Option(show_default=False, help="Overrides data.prefetch. Default: as the recipe says."),
]
ConditionOption = Annotated[
    str, typer.Option(metavar="NAME", hidden=True, help="Name in a comparison. Default: baseline.")
]
PositionOption = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, hidden=True, help="Place in its allocation, from 1. Default: 1."
    ),
]
ReadDelayOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.0,
        show_default=False,
        help="Makes the read of every shard group that much slower, to see what the profile says "
        "of a slow disk. Default: 0.",
    ),
]
CandidateSetOption = Annotated[
    list[str],
    typer.Option(
        "--b-set",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
        help="One setting of a candidate, over all others: trials of both take turns, each in a "
        "process of its own. Repeats, needs --folder. Default: none, one trial.",
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        show_default=False,
        help="Where the trials of two conditions and the frozen source are kept; the same command "
        "goes on there. Default: none.",
    ),
]
BlocksOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        show_default=False,
        help="Blocks of four trials of two conditions, after two of the first, at least 1. "
        "Default: 1.",
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, show_default=False, help="Seed of the order of trials. Default: 0."
    ),
]


def loader(
    config: ConfigOption,
    overrides: SetOption,
    candidate: CandidateSetOption,
    steps: StepsOption = 2100,
    exclude: ExcludeOption = 100,
    placement: PlacementOption = None,
    prefetch: PrefetchOption = None,
    read_delay_seconds: ReadDelayOption = 0.0,
    condition: ConditionOption = "baseline",
    position: PositionOption = 1,
    folder: FolderOption = None,
    blocks: BlocksOption = 1,
    seed: SeedOption = 0,
    output: OutputOption = None,
) -> None:
    """Measure the loader in real training that a signal stops, and name the stage that costs time.

    The document holds every sample, and each figure can be computed from them again.

    \b
    Examples:
      atoll bench loader --config tiny --steps 200
      atoll bench loader --config tiny --steps 200 --prefetch off --read-delay-seconds 0.5
      atoll bench loader --config tiny --steps 200 --b-set data.prefetch=false --folder trials
    """
    import json
    import sys

    from atoll.bench.loader_figures import summary
    from atoll.bench.loader_series import SeriesRequest, run_series
    from atoll.bench.loader_trial import TrialRequest, run_trial
    from atoll.cli.output import print_data, print_note
    from atoll.config.load import load_config
    from atoll.errors import UsageError
    from atoll.files import write_json

    if (folder is None) != (not candidate):
        raise UsageError(
            "two conditions need both --b-set and --folder; only one of them was given.",
            hint="give both, or neither for one trial",
        )
    if placement is not None:
        overrides = [*overrides, f"data.placement={placement.value}"]
    if prefetch is not None:
        overrides = [*overrides, f"data.prefetch={prefetch == SwitchName.on}"]
    recipe = load_config(config, overrides).config
    if folder is not None:
        request = SeriesRequest(steps, exclude, blocks, seed, read_delay_seconds)
        other = load_config(config, [*overrides, *candidate]).config
        document = run_series(
            folder, {"baseline": recipe, "candidate": other}, request, note=print_note
        )
    else:
        request = TrialRequest(steps, exclude, condition, position, read_delay_seconds)
        command = ["atoll", *sys.argv[1:]]
        document = run_trial(recipe, request, command=command, note=print_note)
        print_note(summary(document))
    if output is not None:
        write_json(output, document)
    print_data(json.dumps(document, ensure_ascii=False, allow_nan=False))
