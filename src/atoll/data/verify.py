"""Whether a finished cache still holds what its manifest says, and where it does not."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.data.cache import LEAF_BYTES, MANIFEST_NAME, Cache, Shard
from atoll.data.progress import Progress, See, ignore
from atoll.data.shards import hash_file
from atoll.errors import CacheError
from atoll.files import MIB, sha256_bytes, sha256_file


@dataclass(frozen=True, slots=True)
class Damage:
    """One place where a cache is not what its manifest says.

    Attributes:
        file: The file's name.
        mib: The damaged MiB, counted from 0, or None where the file as a whole is wrong.
        found: What is wrong there.
    """

    file: str
    mib: int | None
    found: str

    def __str__(self) -> str:
        place = self.file if self.mib is None else f"{self.file}, MiB {self.mib}"
        return f"{place}: {self.found}"


def verify_cache(folder: Path, *, see: See = ignore) -> list[Damage]:
    """Read every file of a cache and return each damaged place; none means that all is well.

    Args:
        folder: The cache's folder.
        see: Called with how far it is after each file.

    Raises:
        CacheError: There is no finished cache, or it is of another format version.
    """
    if not (folder / MANIFEST_NAME).exists():
        Cache(folder)  # says so
    try:
        cache = Cache(folder)
    except CacheError as error:
        return [Damage(MANIFEST_NAME, None, error.message)]
    damages: list[Damage] = []
    check = _Checker(cache, see)
    for facts in (cache.manifest.tokenizer.file, cache.manifest.listing):
        damages += check.file(facts.file, facts.sha256, [bytes.fromhex(h) for h in facts.leaves])
    for shard in cache.shards:
        damages += check.shard(shard)
    return damages


def wrong_sizes(folder: Path, sizes: Mapping[str, int]) -> list[Damage]:
    """Compare the sizes of files with those they should have, without reading them."""
    damages = []
    for file, size in sizes.items():
        try:
            found = (folder / file).stat().st_size
        except OSError as error:
            damages.append(Damage(file, None, f"cannot be read: {error.strerror}"))
            continue
        if found != size:
            text = f"holds {found:,} bytes instead of {size:,}"
            damages.append(Damage(file, min(found, size) // MIB, text))
    return damages


class _Checker:
    """Compares files with their digests; the leaves are asked only where a digest differs."""

    def __init__(self, cache: Cache, see: See) -> None:
        self._folder = cache.folder
        self._sizes = cache.sizes()
        self._total = sum(self._sizes.values())
        self._see = see
        self._done = 0

    def file(self, file: str, sha256: str, leaves: list[bytes] | None) -> list[Damage]:
        """Check one file; `leaves` are the digests of its MiB, where they are known."""
        size = self._sizes[file]
        damages = wrong_sizes(self._folder, {file: size})
        if damages and damages[0].mib is None:
            return damages
        self._done += size
        self._see(Progress("verify", self._done, self._total))
        path = self._folder / file
        try:
            if not damages and sha256_file(path) == sha256:
                return []
            if leaves is None:
                return damages or [Damage(file, None, _DIFFERS)]
            found = hash_file(path).leaves
        except OSError as error:
            return [Damage(file, None, f"cannot be read: {error.strerror}")]
        for mib, (want, have) in enumerate(zip(leaves, found, strict=False)):
            if want != have:
                damages.append(Damage(file, mib, _DIFFERS))
        return damages

    def shard(self, shard: Shard) -> list[Damage]:
        """Check the three files of one shard."""
        path = self._folder / shard.leaves_file
        content = path.read_bytes() if path.is_file() else b""
        leaves = [content[i : i + LEAF_BYTES] for i in range(0, len(content), LEAF_BYTES)]
        is_good = sha256_bytes(content) == shard.leaves_sha256
        cut = -(-self._sizes[shard.file] // MIB)
        damages = self.file(shard.file, shard.sha256, leaves[:cut] if is_good else None)
        damages += self.file(
            shard.documents_file, shard.documents_sha256, leaves[cut:] if is_good else None
        )
        if not is_good:
            damages += self._leaves(shard, leaves)
        return damages

    def _leaves(self, shard: Shard, leaves: list[bytes]) -> list[Damage]:
        """Find the damaged entries of a .leaves file by hashing what they are about."""
        file = shard.leaves_file
        damages = wrong_sizes(self._folder, {file: self._sizes[file]})
        if damages:
            return damages
        about = (self._folder / shard.file, self._folder / shard.documents_file)
        found = [leaf for path in about if path.is_file() for leaf in hash_file(path).leaves]
        wrong = [i for i, (a, b) in enumerate(zip(leaves, found, strict=False)) if a != b]
        return [Damage(file, place, _DIFFERS) for place in {i * LEAF_BYTES // MIB for i in wrong}]


_DIFFERS = "its bytes do not match the digest"
