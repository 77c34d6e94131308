"""Layered recipes: files, then `--set`, then the schema; every fault is reported at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.config.check import check
from atoll.config.names import did_you_mean
from atoll.config.recipes import SUFFIXES, find_recipe, shipped_recipes
from atoll.config.schema import RunConfig
from atoll.config.syntax import Node, parse
from atoll.errors import ConfigError

DEFAULT = "default"
"""Origin of a value that nobody wrote."""

PATH_SHORTHANDS = {("data", "source"), ("data", "validation_source"), ("data", "tokenizer")}
"""Settings whose text is short for a mapping with that `path`, which options are added to."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid recipe and where each of its values comes from.

    Attributes:
        config: The recipe.
        origins: Dotted name of every setting -> `file:line`, `--set N` (from 1) or `default`.
    """

    config: RunConfig
    origins: Mapping[str, str]


def load_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, layer and check a recipe.

    Later files override earlier ones; mappings merge, lists and everything else are replaced; an
    override is one more layer. Relative paths in a recipe stay relative to the working folder.

    Args:
        files: Recipe files, or names of shipped recipes.
        overrides: Texts `dotted.key=value`, the value as in YAML.

    Raises:
        ConfigError: Anything is wrong; `faults` holds one line for each thing, with its place.
    """
    faults: list[str] = []
    root = Node({}, DEFAULT)
    for name in files:
        root = _merged(root, _sections(_read_file(find_recipe(name), faults)))
    for number, text in enumerate(overrides, start=1):
        root = _merged(root, _sections(_read_override(text, f"--set {number}", faults)))
    config = check(root, faults)
    if config is None:
        raise ConfigError(
            list(dict.fromkeys(faults)),
            hint="`atoll config show` lists every setting with its default, and with --origins "
            "where each value comes from",
        )
    return LoadedConfig(config, _origins(config.model_dump(), root))


def _read_file(path: Path, faults: list[str]) -> Node | None:
    text = _text(path, faults)
    if text is None:
        return None
    found_before = len(faults)
    root = parse(text, lambda line: f"{path}:{line}", faults)
    if root is None:
        if len(faults) == found_before:
            faults.append(f"{path}: the file is empty; a recipe holds at least one section.")
        return None
    if not isinstance(root.value, dict):
        faults.append(f"{root.origin}: a recipe is a mapping of sections, such as `model:`.")
        return None
    return root


def _text(path: Path, faults: list[str]) -> str | None:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        known = shipped_recipes()
        bare = path.suffix not in SUFFIXES and path.name == str(path)
        guess = did_you_mean(path.stem, known)
        names = f"Shipped recipes: {', '.join(known)}." if bare or guess else ""
        faults.append(" ".join(filter(None, [f"{path}: there is no such file.", guess, names])))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        faults.append(f"{path}:{line}: not UTF-8 text (byte {error.object[error.start]:#04x}).")
    except IsADirectoryError:
        faults.append(f"{path}: this is a folder; a recipe is a YAML file.")
    except OSError as error:
        faults.append(f"{path}: cannot be read: {error.strerror or error}.")
    return None


def _read_override(text: str, origin: str, faults: list[str]) -> Node | None:
    key, separator, value_text = text.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        faults.append(f"{origin}: {text!r} is not of the form section.name=value.")
        return None
    found_before = len(faults)
    node = parse(value_text, lambda _: origin, faults) or Node(None, origin)
    if len(faults) > found_before:
        return None
    for part in reversed(parts):
        node = Node({part: node}, origin)
    return node


def _sections(layer: Node | None) -> Node | None:
    """Read a section with nothing under it, as when all its lines are comments, as empty."""
    if layer is None:
        return None
    children = layer.value.items()
    filled = {key: Node({}, n.origin) if n.value is None else n for key, n in children}
    return Node(filled, layer.origin)


def _merged(base: Node, over: Node | None, place: tuple[str, ...] = ()) -> Node:
    """Return `over` laid upon `base`: mappings key by key, everything else replaced."""
    if over is None:
        return base
    if not isinstance(over.value, dict):
        return over
    if isinstance(base.value, str) and place in PATH_SHORTHANDS:
        base = Node({"path": base}, base.origin)
    if not isinstance(base.value, dict):
        return over
    result = dict(base.value)
    for key, child in over.value.items():
        result[key] = _merged(result[key], child, (*place, key)) if key in result else child
    return Node(result, over.origin)


def _origins(dumped: Mapping[str, Any], node: Node | None, prefix: str = "") -> dict[str, str]:
    result: dict[str, str] = {}
    written = node.value if node is not None and isinstance(node.value, dict) else {}
    for key, value in dumped.items():
        name, child = prefix + key, written.get(key)
        if isinstance(value, dict):
            result |= _origins(value, child, name + ".")
        else:
            result[name] = child.origin if child is not None else DEFAULT
    return result
