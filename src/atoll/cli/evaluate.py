"""`atoll evaluate`: the held-out loss of a run or of one checkpoint."""

from typing import Annotated

import typer

from atoll.cli.options import JsonOption, LocalModelOption, RunArgument
from atoll.cli.output import print_data, print_json


def evaluate(
    run: RunArgument,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Score the whole held-out split. Default: the recipe's fixed subset of "
            "evaluation.subset_sequences sequences.",
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            "--device", help="Where to compute: cpu, cuda, cuda:N, mps or auto. Default: auto."
        ),
    ] = "auto",
    local_model: LocalModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score held-out text in nats per token and bits per byte.

    \b
    Examples:
      atoll evaluate runs/tiny
      atoll evaluate runs/tiny/checkpoints/step-00000064 --full --json
      atoll evaluate runs/packed --local-model 0
    """
    from atoll.runner.trained import evaluate_trained, open_trained
    from atoll.train.device import resolve_device

    place = resolve_device(device, option="--device")
    trained = open_trained(run, device=place, local_model=local_model)
    found = evaluate_trained(trained, full=full)
    models = trained.config.strategy.models
    if as_json:
        facts = {"weights": str(trained.weights), "step": trained.step, "local_models": models}
        print_json({**facts, "local_model": local_model, **found.facts()})
        return
    which = ""
    if models > 1:
        which = "average of" if local_model is None else f"number {local_model} of"
        which = f", {which} {models} local models"
    print_data(
        f"weights         {trained.weights} (update {trained.step}{which})\n"
        f"held-out loss   {found.nats_per_token:.6f} nats per token\n"
        f"                {found.bits_per_byte:.6f} bits per byte\n"
        f"scored          {found.rows:,} sequences, {found.targets:,.0f} targets"
    )
