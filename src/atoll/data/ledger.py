"""The damage ledger: what was not taken as it came, by kind, with the first places."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from atoll.data.cache import LedgerEntry
from atoll.errors import DataError

KINDS: Mapping[str, str] = {
    # Repaired, and kept.
    "invalid_utf8": "bytes that are not UTF-8 were replaced by U+FFFD",
    "lone_surrogate": "half a surrogate pair in a JSON escape was replaced by U+FFFD",
    "byte_order_mark": "a UTF-8 byte order mark at the beginning was removed",
    "unknown_token": "the tokenizer has no id for some of the text",
    # Left out; expected in any corpus.
    "blank_line": "a JSONL line without content",
    "empty": "a document without any character but white space",
    "binary": "a text file with a zero byte",
    "oversized": "longer than data.max_document_bytes",
    "no_tokens": "the tokenizer gives no id for the text",
    "duplicate": "the same text as an earlier document",
    "in_validation": "a training document whose text is in the validation source",
    "unused": "a document left over when the mixture ended",
    # Damaged: `prepare` stops there, or leaves it out with data.on_bad_record=skip.
    "bad_json": "a JSONL line that is not a JSON object",
    "missing_field": "no text field, or null in it",
    "non_string_field": "a text field that holds no string",
    "truncated": "a file that ends inside a record, or whose compression is damaged",
}

DAMAGED = frozenset({"bad_json", "missing_field", "non_string_field", "truncated"})

NUM_EXAMPLES = 5


class Note(NamedTuple):
    """One thing that happened to one record."""

    kind: str
    example: str


class Ledger:
    """Counts by kind, and the first examples in source order."""

    def __init__(self, entries: Mapping[str, LedgerEntry] | None = None) -> None:
        self._counts: dict[str, int] = {}
        self._examples: dict[str, list[str]] = {}
        self.merge(entries or {})

    def add(self, kind: str, *, count: int = 1, examples: Iterable[str] = ()) -> None:
        """Count `count` more of one kind; examples beyond the first few are dropped."""
        assert kind in KINDS, kind
        if not count:
            return
        self._counts[kind] = self._counts.get(kind, 0) + count
        kept = self._examples.setdefault(kind, [])
        if len(kept) < NUM_EXAMPLES:
            kept.extend(islice(examples, NUM_EXAMPLES - len(kept)))

    def note(self, notes: Iterable[Note]) -> None:
        """Count each of `notes`."""
        for note in notes:
            self.add(note.kind, examples=(note.example,))

    def merge(self, entries: Mapping[str, LedgerEntry]) -> None:
        """Count everything of another ledger, whose examples come after those of this one."""
        for kind, entry in entries.items():
            self.add(kind, count=entry.count, examples=entry.examples)

    @property
    def entries(self) -> dict[str, LedgerEntry]:
        """The entries by kind, in alphabetical order."""
        return {
            kind: LedgerEntry(count=self._counts[kind], examples=list(self._examples[kind]))
            for kind in sorted(self._counts)
        }


def refuse_damaged(notes: Iterable[Note]) -> None:
    """Stop at a damaged record.

    Raises:
        DataError: One of the notes is of a damaged kind; names the file, the line and the byte.
    """
    for note in notes:
        if note.kind in DAMAGED:
            raise DataError(
                f"{note.example}: {KINDS[note.kind]}.",
                hint="repair the file, or set data.on_bad_record=skip to count and leave out "
                "damaged records",
            )
