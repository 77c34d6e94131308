"""A finished cache against the recipe that names it: quick checks before it is used again."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from atoll.config.data import HUB
from atoll.data.cache import Cache, SourceFile
from atoll.data.encode import default_workers
from atoll.data.plan import list_corpus, refuse_changes
from atoll.data.progress import Progress, See
from atoll.data.settings import Settings, check_vocabulary
from atoll.data.sources import PlannedFile
from atoll.data.tokenizer import Tokenizer
from atoll.data.tokenizer_files import open_tokenizer
from atoll.data.verify import wrong_sizes
from atoll.errors import CacheError, DataError
from atoll.files import sha256_file

_NUM_NAMED = 5

_SAMPLED_TOKENS = 1 << 16


def check_finished(settings: Settings, folder: Path, *, see: See) -> Cache:
    """Open a finished cache if it is what the recipe asks for; change nothing.

    File sizes, the manifest, the tokenizer's probes and the source files are compared; the shards
    are not read (`verify_cache` reads them, and so does the loader). A folder given as
    `data.cache_path` is taken as it is: its recipe and its corpus are not asked for.

    Raises:
        CacheError: The cache is damaged, or of other settings.
        DataError: The corpus or the tokenizer changed since it was prepared; names the files.
        ConfigError: Its tokenizer has ids that the model has no row for.
    """
    cache = Cache(folder)
    damages = wrong_sizes(folder, cache.sizes())
    if damages:
        raise CacheError(
            f"{folder}: " + "; ".join(map(str, damages[:_NUM_NAMED])) + ".",
            hint="restore the files from a copy, or remove the folder and prepare again",
        )
    tokenizer = Tokenizer.from_cache(cache)
    check_vocabulary(
        tokenizer.vocab_size,
        model_vocab_size=settings.model_vocab_size,
        where=f"the tokenizer of {folder}",
    )
    if settings.data.cache_path is None:
        _check_settings(settings, cache)
        _check_tokenizer_file(settings, cache)
        _check_sources(settings, cache, see)
    return cache


def check_written(cache: Cache) -> None:
    """Read the borders of the first documents of each split back, as a reader would.

    Raises:
        CacheError: A border lacks the beginning or end id, or ids are out of range.
    """
    facts = cache.manifest.tokenizer
    for name, split in cache.manifest.splits.items():
        if not split.shards:
            continue
        shard = split.shards[0]
        tokens = np.fromfile(cache.folder / shard.file, cache.dtype, count=_SAMPLED_TOKENS)
        starts = cache.documents(shard)["start"]
        starts = starts[starts < len(tokens)].astype(np.int64)
        is_good = len(starts) and starts[0] == 0 and tokens.max() < facts.vocab_size
        if facts.add_bos:
            is_good = is_good and (tokens[starts] == facts.bos_id).all()
        if facts.add_eos:
            is_good = is_good and (tokens[starts[1:] - 1] == facts.eos_id).all()
        if not is_good:
            raise CacheError(
                f"{cache.folder}: the {name} split does not read back as it was written.",
                hint="please report this, with the manifest; remove the folder to prepare again",
            )


def _check_settings(settings: Settings, cache: Cache) -> None:
    old, new = cache.manifest.settings, settings.facts
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if names:
        text = "; ".join(f"{name} is {new.get(name)!r}, there {old.get(name)!r}" for name in names)
        raise CacheError(
            f"{cache.folder} was prepared with other settings: {text}.",
            hint="set data.cache_path to use it as it is, or move it out of data.cache_dir",
        )


def _remedy(cache: Cache) -> str:
    return (
        f"set data.cache_path={cache.folder} to go on with the cache as it is, or remove that "
        "folder (or set another data.cache_dir) to prepare the corpus as it is now"
    )


def _check_tokenizer_file(settings: Settings, cache: Cache) -> None:
    config = settings.tokenizer
    if config.path is None or config.path.startswith(HUB):
        return
    given = open_tokenizer(config)
    if given.sha256 != cache.manifest.tokenizer.sha256:
        raise DataError(
            f"the tokenizer {config.path} changed since {cache.folder} was prepared.",
            hint=_remedy(cache),
        )


def _check_sources(settings: Settings, cache: Cache, see: See) -> None:
    """Compare names and sizes of all source files, then their content."""
    hub = {i for i, s in enumerate(settings.all_sources) if s.path.startswith(HUB)}
    since = f"{cache.folder} was prepared"
    refuse_changes(
        ((file.path, file.bytes) for file in cache.source_files() if file.source not in hub),
        ((file.path, file.bytes) for file in list_corpus(settings, leave_out=hub)),
        since=since,
        hint=_remedy(cache),
    )
    pairs = zip(
        (file for file in cache.source_files() if file.source not in hub),
        list_corpus(settings, leave_out=hub),
        strict=True,
    )
    total = sum(source.bytes for i, source in enumerate(cache.manifest.sources) if i not in hub)
    changed, done = [], 0
    for path, size, is_same in _compare(pairs):
        done += size
        see(Progress("compare", done, total))
        if not is_same:
            changed.append(path)
    if changed:
        names = ", ".join(changed[:_NUM_NAMED])
        more = f" and {len(changed) - _NUM_NAMED} more" if len(changed) > _NUM_NAMED else ""
        raise DataError(
            f"the corpus changed since {since}: other content in {names}{more}.",
            hint=_remedy(cache),
        )


def _compare(
    pairs: Iterable[tuple[SourceFile, PlannedFile]],
) -> Iterator[tuple[str, int, bool]]:
    """Give path, size and whether the content is the same; files are hashed in threads."""
    workers = default_workers()
    waiting: deque[tuple[SourceFile, Future[str]]] = deque()
    with ThreadPoolExecutor(workers, "hash") as pool:
        for old, now in pairs:
            waiting.append((old, pool.submit(_hash, now.location)))
            if len(waiting) > 4 * workers:
                first, digest = waiting.popleft()
                yield first.path, first.bytes, digest.result() == first.sha256
        for first, digest in waiting:
            yield first.path, first.bytes, digest.result() == first.sha256


def _hash(path: Path) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from error
