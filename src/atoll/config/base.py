"""What every section of a recipe has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen mapping with known keys only; values are not coerced across kinds (no "3" for 3)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
