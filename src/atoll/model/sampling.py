"""Choosing the next token from its scores.

Shapes: B rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import UsageError
from atoll.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class Sampler:
    """How a token is drawn; the default takes the best one.

    A draw depends on the seed, the row's stream and the step alone, so it is the same on every
    device and whatever other rows the batch has, as far as the scores are.

    Attributes:
        temperature: Divisor of the scores; 0 always takes the best.
        top_k: Only this many best tokens are possible; None allows all.
        top_p: Only the best tokens that together reach this probability are; 0 < top_p <= 1.
        seed: Seed of the draws.
        streams: One number a row that names its stream. Default: 0, 1, 2, ...
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    streams: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            UsageError: A value is out of its range.
        """
        faults = []
        if not 0 <= self.temperature < float("inf"):
            faults.append(f"temperature is {self.temperature}; it must be 0 or larger")
        if self.top_k is not None and self.top_k < 1:
            faults.append(f"top_k is {self.top_k}; it must be 1 or larger")
        if not 0 < self.top_p <= 1:
            faults.append(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if faults:
            raise UsageError(
                ". ".join(faults) + ".",
                hint="temperature 0 takes the best token; without top_k and top_p all are possible",
            )

    def choose(self, scores_BV: Tensor, *, step: int) -> Tensor:
        """Return one id a row, int64 [B], for the `step`-th new token, counted from 0."""
        if self.temperature == 0:
            return scores_BV.argmax(-1)
        sorted_BV, ids_BV = torch.sort(scores_BV, dim=-1, descending=True, stable=True)
        kept_BV = self._keep_likely(torch.softmax(sorted_BV / self.temperature, dim=-1))
        cumulative_BV = kept_BV.cumsum(-1)
        draws_B1 = self._draws(len(scores_BV), step).to(scores_BV.device)
        place_B1 = torch.searchsorted(cumulative_BV, draws_B1 * cumulative_BV[:, -1:], right=True)
        last_B1 = (kept_BV > 0).sum(-1, keepdim=True) - 1
        return ids_BV.gather(-1, place_B1.minimum(last_B1)).squeeze(-1)

    def _keep_likely(self, p_BV: Tensor) -> Tensor:
        """Zero what top_k and top_p exclude of probabilities in descending order."""
        if self.top_k is not None and self.top_k < p_BV.shape[-1]:
            p_BV[:, self.top_k :] = 0
            p_BV /= p_BV.sum(-1, keepdim=True)
        if self.top_p < 1:
            before_BV = p_BV.cumsum(-1) - p_BV
            p_BV[before_BV >= self.top_p] = 0
        return p_BV

    def _draws(self, rows: int, step: int) -> Tensor:
        """Return one number of [0, 1) a row, float32 [B, 1]."""
        streams = self.streams or range(rows)
        return torch.tensor(
            [[derive_seed(self.seed, "sample", stream, step) >> 39] for stream in streams],
            dtype=torch.float32,
        ) * (2.0**-24)
