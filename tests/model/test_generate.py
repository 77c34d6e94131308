"""Generation equals transformers', row by row and in any company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_llama import SMALL, random_tokens, transformers_twin

from atoll.errors import UsageError
from atoll.model.generate import generate, stream
from atoll.model.llama import Llama
from atoll.model.sampling import Sampler

# Weights this wide make a random model decided enough that rounding never changes its choice.
CONFIG = SMALL.model_copy(update={"init_std": 0.2})
LENGTHS = (3, 11, 1, 20)


def prompts_for(config, lengths=LENGTHS, seed=0):
    return [random_tokens(config, length, seed=seed + length).tolist() for length in lengths]


def expected(model, prompts, max_tokens):
    """Return what transformers generates greedily from left-padded prompts."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    twin = transformers_twin(model)
    found = twin.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[:, width:].tolist()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_greedy_tokens_equal_those_of_transformers(kv_heads, tied):
    # 64 tokens end beyond the context of 32: both go on with the angles that follow.
    config = CONFIG.model_copy(update={"kv_heads": kv_heads, "tied_embeddings": tied})
    model = Llama(config, seed=3, trainable=False)
    prompts = prompts_for(config)
    found = generate(model, prompts, max_tokens=64)
    assert [row.ids for row in found] == expected(model, prompts, 64)
    assert {row.ended for row in found} == {"length"}
    assert len({id for row in found for id in row.ids}) > 20


def test_a_batch_of_unequal_prompts_equals_one_by_one():
    model = Llama(CONFIG, seed=4, trainable=False)
    prompts = prompts_for(CONFIG)
    sampler = Sampler(temperature=1.0, top_k=30, top_p=0.9, seed=5)
    for chosen in (Sampler(), sampler):
        together = generate(model, prompts, max_tokens=16, sampler=chosen)
        for row, prompt in enumerate(prompts):
            alone = Sampler(
                chosen.temperature, chosen.top_k, chosen.top_p, chosen.seed, streams=(row,)
            )
            assert generate(model, [prompt], max_tokens=16, sampler=alone) == [together[row]]


def test_the_cache_gives_what_a_whole_forward_gives():
    model = Llama(CONFIG, seed=6, trainable=False)
    (prompt,) = prompts_for(CONFIG, (7,))
    (found,) = generate(model, [prompt], max_tokens=12)
    with torch.no_grad():
        scores = model.logits(torch.tensor([[prompt + found.ids]]))[0, 0]
    assert scores[len(prompt) - 1 : -1].argmax(-1).tolist() == found.ids


def test_a_row_ends_at_its_stop_id_and_the_others_go_on():
    model = Llama(CONFIG, seed=3, trainable=False)
    prompts = prompts_for(CONFIG)
    free = [row.ids for row in generate(model, prompts, max_tokens=16)]
    stop = free[1][4]
    found = generate(model, prompts, max_tokens=16, stop_ids=(stop,))
    for ids, row in zip(free, found, strict=True):
        length = ids.index(stop) + 1 if stop in ids else 16
        assert row.ids == ids[:length]
        assert row.ended == ("stop" if stop in ids else "length")
    assert found[1].ended == "stop"


def test_the_stream_ends_once_every_row_has():
    model = Llama(CONFIG, seed=3, trainable=False)
    prompts = prompts_for(CONFIG)[:2]
    every_id = range(CONFIG.vocab_size)
    steps = list(stream(model, prompts, max_tokens=16, stop_ids=every_id))
    assert len(steps) == 1
    assert None not in steps[0]


def test_a_row_that_has_ended_yields_none():
    model = Llama(CONFIG, seed=3, trainable=False)
    prompts = prompts_for(CONFIG)
    free = [row.ids for row in generate(model, prompts, max_tokens=8)]
    first = free[0][0]
    assert any(first not in ids for ids in free)
    steps = list(stream(model, prompts, max_tokens=8, stop_ids=(first,)))
    assert [step[0] for step in steps] == [first, *[None] * 7]


def test_the_cache_is_allocated_once(monkeypatch):
    model = Llama(CONFIG, trainable=False)
    made = []
    plain = torch.Tensor.new_zeros
    monkeypatch.setattr(
        torch.Tensor, "new_zeros", lambda self, *shape: made.append(shape) or plain(self, *shape)
    )
    generate(model, prompts_for(CONFIG), max_tokens=9)
    assert made == [(4, 2, 28, 8)] * 2 * CONFIG.layers


@pytest.mark.parametrize(
    ("prompts", "options", "named"),
    [
        ([], {}, "no tokens"),
        ([[1], []], {}, "no tokens"),
        ([[131]], {}, "token id 131 is outside the model's vocabulary of 131"),
        ([[-1]], {}, "token id -1"),
        ([[1]], {"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(prompts, options, named):
    model = Llama(CONFIG, trainable=False)
    with pytest.raises(UsageError, match=named):
        generate(model, prompts, **{"max_tokens": 1, **options})


def test_packed_models_do_not_generate():
    with pytest.raises(UsageError, match="2 packed models"):
        generate(Llama(CONFIG, num_models=2, trainable=False), [[1]], max_tokens=1)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_sampling_out_of_range_is_refused(values, named):
    with pytest.raises(UsageError, match=named):
        Sampler(**values)


def test_draws_have_the_probabilities_of_the_scores():
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    draws = 4000
    ids = Sampler(temperature=0.7, seed=1).choose(scores.expand(draws, -1), step=3)
    counts = torch.bincount(ids, minlength=5).double()
    expected = draws * torch.softmax(scores.double() / 0.7, 0)
    # Chi-square with 4 degrees of freedom exceeds 23.5 for 1 of 10,000 seeds; this is one seed.
    assert ((counts - expected) ** 2 / expected).sum() < 23.5


def test_draws_differ_between_steps_rows_and_seeds_and_repeat_otherwise():
    scores = torch.zeros(64, 1000)
    first = Sampler(temperature=1.0, seed=1).choose(scores, step=0)
    assert torch.equal(first, Sampler(temperature=1.0, seed=1).choose(scores, step=0))
    for other in (
        Sampler(temperature=1.0, seed=2).choose(scores, step=0),
        Sampler(temperature=1.0, seed=1).choose(scores, step=1),
    ):
        assert (first == other).sum() < 5
    assert len(first.unique()) > 50


@settings(deadline=None, max_examples=40)
@given(
    vocabulary=st.integers(1, 30),
    top_k=st.none() | st.integers(1, 40),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, 50),
)
def test_only_what_top_k_and_top_p_allow_is_drawn(vocabulary, top_k, top_p, seed):
    scores = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    ids = Sampler(1.0, top_k, top_p, seed).choose(scores.expand(200, -1), step=0)
    order = scores.argsort(descending=True)[: top_k or vocabulary]
    p = torch.softmax(scores[order].double(), 0)
    # The smallest set that reaches top_p, as transformers defines it; one float32 rounding aside.
    allowed = order[(p.cumsum(0) - p) < top_p + 1e-6]
    assert set(ids.tolist()) <= set(allowed.tolist())


def test_top_k_of_one_is_greedy():
    scores = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Sampler(2.0, top_k=1).choose(scores, step=0), scores.argmax(-1))
