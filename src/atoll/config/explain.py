"""Show a recipe: whole and loadable, with origins, with what follows from it, and as reference."""

from collections.abc import Iterator, Mapping
from typing import Any

from atoll.config.budget import plan_budget
from atoll.config.load import LoadedConfig
from atoll.config.schema import RunConfig
from atoll.config.syntax import flow


def dump_resolved(config: RunConfig) -> str:
    """Return the recipe as YAML with every setting; it loads by itself and gives an equal one."""
    return "\n".join(_lines(config.model_dump(mode="json"), {})) + "\n"


def show(loaded: LoadedConfig, *, origins: bool) -> str:
    """Return the recipe as YAML under comments that say what follows from it.

    Args:
        loaded: The recipe.
        origins: Write behind each value where it comes from.
    """
    values = loaded.config.model_dump(mode="json")
    head = [f"# {line}" for line in remarks(loaded.config)]
    return "\n".join([*head, *_lines(values, loaded.origins if origins else {})]) + "\n"


def derive(config: RunConfig) -> dict[str, int]:
    """Return the figures that follow from a recipe without any data."""
    budget = plan_budget(config)
    sequences = budget.batch_tokens // config.model.context_length
    rows = sequences // config.strategy.models
    return {
        "parameters": budget.parameters,
        "total_steps": budget.total_steps,
        "total_targets": budget.total_targets,
        "num_epochs": budget.num_epochs,
        "sequences_per_update": sequences,
        "microbatches_per_update": rows // min(rows, config.training.micro_batch_size),
    }


def remarks(config: RunConfig) -> list[str]:
    """Return what follows from a recipe, one sentence each, with a warning where one is due."""
    figures = derive(config)
    models = config.strategy.models
    each = f" in each of {models} local models" if models > 1 else ""
    lines = [
        f"{figures['parameters']:,} trainable parameters{each}",
        f"{figures['total_steps']:,} updates of {config.training.batch_tokens:,} targets "
        f"({_count(figures['sequences_per_update'], 'sequence')} and "
        f"{_count(figures['microbatches_per_update'], 'backward')} each): "
        f"{figures['total_targets']:,} targets",
        _count(figures["num_epochs"], "virtual epoch"),
    ]
    warmup = config.lr_schedule.warmup_steps
    if warmup >= figures["total_steps"]:
        lines.append(
            f"warning: lr_schedule.warmup_steps {warmup} never reaches the peak rate in "
            f"{figures['total_steps']} updates"
        )
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _lines(
    values: Mapping[str, Any], notes: Mapping[str, str], prefix: str = "", indent: str = ""
) -> Iterator[str]:
    for key, value in values.items():
        name = prefix + key
        note = f"  # {notes[name]}" if name in notes else ""
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(value, notes, name + ".", indent + "  ")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield f"{indent}{key}:{note}"
            yield from (f"{indent}  - {flow(item)}" for item in value)
        else:
            yield f"{indent}{key}: {flow(value)}{note}"
