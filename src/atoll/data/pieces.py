"""Cutting long documents where the tokenizer cuts anyway, so that memory stays bounded.

An encoding holds some hundred bytes a token. A document of 64 MiB would need gigabytes in one
piece; in pieces of a MiB it needs as much as any block.

The place is between a line feed and the next character, where no white space stands before the
line feed or after it. There the pre-tokenizers known below always end one part and begin another,
whatever stands around it, and the piece before it is cut into the same parts as in the whole text;
no token crosses such a border. Other tokenizers get their documents whole.
"""

import json
import re
from typing import Any

_CUT = re.compile(r"(?<=\S\n)(?=\S)")

# Patterns of `Split` after which the argument above holds: a line feed is taken alone, or with the
# marks before it, and never with what follows.
_KNOWN_PATTERNS = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")  # GPT-4 and Llama 3; Qwen 2
)


def can_cut(content: bytes) -> bool:
    """Say whether a tokenizer.json is of a kind whose documents may be cut at `_CUT`."""
    facts = json.loads(content)
    return (
        facts.get("normalizer") is None
        and facts.get("model", {}).get("type") == "BPE"
        and not any(_reaches_over_lines(token) for token in facts.get("added_tokens", []))
        and _cuts_lines(facts.get("pre_tokenizer"))
    )


def cut(text: str, *, piece_chars: int) -> list[str]:
    """Cut a text into pieces of about `piece_chars`, or longer where no place is safe."""
    pieces, start = [], 0
    while len(text) - start > piece_chars:
        found = _CUT.search(text, start + piece_chars)
        if found is None:
            break
        pieces.append(text[start : found.start()])
        start = found.start()
    pieces.append(text[start:])
    return pieces


def _reaches_over_lines(token: dict[str, Any]) -> bool:
    """Say whether an added token could match over a line feed; special ones match nothing here."""
    if token.get("special"):
        return False
    return bool(token.get("lstrip") or token.get("rstrip") or "\n" in token.get("content", ""))


def _cuts_lines(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Say whether all parts are known and one of them separates lines by itself."""
    if pre_tokenizer is None:
        return False
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return all(_is_known(part) for part in parts) and any(_separates_lines(part) for part in parts)


def _is_known(part: dict[str, Any]) -> bool:
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False} | {"type": "Digits"}:
            return True
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            return pattern in _KNOWN_PATTERNS and not part.get("invert")
        case _:
            return False


def _separates_lines(part: dict[str, Any]) -> bool:
    return part["type"] == "Split" or (part["type"] == "ByteLevel" and part.get("use_regex", True))
