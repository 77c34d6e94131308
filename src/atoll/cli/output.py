"""The two ways out: data to standard output, everything else to standard error."""

import json
import sys
from typing import Any


def print_data(text: str) -> None:
    """Write what was asked for to standard output, ending in one line feed."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def print_piece(text: str) -> None:
    """Write a part of a longer text to standard output at once, without a line feed."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """Write `value` to standard output as one indented JSON document; NaN is refused."""
    print_data(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_note(text: str) -> None:
    """Write a remark for people to standard error."""
    print(text, file=sys.stderr, flush=True)
