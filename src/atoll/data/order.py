"""Which tokens a row covers and when it is read: integers in, integers out, no state.

A split of S tokens holds sequences j = 0, 1, ...: sequence j covers tokens [jT, jT + T], T inputs
and the next-token target of the last one, so neighbours share one token. Group g holds the
sequences whose first token lies in its `group_shards` shards. A pass reads groups in file order
and the sequences of each in an order of its own, keyed by (seed, pass, group); the cursor counts
sequences read so far, over all passes.

    cursor -> pass, group, index in the group -> sequence -> tokens
"""

from dataclasses import dataclass

import numpy as np

from atoll.data.cache import CacheManifest, SplitName
from atoll.errors import DataError, UsageError
from atoll.seeds import derive_seed

ORDER_VERSION = 1
"""Part of a loader's identity; changes with any change to the order of rows."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cursor lies: the `index`-th row read from `group` during pass `pass_index`."""

    pass_index: int
    group: int
    index: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """How one split is cut into sequences and shard groups.

    Attributes:
        tokens: Tokens of the split.
        shard_tokens: Tokens of every shard but the last.
        context_length: T, targets of one sequence.
        group_shards: Consecutive shards that are shuffled together.
        pads_last: Whether a last partial sequence is a row of its own (validation) or dropped.
    """

    tokens: int
    shard_tokens: int
    context_length: int
    group_shards: int
    pads_last: bool

    @property
    def targets(self) -> int:
        """Targets of one pass; every token but the first can be one."""
        available = max(self.tokens - 1, 0)
        return available if self.pads_last else available - available % self.context_length

    @property
    def sequences(self) -> int:
        """Rows of one pass."""
        return -(-self.targets // self.context_length)

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the end of the split that no row covers."""
        return self.tokens - self.targets - 1 if self.targets else self.tokens

    @property
    def group_tokens(self) -> int:
        """Tokens of the shards of one group."""
        return self.group_shards * self.shard_tokens

    @property
    def last_group(self) -> int:
        """The group of the last sequence."""
        return self.group_of(self.sequences - 1)

    @property
    def max_rows(self) -> int:
        """At most so many rows have their first token in one group."""
        return min(-(-self.group_tokens // self.context_length), self.sequences)

    def group_of(self, sequence: int) -> int:
        """Return the group whose shards hold the sequence's first token."""
        return sequence * self.context_length // self.group_tokens

    def first_sequence(self, group: int) -> int:
        """Return the first sequence that starts in `group` or after it; never beyond the last."""
        first = -(-group * self.group_tokens // self.context_length)
        return min(first, self.sequences)

    def rows_in(self, group: int) -> int:
        """Return how many sequences start in `group`; none where a sequence is longer than it."""
        return self.first_sequence(group + 1) - self.first_sequence(group)

    def read_range(self, group: int) -> tuple[int, int]:
        """Return the tokens [start, stop) that are read for `group`.

        They begin with its first shard and end with the target of its last sequence, which may lie
        in a later shard. The last group is read to the end of the split. So every shard that any
        row touches is read whole once a pass, and that is when its digest can be checked.
        """
        start = group * self.group_tokens
        if group >= self.last_group:
            return start, self.tokens
        return start, self.first_sequence(group + 1) * self.context_length + 1

    def place(self, cursor: int) -> Place:
        """Return the pass, group and index in the group of the row at `cursor`."""
        pass_index, sequence = divmod(cursor, self.sequences)
        group = self.group_of(sequence)
        return Place(pass_index, group, sequence - self.first_sequence(group))

    def cursor_of(self, pass_index: int, group: int) -> int:
        """Return the cursor of the first row read from `group` in that pass."""
        return pass_index * self.sequences + self.first_sequence(group)

    def targets_before(self, cursor: int) -> int:
        """Return how many targets the rows [0, cursor) hold, over all passes."""
        pass_index, row = divmod(cursor, self.sequences)
        return pass_index * self.targets + min(row * self.context_length, self.targets)


def split_geometry(
    manifest: CacheManifest, split: SplitName, *, context_length: int, group_shards: int
) -> Geometry:
    """Return how `split` of a cache is cut; at least one row exists.

    Args:
        manifest: The cache's manifest.
        split: "train" (whole sequences) or "validation" (the last one is padded).
        context_length: Targets of one sequence; 1 <= context_length.
        group_shards: Shards shuffled together; 1 <= group_shards.

    Raises:
        DataError: The split is missing, or too short for one row.
    """
    for name, value in (("context_length", context_length), ("group_shards", group_shards)):
        if value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1.")
    if split not in manifest.splits:
        raise DataError(
            f"the cache has no {split!r} split; it has {', '.join(sorted(manifest.splits))}.",
            hint="set data.validation_fraction or data.validation_source, then prepare again",
        )
    geometry = Geometry(
        tokens=manifest.splits[split].tokens,
        shard_tokens=manifest.shard_tokens,
        context_length=context_length,
        group_shards=group_shards,
        pads_last=split == "validation",
    )
    if not geometry.sequences:
        least = 2 if geometry.pads_last else context_length + 1
        raise DataError(
            f"the {split} split holds {geometry.tokens} tokens; one sequence of "
            f"{context_length} targets needs at least {least}.",
            hint="prepare more text, raise data.validation_fraction, or lower model.context_length",
        )
    return geometry


def validation_rows(manifest: CacheManifest, *, context_length: int) -> int:
    """Return the rows of the whole validation split, a padded last one included."""
    split = split_geometry(manifest, "validation", context_length=context_length, group_shards=1)
    return split.sequences


def group_order(seed: int, pass_index: int, group: int, rows: int, *, shuffled: bool) -> np.ndarray:
    """Return the order in which the rows of a group are read: a permutation, int64 [rows].

    The stable argsort of raw Philox words. Only the raw words of a bit generator are promised to
    stay the same between numpy versions, distributions and `permutation` are not.

    Args:
        seed: `data.shuffle_seed`.
        pass_index: Pass, from 0.
        group: Group, from 0.
        rows: Rows of that group.
        shuffled: Whether to permute at all; validation keeps the order of the file.
    """
    if not shuffled:
        return np.arange(rows, dtype=np.int64)
    key = derive_seed(seed, "shuffle", pass_index, group)
    words = np.random.Philox(key=key).random_raw(rows)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)
