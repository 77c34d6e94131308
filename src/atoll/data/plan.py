"""The plan: which files are read, in which order. It is made first and never changes after."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from atoll.data.settings import Settings
from atoll.data.sources import PlannedFile, list_files
from atoll.errors import DataError
from atoll.files import atomic_file

_NUM_NAMED = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """The files to read.

    Attributes:
        path: The list on disk, one file a line.
        files: How many there are.
        bytes: Their size in all.
    """

    path: Path
    files: int
    bytes: int

    def __iter__(self) -> Iterator[PlannedFile]:
        """Give the files in reading order, one at a time."""
        yield from _read_plan(self.path)


def make_plan(settings: Settings, path: Path, *, hub_copies: Mapping[int, Path]) -> Plan:
    """List the files of every source; an earlier list must say the same.

    Raises:
        DataError: A source has no file, or the corpus is not what it was when this began.
    """
    if path.exists():
        refuse_changes(
            ((file.path, file.bytes) for file in _read_plan(path)),
            ((file.path, file.bytes) for file in list_corpus(settings, hub_copies=hub_copies)),
            since="this preparation began",
            hint=f"restore the files, or remove {path.parent} to begin anew",
        )
    num_files = num_bytes = 0
    with atomic_file(path, fault="prepare.plan") as lines:
        for file in list_corpus(settings, hub_copies=hub_copies):
            lines.write(_to_line(file))
            num_files += 1
            num_bytes += file.bytes
    return Plan(path, num_files, num_bytes)


def refuse_changes(
    old: Iterator[tuple[str, int]], new: Iterator[tuple[str, int]], *, since: str, hint: str
) -> None:
    """Compare two listings of (path, bytes).

    Raises:
        DataError: They differ; names the first files that do.
    """
    differences: list[str] = []
    for before, after in zip_longest(old, new):
        if before == after:
            continue
        differences.append(_difference(before, after))
        if (
            len(differences) > _NUM_NAMED
            or before is None
            or after is None
            or before[0] != after[0]
        ):
            break  # from here on the lists are out of step
    if differences:
        shown = "; ".join(differences[:_NUM_NAMED])
        raise DataError(f"the corpus changed since {since}: {shown}.", hint=hint)


def _difference(before: tuple[str, int] | None, after: tuple[str, int] | None) -> str:
    if before and after and before[0] == after[0]:
        return f"{before[0]} had {before[1]:,} bytes and has {after[1]:,}"
    if after is None or (before is not None and before[0] < after[0]):
        assert before is not None
        return f"{before[0]} is gone"
    return f"{after[0]} is new"


def list_corpus(
    settings: Settings,
    *,
    hub_copies: Mapping[int, Path] | None = None,
    leave_out: Collection[int] = (),
) -> Iterator[PlannedFile]:
    """Give the files of every source in reading order.

    Args:
        settings: Names the sources.
        hub_copies: The local copy of each hub data set, by the index of its source.
        leave_out: Indexes of sources that are passed over.

    Raises:
        DataError: A source has no file.
    """
    hub_copies = hub_copies or {}
    for index, source in enumerate(settings.all_sources):
        if index in leave_out:
            continue
        num_files = 0
        for file in list_files(source, index, hub_copy=hub_copies.get(index)):
            num_files += 1
            yield file
        if not num_files:
            raise DataError(
                f"{source.path} holds no file to read.",
                hint=f"check the path; globs start at {Path.cwd()} and pass over hidden files",
            )


def _to_line(file: PlannedFile) -> bytes:
    # ASCII escapes also carry file names that are not UTF-8.
    facts = [
        file.source,
        file.path,
        str(file.location),
        file.bytes,
        file.format,
        file.compression,
    ]
    return json.dumps(facts).encode("ascii") + b"\n"


def _read_plan(path: Path) -> Iterator[PlannedFile]:
    with open(path, "rb") as lines:
        for line in lines:
            source, name, location, size, format, compression = json.loads(line)
            yield PlannedFile(source, name, Path(location), size, format, compression)
