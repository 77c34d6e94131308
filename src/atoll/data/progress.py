"""What `prepare` says about itself while it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["copy", "tokenizer", "train", "encode", "arrange", "assemble", "compare", "verify"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one phase is.

    Attributes:
        phase: copy (rows of a hub data set), tokenizer (bytes of the corpus read for the sample),
            train (the tokenizer itself), encode (bytes of the corpus), arrange, assemble (tokens),
            compare (bytes of source files with a finished cache), verify (bytes of the cache).
        done: Units done.
        total: Units in all, or None where nobody knows.
    """

    phase: Phase
    done: int
    total: int | None


See = Callable[[Progress], None]


def ignore(progress: Progress) -> None:
    """See nothing."""
