"""Parameters of a built-in comparison: `--set name=value`, checked and reported all at once."""

from collections.abc import Sequence
from typing import TypeVar

import yaml
from pydantic import ValidationError

from atoll.config.base import Section
from atoll.config.names import did_you_mean
from atoll.errors import ConfigError

S = TypeVar("S", bound=Section)


def read_settings(section: type[S], overrides: Sequence[str]) -> S:
    """Return the section with `overrides` applied to its defaults.

    Args:
        section: What may be set.
        overrides: `name=value`, the value written as in YAML.

    Raises:
        ConfigError: Lists every fault.
    """
    faults: list[str] = []
    values: dict[str, object] = {}
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator:
            faults.append(f"--set {override}: it must have the form NAME=VALUE.")
        elif name not in section.model_fields:
            near = did_you_mean(name, section.model_fields)
            faults.append(f"--set {override}: there is no parameter {name}. {near}".rstrip())
        else:
            try:
                values[name] = yaml.safe_load(text)
            except yaml.YAMLError:
                faults.append(f"--set {override}: the value is not valid YAML.")
    try:
        found = section.model_validate(values)
    except ValidationError as error:
        for part in error.errors(include_url=False):
            place = ".".join(str(step) for step in part["loc"])
            faults.append(f"--set {place}={part['input']}: {part['msg']}.")
    else:
        if not faults:
            return found
    raise ConfigError(faults, hint=f"parameters here: {', '.join(section.model_fields)}")
