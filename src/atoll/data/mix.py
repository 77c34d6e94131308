"""The order of documents as pure functions: a mixture of sources, then a shuffle buffer.

Mixture. Position n of the mixture belongs to one source, and the first n positions hold
floor(n * share + 1/2) documents of the first source; the positions left over are shared among the
others by the same rule. So every stretch holds each source in its share to within one document per
split, and both directions, position to (source, index) and position to counts, are closed forms.

Shuffle. A buffer holds `size` documents; each step gives a random one away and takes the next one
in its place. The choice at step t depends on the seed and on t alone.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

WEIGHT_STEPS = 1 << 20
"""Given weights are rounded to shares of one in about a million."""

_INT64_BITS = 62


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in proportion to `weights`, each at least 1, about a million in all."""
    total = sum(weights)
    return [max(1, round(weight / total * WEIGHT_STEPS)) for weight in weights]


def counts_before(positions: np.ndarray, weights: Sequence[int]) -> np.ndarray:
    """Return how many documents of each source come before each position.

    Args:
        positions: Positions in the mixture, at least 0.
        weights: Whole weight of each source, at least 1.

    Returns:
        Array of shape [len(positions), len(weights)].
    """
    left = _wide(np.asarray(positions), sum(weights))
    columns = []
    rest = sum(weights)
    for weight in weights[:-1]:
        taken = (left * weight + rest // 2) // rest
        columns.append(taken)
        left = left - taken
        rest -= weight
    return np.stack([*columns, left], axis=1).astype(np.int64)


def locate_documents(
    positions: np.ndarray, weights: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each position, and the document's index among that source's."""
    positions = np.asarray(positions)
    before = counts_before(positions, weights)
    source = np.argmax(counts_before(positions + 1, weights) > before, axis=1)
    return source, np.take_along_axis(before, source[:, None], axis=1)[:, 0]


def mixture_length(available: Sequence[int], weights: Sequence[int]) -> int:
    """Return how many positions are filled before a source has no document for its turn."""
    low, high = 0, sum(available)
    while low < high:
        middle = (low + high + 1) // 2
        needed = counts_before(np.array([middle]), weights)[0]
        if all(need <= have for need, have in zip(needed.tolist(), available, strict=True)):
            low = middle
        else:
            high = middle - 1
    return low


def shuffle(items: Iterable[np.ndarray], *, size: int, seed: int) -> Iterator[np.ndarray]:
    """Give all items once, through a buffer of `size`, in pieces as long as those that come.

    Args:
        items: One-dimensional pieces of 64-bit integers.
        size: Items in the buffer; 1 keeps the order.
        seed: Seed of the choices.
    """
    buffer: list[int] = []
    step = 0
    for piece in items:
        incoming = piece.tolist()
        room = size - len(buffer)
        buffer.extend(incoming[:room])
        incoming = incoming[room:]
        slots = _choices(seed, step, np.full(len(incoming), size, np.uint64)).tolist()
        step += len(incoming)
        for place, slot in enumerate(slots):
            incoming[place], buffer[slot] = buffer[slot], incoming[place]
        yield np.array(incoming, np.int64)
    # The rest leaves in random order: each step takes one and closes the gap with the last.
    sizes = np.arange(len(buffer), 0, -1, dtype=np.uint64)
    for place, slot in enumerate(_choices(seed, step, sizes).tolist()):
        last = len(buffer) - 1 - place
        buffer[slot], buffer[last] = buffer[last], buffer[slot]
    yield np.array(buffer[::-1], np.int64)


def _choices(seed: int, first_step: int, sizes: np.ndarray) -> np.ndarray:
    """Return for each step from `first_step` on a number below its size, by SplitMix64.

    Multiplying the upper 32 bits by the size and keeping what is above 32 bits favours no number
    by more than size / 2^32.
    """
    steps = np.arange(first_step + 1, first_step + 1 + len(sizes), dtype=np.uint64)
    with np.errstate(over="ignore"):
        word = np.uint64(seed) + steps * np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
        return ((word >> np.uint64(32)) * sizes) >> np.uint64(32)


def _wide(positions: np.ndarray, total_weight: int) -> np.ndarray:
    """Return integers wide enough that a position times a weight does not overflow."""
    largest = int(positions.max(initial=0)) + 1
    fits = (largest * total_weight + total_weight).bit_length() <= _INT64_BITS
    return positions.astype(np.int64 if fits else object)
