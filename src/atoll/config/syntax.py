"""YAML as recipes use it: safe, without duplicate keys or surprises, every value with its line.

Plain words are read as in YAML 1.2: only true and false are booleans (`no` and `off` are text),
1e-3 is a number, 010 and 12:30 are text. A whole number may be grouped, 33_554_432, or written
1e6. Aliases, tags and several documents in one file are refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, ScalarNode, SequenceNode

Origin = Callable[[int], str]
"""Gives the place of a line, counted from 1."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it was written; mappings and lists hold nodes.

    Attributes:
        value: None, bool, int, float, str, a list of nodes or a mapping of nodes.
        origin: `file:line` of its key, or `--set N`.
    """

    value: Any
    origin: str


def parse(text: str, origin: Origin, faults: list[str]) -> Node | None:
    """Read one YAML document; what is wrong with it is added to `faults`, one line each.

    Args:
        text: The document.
        origin: Gives the place of a line, counted from 1.
        faults: Receives a line for each fault; a faulty part is left out of the result.

    Returns:
        The tree, or None where the text is empty or is not YAML at all.
    """
    try:
        root = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        faults.append(f"{origin(line)}: not valid YAML: {_sentence(error)}.")
        return None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        faults.append(f"{origin(line)}: not valid YAML: it holds {_character(error)}.")
        return None
    return None if root is None else _node(root, origin(root.start_mark.line + 1), origin, faults)


Place = tuple[str | int, ...]
"""Keys and list positions from the root of a recipe to a value."""


def dotted(place: Place) -> str:
    """Return a place as messages show it, such as `data.source[1].weight`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".")


def node_at(root: Node, place: Place) -> Node | None:
    """Return the node at a place, or None where there is none."""
    node: Node | None = root
    for part in place:
        match node:
            case Node(value=dict(children)):
                node = children.get(part)
            case Node(value=list(items)) if isinstance(part, int):
                node = items[part]
            case _:
                return None
    return node


def plain(node: Node) -> Any:
    """Return the value without origins, as JSON would hold it."""
    match node.value:
        case dict():
            return {key: plain(child) for key, child in node.value.items()}
        case list():
            return [plain(child) for child in node.value]
        case _:
            return node.value


def flow(value: Any) -> str:
    """Write a value on one line so that `parse` reads it back equal."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _node(node: Any, place: str, origin: Origin, faults: list[str]) -> Node:
    match node:
        case MappingNode():
            return Node(_mapping(node, origin, faults), place)
        case SequenceNode():
            items = [_node(n, origin(n.start_mark.line + 1), origin, faults) for n in node.value]
            return Node(items, place)
        case _:
            return Node(_scalar(node), place)


def _mapping(node: MappingNode, origin: Origin, faults: list[str]) -> dict[str, Node]:
    result: dict[str, Node] = {}
    for key_node, value_node in node.value:
        place = origin(key_node.start_mark.line + 1)
        if not isinstance(key_node, ScalarNode) or key_node.tag != _STR:
            faults.append(f"{place}: a key must be text; write it in quotes if it is meant so.")
            continue
        key = key_node.value
        if key in result:
            faults.append(f"{place}: {key} is given twice; the first is at {result[key].origin}.")
            continue
        result[key] = _node(value_node, place, origin, faults)
    return result


def _scalar(node: ScalarNode) -> Any:
    match node.tag.removeprefix(_TAG):
        case "null":
            return None
        case "bool":
            return node.value.lower() == "true"
        case "int":
            return _whole(node.value)
        case "float":
            return float(node.value)
        case _:
            return node.value


def _whole(text: str) -> int:
    mantissa, _, exponent = text.replace("_", "").lower().partition("e")
    return int(mantissa) * 10 ** int(exponent or 0)


def _sentence(error: yaml.MarkedYAMLError) -> str:
    parts = (error.context, error.problem)
    return ", ".join(" ".join(part.split()) for part in parts if part).rstrip(".")


def _character(error: yaml.reader.ReaderError) -> str:
    return f"the character U+{int(error.character):04X}, which is not allowed in text"


_TAG = "tag:yaml.org,2002:"
_STR = _TAG + "str"

_PATTERNS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (
        "int",
        r"[-+]?(0|[1-9][0-9]{,29}|[1-9][0-9]{,2}(_[0-9]{3}){1,9})([eE]\+?[0-9]{1,2})?",
        "-+0123456789",
    ),
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return PyYAML's table: first character of a plain scalar -> (tag, pattern) in order."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, pattern, firsts in _PATTERNS:
        for first in firsts:
            entry = (_TAG + name, re.compile(rf"(?:{pattern})\Z"))
            table.setdefault("" if first == "\0" else first, []).append(entry)
    return table


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, used up to the node tree only."""

    yaml_implicit_resolvers = _resolvers()

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, since one that holds itself would never end, and tags."""
        event = self.peek_event()
        if isinstance(event, AliasEvent):
            problem = f"the alias *{event.anchor} is not allowed"
            raise ComposerError(None, None, problem, event.start_mark)
        if event.tag is not None:
            raise ComposerError(None, None, f"the tag {event.tag} is not allowed", event.start_mark)
        return super().compose_node(parent, index)


# Words that are written in quotes when they are text: ours, and PyYAML's own as well, so that any
# YAML 1.1 reader sees text where text is meant.
_QUOTED = {
    first: [
        *_resolvers().get(first, []),
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
    ]
    for first in {*_resolvers(), *yaml.SafeDumper.yaml_implicit_resolvers}
}


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper with the words of `_Loader`, text with line ends kept on one line."""

    yaml_implicit_resolvers = _QUOTED

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> ScalarNode:
    plain_line = text.isprintable()
    return dumper.represent_scalar(_STR, text, style=None if plain_line else '"')


_Dumper.add_representer(str, _represent_text)
