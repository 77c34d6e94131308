"""`atoll config`: look at a recipe before anything runs."""

from typing import Annotated

import typer

from atoll.cli.options import ConfigOption, JsonOption, SetOption, command_group
from atoll.cli.output import print_data, print_json

app = command_group("Look at a recipe before anything runs.")


@app.command()
def show(
    config: ConfigOption,
    overrides: SetOption,
    origins: Annotated[
        bool,
        typer.Option("--origins", help="Write behind each value its file and line. Default: off."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a recipe and print it whole, with the parameters and updates that follow from it.

    \b
    Examples:
      atoll config show --config tiny --origins
      atoll config show --config 20m --set training.tokens_per_parameters=14
    """
    from atoll.config.explain import derive
    from atoll.config.explain import show as show_text
    from atoll.config.load import load_config

    loaded = load_config(config, overrides)
    if not as_json:
        print_data(show_text(loaded, origins=origins))
        return
    print_json(
        {
            "config": loaded.config.model_dump(mode="json"),
            "origins": dict(loaded.origins),
            "derived": derive(loaded.config),
        }
    )
