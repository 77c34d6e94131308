"""Say in words what a setting may be; errors and the reference page use the same sentence."""

import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from atoll.config.base import Section
from atoll.config.syntax import Node, Place, flow, node_at


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return what a setting accepts, such as `a whole number, at least 1; or null`."""
    words = dict.fromkeys(_alternatives(annotation, metadata))
    return "; or ".join(sorted(words, key=lambda word: word == "null"))


def required_at(root: Node, at: Place, schema: type[Section]) -> str:
    """Return what is accepted at a place of the tree, by that schema."""
    return describe(*_annotation_at(root, at, schema))


def kinds_at(root: Node, at: Place, schema: type[Section]) -> list[str]:
    """Return the values of `kind` that tell apart the mappings accepted at a place."""
    sections = sections_in(_annotation_at(root, at, schema)[0])
    return [k for section in sections for k in get_args(section.model_fields["kind"].annotation)]


def found(value: Any) -> str:
    """Return a value as a recipe would show it, so that the text '3' and the number 3 differ."""
    match value:
        case dict():
            return "a mapping"
        case list():
            return f"the list {flow(value)}"
        case str():
            return f"the text {value!r}"
        case _:
            return flow(value)


def sections_in(annotation: Any) -> tuple[type[Section], ...]:
    """Return the section types that a mapping given for this annotation may be."""
    return tuple(
        kind for kind, _ in _members(annotation, ()) if isinstance(kind, type) and _section(kind)
    )


def item_sections_in(annotation: Any) -> tuple[type[Section], ...]:
    """Return the section types that the items of a list given for this annotation may be."""
    lists = [kind for kind, _ in _members(annotation, ()) if get_origin(kind) is list]
    return tuple(section for kind in lists for section in sections_in(get_args(kind)[0]))


def chosen_section(sections: Sequence[type[Section]], mapping: Node) -> type[Section] | None:
    """Return the one section that a mapping can be, told by its `kind` where there are several."""
    if len(sections) == 1:
        return sections[0]
    kind = mapping.value.get("kind")
    for section in sections if kind else ():
        if kind.value in get_args(section.model_fields["kind"].annotation):
            return section
    return None


def _annotation_at(root: Node, at: Place, schema: type[Section]) -> tuple[Any, Sequence[Any]]:
    annotation: Any = schema
    metadata: Sequence[Any] = ()
    for depth, part in enumerate(at):
        node = node_at(root, at[:depth])
        if isinstance(part, int):
            annotation, metadata = _item_annotation(annotation), ()
            continue
        section = chosen_section(sections_in(annotation), node) if node else None
        assert section is not None, at
        field = section.model_fields[part]
        annotation, metadata = field.annotation, field.metadata
    return annotation, metadata


def _item_annotation(annotation: Any) -> Any:
    return next(
        get_args(kind)[0] for kind, _ in _members(annotation, ()) if get_origin(kind) is list
    )


def _alternatives(annotation: Any, metadata: Sequence[Any]) -> Iterator[str]:
    words: list[str] = []
    for kind, limits in _members(annotation, metadata):
        if get_origin(kind) is Literal:
            words += [flow(choice) for choice in get_args(kind)]
            continue
        yield _kind(kind, limits) + "".join(f", {text}" for text in _limits(kind, limits))
    if words:
        yield words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def _members(annotation: Any, metadata: Sequence[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield each member of a union with the limits that apply to it."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        yield from _members(inner, (*metadata, *_flat(extra)))
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member, metadata)
    else:
        yield annotation, tuple(metadata)


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def _kind(kind: Any, limits: Sequence[Any]) -> str:
    if get_origin(kind) is list:
        item = describe(get_args(kind)[0])
        size = " of at least one item" if any(isinstance(m, MinLen) for m in limits) else ""
        return f"a list{size}, each {item}"
    if isinstance(kind, type) and _section(kind):
        return "a mapping"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return {**names, Path: "a path", types.NoneType: "null"}[kind]


def _limits(kind: Any, limits: Sequence[Any]) -> Iterator[str]:
    if kind not in (int, float):
        return
    for limit in limits:
        match limit:
            case Ge():
                yield f"at least {limit.ge:,}"
            case Gt():
                yield f"above {limit.gt}"
            case Le():
                yield f"at most {limit.le:,}"
            case Lt():
                yield f"below {limit.lt}"


def _section(kind: type) -> bool:
    return issubclass(kind, Section)
