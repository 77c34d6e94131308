"""One attempt at preparing a cache: phases in order, each passing over what is there already."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.config.data import HUB
from atoll.data.arrange import arrange
from atoll.data.assemble import assemble
from atoll.data.blocks import TRAIN, Document, read_blocks
from atoll.data.cache import Cache, LedgerEntry, dtype_for_vocabulary, token_dtype
from atoll.data.encode import Encoder, default_workers, encode_blocks
from atoll.data.finished import check_written
from atoll.data.hub import OpenHub, copy_hub_source, open_data_set
from atoll.data.manifest import write_manifest
from atoll.data.pace import Pace
from atoll.data.plan import Plan, make_plan
from atoll.data.progress import Progress, See
from atoll.data.settings import Settings, check_vocabulary
from atoll.data.space import RESERVE_BYTES, FreeBytes, free_bytes, require_bytes, require_space
from atoll.data.staging import Staging
from atoll.data.tokenizer import Tokenizer, library_version
from atoll.data.tokenizer_files import FetchFile, fetch_from_hub, open_tokenizer
from atoll.data.tokenizer_training import open_trained, sample_texts, train_tokenizer
from atoll.errors import DataError
from atoll.faults import reach
from atoll.files import read_json, write_bytes, write_json

logger = logging.getLogger(__name__)

WORK = "work"


@dataclass(frozen=True, slots=True)
class Outside:
    """What `prepare` asks of the world, for tests and other tools to replace.

    Attributes:
        open_hub: Opens a data set of the hub.
        fetch: Fetches a file of a hub tokenizer.
        free: Says how many bytes a disk has left.
    """

    open_hub: OpenHub = open_data_set
    fetch: FetchFile = fetch_from_hub
    free: FreeBytes = free_bytes


class Job:
    """One attempt at one cache; who makes it holds the lock of its work folder."""

    def __init__(
        self, settings: Settings, folder: Path, see: See, pace: Pace, outside: Outside
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._work = folder / WORK
        self._see = see
        self._pace = pace
        self._outside = outside

    def run(self) -> None:
        """Go through the phases and end with a manifest."""
        config = self._settings.tokenizer
        given = open_tokenizer(config, fetch=self._outside.fetch) if config.path else None
        self._begin()
        commits, plan = self._plan()
        tokenizer = self._tokenizer(given, plan)
        dtype_name = dtype_for_vocabulary(tokenizer.vocab_size)
        dtype = token_dtype(dtype_name)
        ledger = self._encode(plan, tokenizer, dtype)
        self._see(Progress("arrange", 0, None))
        arranged = arrange(self._settings, self._work, pace=self._pace)
        splits = assemble(
            self._folder,
            self._work,
            arranged,
            dtype=dtype,
            settings=self._settings,
            before_shard=self._before_shard,
        )
        write_manifest(
            self._settings,
            self._folder,
            self._work,
            tokenizer=tokenizer,
            dtype=dtype_name,
            commits=commits,
            arranged=arranged,
            splits=splits,
            ledger=ledger,
        )
        check_written(Cache(self._folder))

    def _begin(self) -> None:
        """Bind the work to what decides its bytes; work of another kind is thrown away."""
        path = self._work / "begun.json"
        binding = {**self._settings.facts, "tokenizers": library_version()}
        if path.exists() and read_json(path) != binding:
            logger.warning("%s: begun with another version of tokenizers; beginning anew", path)
            path.unlink()
        for folder in (self._folder, self._work):
            remove_temporaries(folder)
        if not path.exists():
            for old in [*self._folder.iterdir(), *self._work.iterdir()]:
                if old != self._work and old.name != ".lock":
                    old.unlink()
            write_json(path, binding, fault="prepare.begin")

    def _plan(self) -> tuple[dict[int, str], Plan]:
        """Copy hub data sets, then list all files; return the commits of the former too."""
        copies: dict[int, Path] = {}
        commits: dict[int, str] = {}
        for index, source in enumerate(self._settings.all_sources):
            if source.path.startswith(HUB):
                copies[index], copied = copy_hub_source(
                    source,
                    index,
                    self._work,
                    open_hub=self._outside.open_hub,
                    pace=self._pace,
                    see=lambda rows: self._see(Progress("copy", rows, None)),
                )
                commits[index] = copied.commit
        plan = make_plan(self._settings, self._work / "plan.jsonl", hub_copies=copies)
        return commits, plan

    def _tokenizer(self, given: Tokenizer | None, plan: Plan) -> Tokenizer:
        """Return the tokenizer, given or trained, and keep a copy of it for the next attempt."""
        path = self._work / "tokenizer.json"
        kept = path.read_bytes() if path.exists() else None
        if given is not None and kept is not None and given.content != kept:
            raise DataError(
                f"the tokenizer {self._settings.tokenizer.path} changed since this preparation "
                "began.",
                hint=f"restore it, or remove {self._work} to begin anew",
            )
        tokenizer = given or (self._train(plan) if kept is None else open_trained(kept))
        check_vocabulary(
            tokenizer.vocab_size,
            model_vocab_size=self._settings.model_vocab_size,
            where=f"the tokenizer {self._settings.tokenizer.path or 'trained here'}",
        )
        if kept is None:
            reach("prepare.tokenizer")
            write_bytes(path, tokenizer.content, fault="prepare.tokenizer")
        return tokenizer

    def _train(self, plan: Plan) -> Tokenizer:
        config = self._settings.tokenizer
        assert config.vocab_size is not None  # `resolve` sets it where no path is given
        texts = sample_texts(self._training_documents(plan), max_bytes=config.train_bytes)
        self._see(Progress("train", 0, None))
        return train_tokenizer(texts, vocab_size=config.vocab_size)

    def _training_documents(self, plan: Plan) -> Iterator[Document]:
        for block in read_blocks(plan, self._settings, pace=self._pace):
            self._see(Progress("tokenizer", block.read_bytes, plan.bytes))
            yield from (document for document in block.documents if document.split == TRAIN)

    def _encode(
        self, plan: Plan, tokenizer: Tokenizer, dtype: np.dtype[Any]
    ) -> dict[str, LedgerEntry]:
        """Encode what is not encoded yet; return what was found in all records."""
        config = self._settings.tokenizer
        encoder = Encoder(
            tokenizer,
            add_bos=config.add_bos,
            add_eos=config.add_eos,
            dtype=dtype,
            piece_bytes=self._pace.block_bytes,
        )
        with contextlib.closing(Staging(self._work, dtype=dtype)) as staging:
            begin = staging.journal
            if begin.is_complete:
                return begin.ledger
            require_space(plan, self._folder, done_bytes=begin.read_bytes, free=self._outside.free)
            blocks = read_blocks(plan, self._settings, start=begin.mark, pace=self._pace)
            workers = self._settings.data.prepare_workers or default_workers()
            for encoded in encode_blocks(blocks, encoder, workers=workers):
                staging.append(encoded)
                self._see(Progress("encode", encoded.block.read_bytes, plan.bytes))
                if staging.undurable_text_bytes >= self._pace.journal_bytes:
                    self._require(self._pace.journal_bytes, "the next part of the text")
                    staging.commit()
            staging.commit(is_complete=True)
            return staging.journal.ledger

    def _before_shard(self, done_tokens: int, total_tokens: int, itemsize: int) -> None:
        self._see(Progress("assemble", done_tokens, total_tokens))
        tokens = min(self._settings.data.shard_tokens, total_tokens - done_tokens)
        self._require(tokens * itemsize, "the next shard")

    def _require(self, num_bytes: int, what: str) -> None:
        require_bytes(num_bytes + RESERVE_BYTES, self._folder, free=self._outside.free, what=what)


def remove_temporaries(folder: Path) -> None:
    """Remove the files that a kill left under a temporary name."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)
