"""`atoll prepare`: corpus to token cache."""

from atoll.cli.options import ConfigOption, JsonOption, SetOption
from atoll.cli.output import print_data, print_json, print_note


def prepare(config: ConfigOption, overrides: SetOption, as_json: JsonOption = False) -> None:
    """Make the token cache that a recipe names, or check it where it is finished.

    Stopped or killed at any point, the same command goes on where it was. The last line on standard
    output is the cache's folder.

    \b
    Examples:
      atoll prepare --config tiny
      atoll prepare --config 20m --set data.source=corpus --set data.prepare_workers=8
    """
    from atoll.cli.cache_report import facts_of, summary_of
    from atoll.cli.prepare_progress import show_progress
    from atoll.config.load import load_config
    from atoll.data import prepare as preparing
    from atoll.interrupt import raise_on_signal

    recipe = load_config(config, overrides).config
    with raise_on_signal("preparing"), show_progress() as see:
        cache = preparing.prepare(recipe.data, recipe.model, progress=see)
    print_note(summary_of(cache))
    if as_json:
        print_json(facts_of(cache))
    else:
        print_data(str(cache.folder))
