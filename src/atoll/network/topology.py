"""Who mixes with whom in which update: pure schedules of mixing matrices.

Shapes: N local models. Row i of a matrix holds the share of every model in the mixed model i; rows
and columns sum to 1, so that mixing keeps the mean.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.config.strategy import Topology

WEIGHT_BYTES = 4
"""Weights travel as float32."""

Pair = tuple[int, int, float]
"""Two models that swap weights, and the share that each takes of the other's."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank doing an exchange would send, as a mean over the models.

    Attributes:
        payload_bytes: Tensor data handed to the network.
        wire_bytes: Bytes that the algorithm must put on the wire for it.
        exchanges: Collective or pairwise operations.
    """

    payload_bytes: int
    wire_bytes: int
    exchanges: int


@dataclass(frozen=True, slots=True)
class MixingSchedule:
    """Mixing matrices that repeat, counted from update 1.

    Attributes:
        matrices: One period of float64 matrices [N, N].
        reduces: Whether an exchange is an all-reduce; otherwise models send to one peer.
    """

    matrices: tuple[NDArray[np.float64], ...]
    reduces: bool

    @property
    def period(self) -> int:
        """Updates after which the matrices repeat."""
        return len(self.matrices)

    def matrix(self, step: int) -> NDArray[np.float64]:
        """Return the mixing matrix of an update, counted from 1."""
        return self.matrices[(step - 1) % self.period]

    def peers(self, step: int) -> tuple[tuple[int, ...], ...]:
        """Return for each model, in order, the other models whose weights it takes."""
        return tuple(
            tuple(int(j) for j in np.flatnonzero(row) if j != i)
            for i, row in enumerate(self.matrix(step))
        )

    def sent(self, step: int, *, num_parameters: int) -> Sent:
        """Return what ranks doing the exchange of `step` would send."""
        num_bytes, peers = num_parameters * WEIGHT_BYTES, self.peers(step)
        if self.reduces:
            return all_reduce_sent(num_bytes, members=len(peers))
        busy = sum(map(bool, peers))
        share = round(num_bytes * busy / len(peers))
        return Sent(share, share, int(busy > 0))


def mixing_schedule(topology: Topology, num_models: int) -> MixingSchedule:
    """Return the schedule of `strategy.topology` for N >= 1 models.

    `complete` averages all models. Of the others each model has at most one peer in an update:
    `one_peer_ring` takes half of the next model's weights in odd updates and of the previous one's
    in even ones; `one_peer_exponential` half of those of the model 1, 2, 4, ... below N places on,
    which is the exact average after log2(N) updates where N is a power of two; `one_peer_base2` is
    the exact average at the end of its period for any N.

    Source: Ying et al., Exponential Graph is Provably Efficient for Decentralized Deep Learning,
    section 4 (one-peer exponential).
    """
    assert num_models >= 1, num_models
    match topology:
        case "complete":
            average = np.full((num_models, num_models), 1 / num_models)
            return MixingSchedule((average,), reduces=True)
        case "one_peer_ring":
            matrices = [_shifted(num_models, offset) for offset in (1, -1)]
        case "one_peer_exponential":
            offsets = [1 << k for k in range((num_models - 1).bit_length())]
            matrices = [_shifted(num_models, offset) for offset in offsets or [0]]
        case "one_peer_base2":
            rounds = _base2_rounds(num_models)
            matrices = [_paired(num_models, pairs) for pairs in rounds or [[]]]
    return MixingSchedule(tuple(matrices), reduces=False)


def all_reduce_sent(num_bytes: int, *, members: int) -> Sent:
    """Return what each of `members` sends in a ring all-reduce of `num_bytes`."""
    return Sent(num_bytes, round(2 * (members - 1) * num_bytes / members), 1)


def _shifted(num_models: int, offset: int) -> NDArray[np.float64]:
    """Half of oneself and half of the model `offset` places on, around the circle."""
    eye = np.eye(num_models)
    return (eye + np.roll(eye, offset, axis=1)) / 2


def _paired(num_models: int, pairs: Sequence[Pair]) -> NDArray[np.float64]:
    """Mix within pairs; a model in no pair keeps its weights."""
    matrix = np.eye(num_models)
    for a, b, share in pairs:
        matrix[a, a] = matrix[b, b] = 1 - share
        matrix[a, b] = matrix[b, a] = share
    return matrix


def _base2_rounds(num_models: int) -> list[list[Pair]]:
    """Return rounds of pairs after which all models hold their common mean.

    The models are cut into parts of sizes that are powers of two, the largest first. Every part
    averages itself. Then, one part after another, each model behind the part swaps with one of it,
    taking the share that lifts what is behind to the common mean; the part has then that mean too,
    on average, and ends by averaging itself once more. With p = floor(log2 N) that takes p rounds
    where N is a power of two, and 2 p + 1 otherwise.

    Source: Takezawa et al., Beyond Exponential Graph: Communication-Efficient Topologies for
    Decentralized Learning via Finite-time Convergence, section 4.2 (simple Base-2 graph).
    """
    sizes = [1 << bit for bit in reversed(range(num_models.bit_length())) if num_models >> bit & 1]
    head = sizes[0].bit_length() - 1
    rounds: list[list[Pair]] = [[] for _ in range(head if len(sizes) == 1 else 2 * head + 1)]
    start = 0
    for number, size in enumerate(sizes):
        part, rest = range(start, start + size), range(start + size, num_models)
        if rest:
            share = size / (num_models - start)
            rounds[head + number] += [(a, b, share) for a, b in zip(part, rest, strict=False)]
        met = head + min(number, len(sizes) - 2) + 1  # the last part meets those before it only
        for begin in [0] if len(sizes) == 1 else [0, met]:
            for offset, pairs in enumerate(_hypercube_rounds(part)):
                rounds[begin + offset] += pairs
        start += size
    return rounds


def _hypercube_rounds(models: Sequence[int]) -> Iterator[list[Pair]]:
    """Average a power of two of models exactly: pairs 1, 2, 4, ... places apart."""
    for bit in range(len(models).bit_length() - 1):
        yield [
            (models[i], models[i | 1 << bit], 0.5) for i in range(len(models)) if not i >> bit & 1
        ]
