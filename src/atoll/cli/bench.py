"""`atoll bench`: measurements. The last line of standard output is one JSON document."""

import enum
from typing import Annotated

import typer

from atoll.cli.bench_loader import loader
from atoll.cli.bench_throughput import DataName, throughput
from atoll.cli.options import ConfigOption, OutputOption, command_group

app = command_group(
    "Measure: counterbalanced, every sample kept, the last line is one JSON document."
)
app.command()(loader)
app.command()(throughput)


class ScenarioName(enum.StrEnum):
    prepare = "prepare"
    training = "training"
    batch = "batch"
    planted = "planted"


ScenarioArgument = Annotated[
    ScenarioName | None,
    typer.Argument(
        show_default=False,
        help="Built-in comparison: prepare (atoll prepare against tokenizers encode_batch), "
        "training (one update against transformers), batch (a batch against a numpy gather), "
        "planted (slowdowns of known size, how often they are found; 10 minutes).",
    ),
]
AOption = Annotated[
    str | None, typer.Option("--a", metavar="CMD", help="Shell command A. Default: none.")
]
BOption = Annotated[
    str | None, typer.Option("--b", metavar="CMD", help="Shell command B. Default: none.")
]
AtLeastOption = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        min=0.0,
        help="Speed of A over B that is asked for, of commands or settings. Default: none, "
        "measure only.",
    ),
]
BlocksOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=2,
        show_default=False,
        help="Blocks of four windows, at least 2. Default: 12.",
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, show_default=False, help="Seed of the order of windows. Default: 0."
    ),
]
ParameterOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        default_factory=list,
        show_default=False,
        help="One parameter of a built-in comparison, the value written as in YAML; a wrong name "
        "lists them. With --config, one setting of both. Repeats. Default: none.",
    ),
]
ASetOption = Annotated[
    list[str],
    typer.Option(
        "--a-set",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
        help="One setting of A alone, over --config and --set. Repeats. Default: none.",
    ),
]
BSetOption = Annotated[
    list[str],
    typer.Option(
        "--b-set",
        metavar="KEY=VALUE",
        default_factory=list,
        show_default=False,
        help="One setting of B alone, over --config and --set. Repeats. Default: none.",
    ),
]
SettingsDataOption = Annotated[
    DataName | None,
    typer.Option(
        show_default=False,
        help="What updates of two settings see: random ids that lie on the device, or the recipe's "
        "finished token cache. Default: synthetic.",
    ),
]
SettingsUpdatesOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        show_default=False,
        help="Updates in one window of two settings, at least 1. Default: 20.",
    ),
]
TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0.001,
        help="Longest time of one run of a command, in seconds. Default: none.",
    ),
]


@app.command()
def compare(
    parameters: ParameterOption,
    config: ConfigOption,
    a_set: ASetOption,
    b_set: BSetOption,
    scenario: ScenarioArgument = None,
    a: AOption = None,
    b: BOption = None,
    data: SettingsDataOption = None,
    updates: SettingsUpdatesOption = None,
    timeout: TimeoutOption = None,
    at_least: AtLeastOption = None,
    blocks: BlocksOption = 12,
    seed: SeedOption = 0,
    output: OutputOption = None,
) -> None:
    """Compare two conditions in ABBA and BAAB blocks, after comparing A with itself.

    They are two shell commands, two settings of one recipe, or a built-in pair. Exits 0 if every
    target is reached or there is none, 1 otherwise.

    \b
    Examples:
      atoll bench compare batch --blocks 4 --set rows=8
      atoll bench compare --a "true" --b "sleep 0.05" --blocks 4
      atoll bench compare --config smoke --b-set training.micro_batch_size=4 --blocks 4 --updates 5
    """
    import json
    import sys

    from atoll.bench.scenarios.choose import Asked, hold
    from atoll.cli.output import print_data, print_note
    from atoll.files import write_json

    asked = Asked(
        scenario=None if scenario is None else scenario.value,
        a=a,
        b=b,
        config=config,
        set_both=parameters,
        a_set=a_set,
        b_set=b_set,
        data=None if data is None else data.value,
        updates=updates,
        at_least=at_least,
        timeout_seconds=timeout,
    )
    command = ["atoll", *sys.argv[1:]]
    document = hold(asked, command=command, seed=seed, num_blocks=blocks, note=print_note)
    if output is not None:
        write_json(output, document)
    print_data(json.dumps(document, ensure_ascii=False, allow_nan=False))
    if document["verdict"] not in ("pass", "measured"):
        raise typer.Exit(1)
