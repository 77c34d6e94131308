"""`atoll bench throughput`: how fast a recipe trains here, and where the time goes."""

import enum
from typing import Annotated

import typer

from atoll.cli.options import ConfigOption, OutputOption, SetOption


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
