"""The files of a source, in one fixed order: depth first, names of a folder by code point.

Files are found one folder at a time, so that a corpus of millions of files needs no list in memory.
Hidden files and folders are left out, and folders that are links are not entered.
"""

import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

from atoll.config.data import HUB, SourceConfig
from atoll.errors import DataError

Format = Literal["text", "jsonl", "parquet"]
Compression = Literal["gz", "zst"]

_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_GLOB_CHARACTERS = re.compile(r"[*?\[]")

# Python's own tests are left out: some distributions do not ship them, and they hold broken files
# on purpose.
_STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to be read.

    Attributes:
        source: Index of its source.
        path: Its name in messages and in the cache, relative to the source, with `/`.
        location: Where it is.
        bytes: Its size when it was found.
        format: How its content is cut into records.
        compression: How its content is packed, if it is.
    """

    source: int
    path: str
    location: Path
    bytes: int
    format: Format
    compression: Compression | None


def list_files(
    source: SourceConfig, index: int, *, hub_copy: Path | None = None
) -> Iterator[PlannedFile]:
    """Give the files of one source in order.

    Args:
        source: The source.
        index: Its place among all sources.
        hub_copy: The local copy of a hub data set.

    Raises:
        DataError: A folder or file cannot be read, or nothing is there under that name.
    """
    for root, relative in _locations(source, hub_copy):
        location = root / relative
        name = readable(relative)
        try:
            size = location.stat().st_size
        except OSError as error:
            raise DataError(f"cannot read {location}: {error.strerror}.") from error
        format, compression = format_of(name, source.format)
        yield PlannedFile(index, name, location, size, format, compression)


def format_of(name: str, given: str) -> tuple[Format, Compression | None]:
    """Return format and compression of a file by its name; a given format goes before it."""
    path = PurePosixPath(name.lower())
    compression = _COMPRESSIONS.get(path.suffix)
    if compression:
        path = path.with_suffix("")
    if given == "auto":
        return _FORMATS.get(path.suffix, "text"), compression
    return given, compression  # type: ignore[return-value]  # the config allows no other


def readable(path: str) -> str:
    """Return a path as UTF-8 text; bytes of a file name that are none are escaped."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _locations(source: SourceConfig, hub_copy: Path | None) -> Iterator[tuple[Path, str]]:
    """Give (root, path relative to it, with `/`) of each file."""
    if source.path.startswith(HUB):
        assert hub_copy is not None
        yield hub_copy.parent, hub_copy.name
    elif source.path == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        for relative in walk(root, enter=_is_library):
            if relative.endswith(".py"):
                yield root, relative
    elif source.path == "site-packages":
        for root in sorted({Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")}):
            for relative in walk(root):
                if relative.endswith(".py"):
                    yield root, relative
    else:
        yield from _paths(source.path)


def _is_library(folder: str) -> bool:
    return folder.rpartition("/")[2] not in _STDLIB_LEFT_OUT


def _paths(text: str) -> Iterator[tuple[Path, str]]:
    path = Path(text).expanduser()
    if path.is_file():
        yield path.parent, path.name
    elif path.is_dir():
        for relative in walk(path):
            yield path, relative
    elif _GLOB_CHARACTERS.search(text):
        yield from _walk_glob(path)
    else:
        raise DataError(
            f"{text} does not exist.",
            hint="data.source is relative to the folder that atoll is started in; this one is "
            f"{Path.cwd()}",
        )


def walk(root: Path, *, enter: Callable[[str], bool] = lambda folder: True) -> Iterator[str]:
    """Give the relative paths of all files below `root`, with `/`, in the fixed order.

    Args:
        root: The folder.
        enter: Says by its relative path whether a folder below is entered.
    """
    yield from _walk(root, "", enter)


def _walk(folder: Path, prefix: str, enter: Callable[[str], bool]) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(
                (entry.name, entry.is_dir(follow_symlinks=False), entry.is_file())
                for entry in entries
                if not entry.name.startswith(".")
            )
    except OSError as error:
        raise DataError(f"cannot list {folder}: {error.strerror}.") from error
    for name, is_folder, is_file in found:
        if is_folder and enter(prefix + name):
            yield from _walk(folder / name, f"{prefix}{name}/", enter)
        elif is_file:
            yield prefix + name


def _walk_glob(path: Path) -> Iterator[tuple[Path, str]]:
    parts = path.parts
    first = next(i for i, part in enumerate(parts) if _GLOB_CHARACTERS.search(part))
    root, patterns = Path(*parts[:first]), parts[first:]
    if root.is_dir():
        for relative in walk(root, enter=lambda folder: _may_hold(folder.split("/"), patterns)):
            if matches_glob(relative.split("/"), patterns):
                yield root, relative


def matches_glob(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Say whether path parts match patterns; `**` stands for any number of parts, also none."""
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(matches_glob(parts[i:], patterns[1:]) for i in range(len(parts) + 1))
    return (
        bool(parts) and fnmatchcase(parts[0], patterns[0]) and matches_glob(parts[1:], patterns[1:])
    )


def _may_hold(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """Say whether something below a folder can match."""
    for part, pattern in zip(parts, patterns, strict=False):
        if pattern == "**":
            return True
        if not fnmatchcase(part, pattern):
            return False
    return len(parts) < len(patterns)
