"""What an update was trained on, as text for people."""

from collections.abc import Sequence
from typing import TypedDict

from atoll.config.schema import RunConfig
from atoll.data.explain import ExplainedRow, Sighting
from atoll.errors import UsageError


class RowOrder(TypedDict):
    """What decides which rows an update reads, as `explain_update` takes it."""

    rows_per_update: int
    context_length: int
    seed: int
    group_shards: int
    passes: int


def row_order(recipe: RunConfig) -> RowOrder:
    """Return the part of a recipe that decides which rows an update reads."""
    return {
        "rows_per_update": recipe.training.batch_tokens // recipe.model.context_length,
        "context_length": recipe.model.context_length,
        "seed": recipe.data.shuffle_seed,
        "group_shards": recipe.data.shuffle_group_size,
        "passes": recipe.data.passes,
    }


def split_document(text: str) -> tuple[str, int]:
    """Split SOURCE:NUMBER.

    Raises:
        UsageError: It is not of that form.
    """
    source, _, number = text.rpartition(":")
    if not source or not number.isdecimal():
        raise UsageError(
            f"{text!r} names no document.",
            hint="write SOURCE:NUMBER as `atoll cache explain` prints it, for example stdlib:17",
        )
    return source, int(number)


def rows_text(step: int, rows: Sequence[ExplainedRow]) -> str:
    """Return each row with its place in the split, its documents and their text."""
    lines = [f"update {step}"]
    for row in rows:
        lines.append(
            f"\nrow {row.row}: sequence {row.sequence}, tokens {row.start:,} to {row.stop - 1:,}, "
            f"group {row.group}, pass {row.pass_index}, cursor {row.cursor}"
        )
        for span in row.spans:
            file = f" {span.file}" if span.file else ""
            lines.append(
                f"-- {span.source}:{span.document}{file}, {span.tokens} tokens from its token "
                f"{span.offset} on"
            )
            lines.append(span.text)
    return "\n".join(lines)


def sightings_text(document: str, sightings: Sequence[Sighting]) -> str:
    """Return one line for each row that holds a part of the document."""
    if not sightings:
        return f"{document}: no complete update trains on it"
    return "\n".join(
        f"update {sighting.step}, row {sighting.row}: sequence {sighting.sequence}, "
        f"pass {sighting.pass_index}"
        for sighting in sightings
    )
