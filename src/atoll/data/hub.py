"""Hugging Face data sets, copied into the work folder as JSONL before anything else reads them."""

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from atoll.config.data import HUB, SourceConfig
from atoll.data.pace import Pace
from atoll.errors import DataError, UnavailableError
from atoll.faults import reach
from atoll.files import storage_error, write_json


@dataclass(frozen=True, slots=True)
class HubRows:
    """An opened data set: the commit that its revision names, and its rows from some row on."""

    commit: str
    rows: Iterator[Mapping[str, Any]]


OpenHub = Callable[[SourceConfig, int], HubRows]
"""(source, rows to pass over) -> its rows from there on, in the order of the data set."""


class HubCopy(BaseModel):
    """How far a copy is durable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    commit: str
    rows: int = 0
    bytes: int = 0
    is_complete: bool = False


def copy_hub_source(
    source: SourceConfig,
    index: int,
    work: Path,
    *,
    open_hub: OpenHub,
    pace: Pace,
    see: Callable[[int], None] = lambda rows: None,
) -> tuple[Path, HubCopy]:
    """Copy the text of a data set to WORK/hub-<index>.jsonl, going on where a kill ended it.

    Args:
        source: The source.
        index: Its place among all sources.
        work: Folder of the copy.
        open_hub: Opens the data set.
        pace: Says how often the copy is made durable.
        see: Called with the rows copied so far.

    Raises:
        UnavailableError: The package that reads data sets is not installed.
        DataError: The data set cannot be read, or its revision moved since the copy began.
        StorageError: The file system refuses.
    """
    path, journal = work / f"hub-{index}.jsonl", work / f"hub-{index}.json"
    done = HubCopy.model_validate_json(journal.read_bytes()) if journal.exists() else None
    if done and done.is_complete:
        return path, done
    opened = open_hub(source, done.rows if done else 0)
    done = done or HubCopy(commit=opened.commit)
    copied = done.rows
    if done.commit != opened.commit:
        raise DataError(
            f"{source.path} at {source.revision} was commit {done.commit} when this preparation "
            f"began and is {opened.commit} now.",
            hint=f"set its revision to a commit, or remove {work} to begin anew",
        )
    try:
        with open(path, "r+b" if path.exists() else "w+b") as file:
            file.truncate(done.bytes)
            file.seek(done.bytes)
            for row in opened.rows:
                file.write(_to_line(row, source.text_field))
                copied += 1
                if copied % pace.copied_rows == 0:
                    _make_durable(file, journal, HubCopy(commit=opened.commit, rows=copied))
                    see(copied)
                    reach("prepare.hub")
            done = HubCopy(commit=opened.commit, rows=copied, is_complete=True)
            _make_durable(file, journal, done)
    except OSError as error:
        raise storage_error(error, path) from error
    return path, done


def open_data_set(source: SourceConfig, skip_rows: int) -> HubRows:
    """Open a data set of the hub as a stream.

    Raises:
        UnavailableError: `datasets` is not installed.
        DataError: The hub does not answer, or knows no such data set, revision, subset or split.
    """
    try:
        datasets = importlib.import_module("datasets")  # an extra: type checkers may not find it
        from huggingface_hub import HfApi
    except ImportError as error:
        raise UnavailableError(
            f"{source.path} needs the package datasets, which is not installed.",
            hint="pip install 'atoll[hub]'",
        ) from error
    name = source.path.removeprefix(HUB)
    try:
        commit = HfApi().dataset_info(name, revision=source.revision).sha or ""
        rows = datasets.load_dataset(
            name, source.subset, split=source.split, revision=commit, streaming=True
        )
        return HubRows(commit, _guarded(rows.skip(skip_rows), source))
    except (OSError, ValueError) as error:  # the hub's errors are all one or the other
        raise _hub_error(source, error) from error


def _guarded(rows: Any, source: SourceConfig) -> Iterator[Mapping[str, Any]]:
    try:
        yield from rows
    except (OSError, ValueError) as error:
        raise _hub_error(source, error) from error


def _hub_error(source: SourceConfig, error: Exception) -> DataError:
    return DataError(
        f"cannot read {source.path} (revision {source.revision}, subset {source.subset}, split "
        f"{source.split}): {error}",
        hint="check its name and options, the network and HF_TOKEN; run the same command again "
        "to go on where the copy ended",
    )


def _to_line(row: Mapping[str, Any], text_field: str) -> bytes:
    value = row.get(text_field)
    if value is not None and not isinstance(value, str):
        value = [type(value).__name__]  # the ledger counts it as no string
    facts = {text_field: value} if text_field in row else dict.fromkeys(row)
    return json.dumps(facts).encode("ascii") + b"\n"


def _make_durable(file: IO[bytes], journal: Path, done: HubCopy) -> None:
    file.flush()
    os.fsync(file.fileno())
    facts = done.model_copy(update={"bytes": file.tell()})
    write_json(journal, facts.model_dump(), fault="prepare.hub.journal")
