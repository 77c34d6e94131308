"""`atoll doctor`: what this machine can do, and what is missing."""

import typer

from atoll.cli.options import ConfigOption, JsonOption, SetOption


def doctor(config: ConfigOption, overrides: SetOption, as_json: JsonOption = False) -> None:
    """Say what this machine can do and what is missing.

    Exits 1 if something is broken that atoll, or the recipe where one is given, cannot do without.

    \b
    Examples:
      atoll doctor
      atoll doctor --config 20m --set runtime.device=cpu
    """
    from dataclasses import asdict

    from atoll.cli.checks import all_checks
    from atoll.cli.output import print_data, print_json
    from atoll.config.load import load_config

    checks = list(all_checks(load_config(config, overrides).config))
    broken = [check.name for check in checks if check.status == "broken"]
    if as_json:
        print_json({"ok": not broken, "checks": [asdict(check) for check in checks]})
    for check in () if as_json else checks:
        print_data(f"{check.status:<8} {check.name:<18} {check.found}")
        if check.remedy:
            print_data(f"{'':<27} hint: {check.remedy}")
    if broken:
        raise typer.Exit(1)
