"""`atoll demo`: everything that atoll does so far, in small, on real text."""

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import JsonOption, SetOption
from atoll.cli.output import print_data, print_json


def demo(
    overrides: SetOption,
    folder: Annotated[
        Path,
        typer.Option("--folder", help="Folder for the token cache and the runs. Default: demo."),
    ] = Path("demo"),
    as_json: JsonOption = False,
) -> None:
    """Train a small model on Python's own source and compare it with gzip: 2 minutes on 2 cores.

    \b
    Examples:
      atoll demo
      atoll demo --folder /tmp/demo --set training.tokens_per_parameters=0.5
    """
    from atoll.demo import run_demo
    from atoll.runner.progress import live_progress

    with live_progress() as progress:
        found = run_demo(folder, progress, overrides=list(overrides))
    if as_json:
        print_json(found.facts())
        return
    rows = sorted(
        [
            (found.model_bits_per_byte, "this model"),
            (found.gzip_bits_per_byte, "gzip -9"),
            (found.unigram_bits_per_byte, "token frequencies"),
        ]
    )
    print_data(f"{found.training_targets:,} targets in {found.steps} updates; held-out text costs")
    for bits, name in rows:
        print_data(f"  {bits:6.3f} bits per byte   {name}")
    print_data("\nThe model goes on from a prompt:\n\n")
    print_data("\n".join(f"    {line}" for line in found.sample.splitlines()))
    print_data(
        f"\nExported and loaded by transformers: {found.transformers_loss_nats:.6f} nats a target, "
        f"by atoll {found.atoll_loss_nats:.6f}."
    )
    print_data(f"All of it took {found.seconds:.0f} s. The run, its weights and its plot lie in")
    print_data(found.run_folder)
