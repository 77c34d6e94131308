"""From a tree of values to a valid recipe, or to every reason why it is none."""

import json
from collections.abc import Sequence, Set
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from atoll.config.base import BrokenRule
from atoll.config.describe import found, kinds_at, required_at
from atoll.config.names import without_unknown
from atoll.config.schema import RunConfig
from atoll.config.syntax import Node, Place, dotted, node_at, plain


def check(root: Node, faults: list[str]) -> RunConfig | None:
    """Return the recipe that the tree describes, or None where `faults` holds any line at the end.

    A faulty value is reported, then its default stands in for it, so that the rules between
    settings are checked as well; a rule that reads a value already reported stays silent.

    Args:
        root: A mapping of sections.
        faults: Holds what was wrong with the files; receives a line for each further fault.
    """
    # A file that could not be read may hold the other half of a rule that looks broken.
    rules_are_known = not faults
    root = without_unknown(root, RunConfig, faults)
    pending = _Pending(root, faults, rules_are_known=rules_are_known)
    while True:
        try:
            config = RunConfig.model_validate_json(json.dumps(pending.values), strict=True)
        except ValidationError as error:
            pending.report(error.errors(include_url=False))
        else:
            return None if faults else config


class _Pending:
    """The values that are left to check, and what was found wrong with the others."""

    def __init__(self, root: Node, faults: list[str], *, rules_are_known: bool) -> None:
        self.values = plain(root)
        self._root = root
        self._faults = faults
        self._blamed: set[str] = set()
        self._rules_are_known = rules_are_known

    def report(self, errors: Sequence[ErrorDetails]) -> None:
        """Add a line for each error and take the values that it blames out of `values`."""
        located = [(error, _path_in(self.values, error)) for error in errors]
        blamed_before = frozenset(self._blamed)
        removed = False
        for error, at in located:
            broken: Sequence[BrokenRule] | None = error.get("ctx", {}).get("broken")
            if broken is None:
                if not any(_holds(at, other) for _, other in located):
                    self._blame([at], self._blamed, _value_fault(error, at, self._root))
                # What lacks a key goes as a whole.
                removed |= _remove(self.values, at[:-1] if error["type"] == "missing" else at)
            for rule in broken or ():
                keys = [(*at, *key.split(".")) for key in rule.keys]
                self._blame(keys, blamed_before, _rule_fault(rule, keys, self._root))
                for key in keys:
                    removed |= _remove(self.values, key)
        assert removed, f"the schema's own defaults break its rules: {errors}"

    def _blame(self, keys: Sequence[Place], silencing: Set[str], fault: str) -> None:
        """Report the fault unless one of its keys is among those that silence it."""
        names = {dotted(key) for key in keys}
        if names.isdisjoint(silencing) and (len(keys) == 1 or self._rules_are_known):
            self._faults.append(fault)
        self._blamed |= names


def _holds(outer: Place, inner: Place) -> bool:
    """Say whether `inner` lies inside `outer`: then its error is the more exact one."""
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _path_in(values: Any, error: ErrorDetails) -> Place:
    """Return the error's place without the tags that pydantic puts in for members of a union."""
    place: list[str | int] = []
    for part in error["loc"]:
        match values, part:
            case dict(), str() if part in values:
                values = values[part]
            case list(), int():
                values = values[part]
            case _:
                continue
        place.append(part)
    return (*place, error["loc"][-1]) if error["type"] == "missing" else tuple(place)


def _remove(values: Any, at: Place) -> bool:
    """Take a value out so that its default stands in, if it is there; a list goes with its item."""
    while isinstance(at[-1], int):
        at = at[:-1]
    for part in at[:-1]:
        if isinstance(values, dict) and part not in values:
            return False
        values = values[part]
    return values.pop(at[-1], _ABSENT) is not _ABSENT


_ABSENT = object()


def _value_fault(error: ErrorDetails, at: Place, root: Node) -> str:
    name, node = dotted(at), node_at(root, at)
    if node is None:
        place = node_at(root, at[:-1])
        assert place is not None, error
        return f"{place.origin}: {name} is missing; it must be {required_at(root, at, RunConfig)}."
    match error["type"]:
        case "union_tag_invalid" | "union_tag_not_found":
            kinds = ", ".join(kinds_at(root, at, RunConfig))
            return f"{node.origin}: {name}.kind must be one of {kinds}."
        case "value_error":
            reason = str(error.get("ctx", {})["error"])
        case _:
            reason = f"it must be {required_at(root, at, RunConfig)}"
    return f"{node.origin}: {name} is {found(plain(node))}; {reason}."


def _rule_fault(rule: BrokenRule, keys: Sequence[Place], root: Node) -> str:
    nodes = [node_at(root, key) for key in keys]
    places = dict.fromkeys(node.origin for node in nodes if node is not None)
    return f"{', '.join(places)}: {rule.message}"
