"""Batched generation with a key/value cache that is allocated once.

Prompts of different lengths share a batch: they are padded on the right, every row keeps its own
length, and a position is seen only once its token is real. A row's result therefore does not depend
on the rows beside it, but for rounding.

Shapes: B rows, S positions of the cache, T tokens of one forward, H query heads, K key/value heads,
G = H / K, C channels of one head, V vocabulary, L layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from atoll.errors import UsageError
from atoll.model.attention import attention
from atoll.model.block import embed, linear, norm
from atoll.model.llama import Llama
from atoll.model.sampling import Sampler


@dataclass(frozen=True, slots=True)
class Generated:
    """What one prompt was continued with.

    Attributes:
        ids: The new tokens; ends with the stop id if one was reached.
        ended: "stop" after a stop id, "length" after `max_tokens`.
    """

    ids: list[int]
    ended: Literal["stop", "length"]


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_ids: Sequence[int] = (),
    sampler: Sampler | None = None,
) -> list[Generated]:
    """Continue every prompt by at most `max_tokens` tokens.

    Args:
        model: One model (N = 1).
        prompts: Token ids, at least one each; lengths may differ.
        max_tokens: New tokens of each row, at least 1.
        stop_ids: A row ends after one of these.
        sampler: How a token is chosen from the scores. Default: always the best one.

    Raises:
        UsageError: A prompt is empty or has an id outside the vocabulary, or N is not 1.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for ids in stream(model, prompts, max_tokens=max_tokens, stop_ids=stop_ids, sampler=sampler):
        for row, id in zip(rows, ids, strict=True):
            if id is not None:
                row.append(id)
    return [Generated(ids, "stop" if ids[-1] in stop_ids else "length") for ids in rows]


def stream(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop_ids: Sequence[int] = (),
    sampler: Sampler | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next token of every row, None for rows that have ended; see `generate`."""
    _check(model, prompts, max_tokens)
    return _stream(model, prompts, max_tokens, frozenset(stop_ids), sampler or Sampler())


@torch.no_grad()
def _stream(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    stop_ids: frozenset[int],
    sampler: Sampler,
) -> Iterator[list[int | None]]:
    lengths = [len(prompt) for prompt in prompts]
    decoder = _Decoder(model, capacity=max(lengths) + max_tokens - 1)
    scores_BV = decoder.start(_pad(prompts, model.arena.data_NP.device), lengths)
    active = [True] * len(prompts)
    for step in range(max_tokens):
        ids_B = sampler.choose(scores_BV, step=step)
        chosen: list[int] = ids_B.tolist()  # the caller waits for these, so the device must too
        yield [id if running else None for id, running in zip(chosen, active, strict=True)]
        active = [
            running and id not in stop_ids for id, running in zip(chosen, active, strict=True)
        ]
        if step + 1 == max_tokens or not any(active):
            return
        scores_BV = decoder.advance(ids_B)


class _Decoder:
    """One batch in progress: the cache, and how many of its positions are real in each row."""

    def __init__(self, model: Llama, *, capacity: int) -> None:
        self._model = model
        self._cos_SR, self._sin_SR = model.angles(None, capacity)
        self._capacity = capacity
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._lengths_B = torch.empty(0, dtype=torch.int64)
        self._longest = 0
        self._is_even = True

    def start(self, prompts_BT: Tensor, lengths: Sequence[int]) -> Tensor:
        """Run the padded prompts and return the scores after each row's last token."""
        self._lengths_B = torch.tensor(lengths, device=prompts_BT.device)
        self._longest, self._is_even = max(lengths), min(lengths) == max(lengths)
        rows, tokens = prompts_BT.shape
        cos, sin = self._cos_SR[:tokens], self._sin_SR[:tokens]
        x = embed(prompts_BT.reshape(1, -1), self._model.embedding)
        for layer in self._model.blocks:
            q, k, v = layer.heads(x, tokens, cos, sin)
            self._keys.append(self._room_for(k))
            self._values.append(self._room_for(v))
            x = layer.finish(x, attention(q, k, v))
        last_B = torch.arange(rows, device=x.device) * tokens + self._lengths_B - 1
        return self._scores(x[last_B])

    def advance(self, ids_B: Tensor) -> Tensor:
        """Append one token to every row and return the scores after it."""
        positions_B = self._lengths_B
        self._longest += 1
        mask_B11S = None
        if not self._is_even:
            seen_S = torch.arange(self._longest, device=ids_B.device)
            mask_B11S = (seen_S <= positions_B[:, None])[:, None, None, :]
        cos, sin = self._cos_SR[positions_B, None], self._sin_SR[positions_B, None]
        x = embed(ids_B.unsqueeze(0), self._model.embedding)
        for layer, keys, values in zip(self._model.blocks, self._keys, self._values, strict=True):
            q, k, v = layer.heads(x, 1, cos, sin)
            self._put(keys, k, positions_B)
            self._put(values, v, positions_B)
            seen = slice(0, self._longest)
            x = layer.finish(x, _attend_one(q, keys[:, :, seen], values[:, :, seen], mask_B11S))
        self._lengths_B = positions_B + 1
        return self._scores(x)

    def _scores(self, x_BD: Tensor) -> Tensor:
        x_BD = norm(x_BD, self._model.norm, self._model.config.norm_eps)
        return linear(x_BD, self._model.output_weight).float()

    def _room_for(self, prompt_BKTC: Tensor) -> Tensor:
        rows, heads, tokens, channels = prompt_BKTC.shape
        room = prompt_BKTC.new_zeros(rows, heads, self._capacity, channels)
        room[:, :, :tokens] = prompt_BKTC
        return room

    def _put(self, cache_BKSC: Tensor, new_BK1C: Tensor, positions_B: Tensor) -> None:
        if self._is_even:
            cache_BKSC[:, :, self._longest - 1] = new_BK1C[:, :, 0]
        else:
            rows_B = torch.arange(len(positions_B), device=positions_B.device)
            cache_BKSC[rows_B, :, positions_B] = new_BK1C[:, :, 0]


def _attend_one(q_BH1C: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask_B11S: Tensor | None) -> Tensor:
    """Attend from one token a row; the G queries that share a key head become its T axis."""
    rows, heads, _, channels = q_BH1C.shape
    key_heads = k_BKSC.shape[1]
    q_BKGC = q_BH1C.view(rows, key_heads, heads // key_heads, channels)
    out_BKGC = functional.scaled_dot_product_attention(q_BKGC, k_BKSC, v_BKSC, attn_mask=mask_B11S)
    return out_BKGC.reshape(rows, heads, 1, channels)


def _pad(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(map(len, prompts))
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    return torch.tensor(padded, device=device)


def _check(model: Llama, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    if model.arena.num_models != 1:
        raise UsageError(
            f"{model.arena.num_models} packed models cannot generate at once; choose one of them."
        )
    if max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}; at least 1 is required.")
    if not prompts or not all(prompts):
        raise UsageError(
            "a prompt has no tokens.",
            hint="give at least one character, or the id that begins a text",
        )
    vocabulary = model.config.vocab_size
    largest, smallest = max(map(max, prompts)), min(map(min, prompts))
    if largest >= vocabulary or smallest < 0:
        wrong = largest if largest >= vocabulary else smallest
        raise UsageError(
            f"token id {wrong} is outside the model's vocabulary of {vocabulary}.",
            hint="use the tokenizer that belongs to the model",
        )
