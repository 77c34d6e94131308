"""`atoll bench`: measurements. The last line of standard output is one JSON document."""

import enum
from typing import Annotated

import typer

from atoll.cli.bench_loader import loader
from atoll.cli.options import ConfigOption, OutputOption, SetOption, command_group

app = command_group(
    "Measure: counterbalanced, every sample kept, the last line is one JSON document."
)
app.command()(loader)


class ScenarioName(enum.StrEnum):
    prepare = "prepare"
    training = "training"
    batch = "batch"
    planted = "planted"


class ModeName(enum.StrEnum):
    single = "single"
    packed = "packed"
    sequential = "sequential"


class DataName(enum.StrEnum):
    synthetic = "synthetic"
    cache = "cache"


class DeterministicName(enum.StrEnum):
    off = "off"
    on = "on"
    both = "both"


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
ModeOption = Annotated[
    list[ModeName],
    typer.Option(
        "--mode",
        default_factory=list,
        show_default=False,
        help="One model on the whole batch, the recipe's packed local models, or as many single "
        "models one after the other. Repeats; several take turns. Default: what the recipe is.",
    ),
]
UpdatesOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        show_default=False,
        help="Updates of each model in one window, at least 1. Default: 20.",
    ),
]
WindowsOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        show_default=False,
        help="Timed windows of each mode, after two that warm up; even where there are several "
        "modes, and at least 8 for an interval. Default: 8.",
    ),
]
DataOption = Annotated[
    DataName,
    typer.Option(
        show_default=False,
        help="Random ids that lie on the device, or the recipe's finished token cache. "
        "Default: synthetic.",
    ),
]
DeterministicOption = Annotated[
    DeterministicName | None,
    typer.Option(
        show_default=False,
        help="Overrides runtime.deterministic; both measures off, on, on and off in a process "
        "each, and the price. Default: as the recipe says.",
    ),
]
RowsSeedOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        show_default=False,
        help="Seed of the order of windows and of random ids. Default: 0.",
    ),
]
TraceOption = Annotated[
    bool,
    typer.Option(
        "--trace/--no-trace",
        show_default=False,
        help="Whether time by term is measured, apart from the windows. Default: on.",
    ),
]


@app.command()
def throughput(
    config: ConfigOption,
    overrides: SetOption,
    modes: ModeOption,
    updates: UpdatesOption = 20,
    windows: WindowsOption = 8,
    data: DataOption = DataName.synthetic,
    deterministic: DeterministicOption = None,
    trace: TraceOption = True,
    seed: RowsSeedOption = 0,
    output: OutputOption = None,
) -> None:
    """Measure targets per second, memory, and time by term against measured roofs.

    Updates are those of `atoll train`. Rates are medians over windows, with their extremes.

    \b
    Examples:
      atoll bench throughput --config tiny
      atoll bench throughput --config 20m --config packed8-20m-awc --mode packed --mode sequential
    """
    import json
    import sys

    from atoll.bench.throughput import Request, throughput
    from atoll.bench.throughput_exact import both_ways
    from atoll.bench.throughput_table import table
    from atoll.cli.output import print_data, print_note
    from atoll.config.load import load_config
    from atoll.files import write_json

    if deterministic in (DeterministicName.off, DeterministicName.on):
        overrides = [*overrides, f"runtime.deterministic={deterministic == DeterministicName.on}"]
    recipe = load_config(config, overrides).config
    command = ["atoll", *sys.argv[1:]]
    if deterministic == DeterministicName.both:
        words = [word for file in config for word in ("--config", str(file))]
        words += [word for text in overrides for word in ("--set", text)]
        words += [word for mode in modes for word in ("--mode", mode.value)]
        words += ["--updates", str(updates), "--windows", str(windows), "--data", data.value]
        words += ["--seed", str(seed)]
        document = both_ways(words, trace=trace, command=command, note=print_note)
    else:
        request = Request(
            modes=tuple(mode.value for mode in modes),
            updates=updates,
            windows=windows,
            data=data.value,
            trace=trace,
            seed=seed,
        )
        document = throughput(recipe, request, command=command, note=print_note)
    if output is not None:
        write_json(output, document)
    print_note(table(document))
    print_data(json.dumps(document, ensure_ascii=False, allow_nan=False))


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
