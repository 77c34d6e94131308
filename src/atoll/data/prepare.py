"""Corpus to token cache, in phases that each survive a kill at any instant.

CACHE/work/ holds everything that is not finished; it goes once the manifest is in place. Every
phase ends with one file that appears complete or not at all, and a later attempt passes over the
phases whose file is there:

    copy       hub-<source>.json     hub data sets as JSONL
    plan       plan.jsonl            the files of the corpus, in order
    tokenizer  tokenizer.json        given, or trained on a sample of the corpus
    encode     journal.json          ids and index in source order, journaled on the way
    arrange    arranged.json         duplicates, mixture and shuffle: the order of documents
    assemble   train-00000.json ...  one receipt a shard
    finish     ../manifest.json      last

FAILPOINTS lists the places where a test may kill or fail it.
"""

import contextlib
import shutil
from pathlib import Path

from atoll.config.data import DataConfig
from atoll.config.model import ModelConfig
from atoll.data.cache import MANIFEST_NAME, Cache
from atoll.data.finished import check_finished
from atoll.data.job import WORK, Job, Outside, remove_temporaries
from atoll.data.pace import Pace
from atoll.data.progress import See, ignore
from atoll.data.settings import locate, resolve
from atoll.errors import ConfigError, LockedError
from atoll.faults import reach
from atoll.files import folder_lock

__all__ = ["FAILPOINTS", "Outside", "locate", "prepare"]

_DURABLE_WRITES = (
    "begin",
    "hub.journal",
    "plan",
    "tokenizer",
    "journal",
    "arrange",
    "order",
    "shard",
    "shard.documents",
    "shard.leaves",
    "receipt",
    "tokenizer.final",
    "listing",
    "manifest",
)

FAILPOINTS = (
    *(f"prepare.{place}" for place in ("hub", "tokenizer", "encode", "dedupe", "cleanup")),
    *(
        f"prepare.{write}.{moment}"
        for write in _DURABLE_WRITES
        for moment in ("before_fsync", "before_rename", "after_rename")
    ),
)
"""Every place that `atoll.faults` can be armed for here, in no order."""


def prepare(
    data: DataConfig,
    model: ModelConfig,
    *,
    progress: See | None = None,
    pace: Pace | None = None,
    outside: Outside | None = None,
) -> Cache:
    """Make the cache that the settings name, go on with a begun one, or check a finished one.

    Killed at any instant, the next call goes on and ends with the same bytes, for any number of
    workers. A finished cache is never changed.

    Args:
        data: Section `data` of the recipe.
        model: Section `model`; its vocabulary bounds the tokenizer.
        progress: Called often with how far each phase is.
        pace: Bounds of memory and of what a kill costs.
        outside: The world.

    Raises:
        ConfigError: The tokenizer does not fit the model or lacks a token that is to be added.
        DataError: The corpus is empty, unreadable, damaged, or changed since it was prepared.
        CacheError: A finished cache is damaged.
        LockedError: Another process prepares the same cache.
        StorageError: The disk is full or refuses; finished work is kept.
        UnavailableError: A package that a hub source needs is missing.
    """
    settings = resolve(data, model)
    see = progress or ignore
    folder = settings.folder
    if data.cache_path is not None:
        if not (folder / MANIFEST_NAME).exists():
            raise ConfigError(
                [f"data.cache_path is {folder}, which holds no finished token cache."],
                hint="name a folder with a manifest.json, or leave data.cache_path out to prepare "
                "a cache in data.cache_dir",
            )
        return check_finished(settings, folder, see=see)
    if (folder / MANIFEST_NAME).exists():
        _clean_up(folder)
        return check_finished(settings, folder, see=see)
    with folder_lock(folder / WORK):
        if not (folder / MANIFEST_NAME).exists():
            Job(settings, folder, see, pace or Pace(), outside or Outside()).run()
    _clean_up(folder)
    return Cache(folder)


def _clean_up(folder: Path) -> None:
    """Remove what an attempt left behind once the manifest was in place."""
    reach("prepare.cleanup")
    if (folder / WORK).is_dir():
        with contextlib.suppress(LockedError):  # who still holds it removes it
            with folder_lock(folder / WORK):
                remove_temporaries(folder)
            shutil.rmtree(folder / WORK, ignore_errors=True)
