"""What every section of a recipe has in common."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A frozen mapping with known keys only; a recipe's values are not coerced (no "3" for 3)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule between settings that does not hold.

    Attributes:
        keys: Every setting the rule reads, dotted, relative to the section that states it.
        message: What was found, what is required, and the nearest values that fit.
    """

    keys: Sequence[str]
    message: str


def refuse(broken: Iterable[BrokenRule]) -> None:
    """Refuse a section whose rules are broken, all at once; used by its validator."""
    broken = tuple(broken)
    if broken:
        text = " ".join(rule.message for rule in broken)
        # The text is not a template here: a message may hold braces.
        raise PydanticCustomError("broken_rules", "{text}", {"text": text, "broken": broken})
