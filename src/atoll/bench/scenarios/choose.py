"""What is compared: a built-in pair, two commands, or two settings of one recipe."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from atoll.bench.contest import Contest
from atoll.bench.settings import read_settings
from atoll.errors import UsageError

Scenario = Literal["prepare", "training", "batch", "planted"]

DEFAULT_UPDATES = 20


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says; None and empty: nothing.

    Attributes:
        scenario: Name of a built-in comparison.
        a: Shell command A.
        b: Shell command B.
        config: Recipe of both.
        set_both: Parameters of a built-in comparison, or settings of both recipes.
        a_set: Settings of A.
        b_set: Settings of B.
        data: What updates see.
        updates: In a window.
        at_least: Speed of A over B that is asked for.
        timeout_seconds: Longest time of one run of a command.
    """

    scenario: Scenario | None = None
    a: str | None = None
    b: str | None = None
    config: Sequence[Path] = ()
    set_both: Sequence[str] = ()
    a_set: Sequence[str] = ()
    b_set: Sequence[str] = ()
    data: Literal["synthetic", "cache"] | None = None
    updates: int | None = None
    at_least: float | None = None
    timeout_seconds: float | None = None


def hold(
    asked: Asked,
    *,
    command: Sequence[str],
    seed: int,
    num_blocks: int,
    note: Callable[[str], object],
) -> dict[str, Any]:
    """Make the comparison that is asked for and return its JSON document.

    Args:
        asked: What to compare.
        command: The command line.
        seed: Decides every order.
        num_blocks: Blocks of A against B; at least 2.
        note: Takes lines for people.

    Raises:
        UserError: It is not clear what is asked for, or cannot be done.
    """
    kind = which(asked)
    if kind == "built-in" and asked.scenario == "planted":
        from atoll.bench.planted_study import PlantedSettings, planted_study

        return planted_study(
            read_settings(PlantedSettings, asked.set_both),
            command=command,
            seed=seed,
            num_blocks=num_blocks,
            note=note,
        )
    from atoll.bench.document import compare

    name, parameters, contests = _contests(asked, kind, seed=seed, num_blocks=num_blocks)
    return compare(
        contests,
        name=name,
        parameters=parameters,
        command=command,
        seed=seed,
        num_blocks=num_blocks,
        note=note,
    )


def which(asked: Asked) -> Literal["built-in", "commands", "settings"]:
    """Return which of the three is asked for.

    Raises:
        UsageError: None, several, half of one, or an option that belongs to another.
    """
    settings_given = bool(asked.config or asked.a_set or asked.b_set)
    commands_given = asked.a is not None or asked.b is not None
    given = (asked.scenario is not None) + commands_given + settings_given
    half = commands_given and None in (asked.a, asked.b)
    if given != 1 or half:
        raise UsageError(
            "bench compare needs either the name of a built-in comparison, or both --a and --b, "
            "or --config with --a-set or --b-set.",
            hint="atoll bench compare training, or atoll bench compare --a CMD --b CMD, or atoll "
            "bench compare --config tiny --b-set training.micro_batch_size=16",
        )
    kind = "settings" if settings_given else "commands" if commands_given else "built-in"
    strangers = {
        "built-in": {
            "--at-least": asked.at_least,
            "--timeout": asked.timeout_seconds,
            "--data": asked.data,
            "--updates": asked.updates,
        },
        "commands": {
            "--set": asked.set_both or None,
            "--data": asked.data,
            "--updates": asked.updates,
        },
        "settings": {"--timeout": asked.timeout_seconds},
    }[kind]
    unfit = [option for option, value in strangers.items() if value is not None]
    if unfit:
        what = {"built-in": "a built-in comparison", "commands": "two commands"}
        raise UsageError(
            f"{', '.join(unfit)} has no meaning for {what.get(kind, 'two settings')}.",
            hint="leave it out",
        )
    return kind


def _contests(
    asked: Asked, kind: str, *, seed: int, num_blocks: int
) -> tuple[str, dict[str, Any], Iterable[Contest]]:
    if kind == "settings":
        from atoll.bench.scenarios.two_settings import Pair, setting_contests

        pair = Pair(
            files=asked.config,
            common=asked.set_both,
            a=asked.a_set,
            b=asked.b_set,
            data=asked.data or "synthetic",
            updates=asked.updates or DEFAULT_UPDATES,
            at_least=asked.at_least,
        )
        parameters = asdict(pair) | {"files": [str(file) for file in pair.files]}
        return "settings", parameters, setting_contests(pair, num_blocks=num_blocks, seed=seed)
    if asked.a is not None and asked.b is not None:
        from atoll.bench.scenarios.commands import commands

        parameters = {
            "a": asked.a,
            "b": asked.b,
            "at_least": asked.at_least,
            "timeout_seconds": asked.timeout_seconds,
        }
        contest = commands(
            asked.a, asked.b, at_least=asked.at_least, timeout_seconds=asked.timeout_seconds
        )
        return "commands", parameters, [contest]
    assert asked.scenario is not None
    parameters, contests = scenario(asked.scenario, asked.set_both)
    return asked.scenario, parameters, contests


def scenario(name: Scenario, overrides: Sequence[str]) -> tuple[dict[str, Any], Iterator[Contest]]:
    """Return a comparison's settings and its contests, each built when it is asked for.

    Args:
        name: Which one; `planted` is a study of many and has no contests.
        overrides: `name=value` over its defaults.

    Raises:
        ConfigError: A parameter does not exist or does not fit.
    """
    match name:
        case "prepare":
            from atoll.bench.scenarios.prepare import PrepareSettings, prepare_contests

            settings = read_settings(PrepareSettings, overrides)
            return settings.model_dump(mode="json"), prepare_contests(settings)
        case "training":
            from atoll.bench.scenarios.training import TrainingSettings, training_contests

            settings = read_settings(TrainingSettings, overrides)
            return settings.model_dump(mode="json"), training_contests(settings)
        case "batch":
            from atoll.bench.scenarios.batch import BatchSettings, batch_contests

            settings = read_settings(BatchSettings, overrides)
            return settings.model_dump(mode="json"), batch_contests(settings)
        case "planted":
            raise UsageError("planted slowdowns are no single contest.", hint="call planted_study")
