"""`atoll train`: one run, from a recipe or from where an earlier run stopped."""

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.options import ConfigOption, JsonOption, SetOption
from atoll.cli.output import print_data, print_json


def train(
    config: ConfigOption,
    overrides: SetOption,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Folder of a run to go on with, from its newest checkpoint. Without --config its "
            "own recipe is taken, and --set may change where it runs, what it writes, and a "
            "longer budget. Default: start anew.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model; a missing token cache is prepared first, and Ctrl-C leaves a checkpoint.

    The last line on standard output is the run's folder. A second Ctrl-C ends at once.

    \b
    Examples:
      atoll train --config tiny --set runtime.output_dir=runs/tiny
      atoll train --config 20m --config packed8-20m-awc --set runtime.output_dir=runs/packed
      atoll train --resume runs/tiny
    """
    from atoll.config.load import load_config
    from atoll.errors import InterruptedRunError
    from atoll.runner.compose import run
    from atoll.runner.folder import RunFolder
    from atoll.runner.progress import live_progress

    files = list(config)
    if resume is not None and not files:
        files = [RunFolder(resume).recipe_file()]
    loaded = load_config(files, overrides)
    recipe = loaded.config
    if resume is not None and not loaded.origins["runtime.output_dir"].startswith("--set"):
        # A resumed run stays where it is, unless another place is asked for here and now.
        runtime = recipe.runtime.model_copy(update={"output_dir": resume})
        recipe = recipe.model_copy(update={"runtime": runtime})
    with live_progress() as progress:
        result = run(recipe, resume=resume, progress=progress)
    if as_json:
        print_json(result.facts)
    else:
        print_data(str(result.folder))
    if result.status == "interrupted":
        kept = recipe.training.checkpoint_policy != "none"
        raise InterruptedRunError(
            f"{result.facts['stopped_by']}: stopped after update {result.step} of "
            f"{result.facts['total_steps']}.",
            hint=f"atoll train --resume {result.folder}"
            if kept
            else "training.checkpoint_policy is none, so nothing was kept to go on from",
        )
