"""Names that no setting has, and what their writer probably meant."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from atoll.config.base import Section
from atoll.config.describe import chosen_section, item_sections_in, sections_in
from atoll.config.syntax import Node, Place, dotted


def without_unknown(node: Node, root: type[Section], faults: list[str]) -> Node:
    """Return the tree without the keys that no section has; each adds a line to `faults`."""
    return _Walk(root, faults).mapping(node, root, ())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean X?` for the nearest known name, or nothing."""
    near = get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]}?" if near else ""


class _Walk:
    def __init__(self, root: type[Section], faults: list[str]) -> None:
        self._root = root
        self._faults = faults

    def mapping(self, node: Node, section: type[Section], place: Place) -> Node:
        known: dict[str, Node] = {}
        for key, child in node.value.items():
            if field := section.model_fields.get(key):
                known[key] = self._value(child, field.annotation, (*place, key))
            else:
                name = dotted((*place, key))
                hint = _suggestion(key, section, place, self._root)
                self._faults.append(f"{child.origin}: there is no setting {name}. {hint}")
        return Node(known, node.origin)

    def _value(self, node: Node, annotation: Any, place: Place) -> Node:
        if isinstance(node.value, dict):
            section = chosen_section(sections_in(annotation), node)
            return self.mapping(node, section, place) if section else node
        if isinstance(node.value, list):
            sections = item_sections_in(annotation)
            items = [self._item(n, sections, (*place, i)) for i, n in enumerate(node.value)]
            return Node(items, node.origin)
        return node

    def _item(self, node: Node, sections: tuple[type[Section], ...], place: Place) -> Node:
        section = chosen_section(sections, node) if isinstance(node.value, dict) else None
        return self.mapping(node, section, place) if section else node


def _suggestion(key: str, section: type[Section], place: Place, root: type[Section]) -> str:
    """Name the same key in another section, else the nearest here, else the nearest anywhere."""
    here = {dotted((*place, name)): name for name in section.model_fields}
    everywhere = dict(_all_names(root, ()))
    owners = [full for full, name in everywhere.items() if name == key]
    if owners:
        return f"Did you mean {' or '.join(owners)}?"
    for names in (here, everywhere):
        near = get_close_matches(key, list(names.values()), n=1)
        if near:
            return f"Did you mean {' or '.join(f for f, name in names.items() if name == near[0])}?"
    return f"Settings here: {', '.join(section.model_fields)}."


def _all_names(section: type[Section], place: Place) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, last part) of every setting outside lists."""
    for name, field in section.model_fields.items():
        yield dotted((*place, name)), name
        for inner in sections_in(field.annotation):
            yield from _all_names(inner, (*place, name))
