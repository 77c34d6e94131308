"""Walking over packed models gives what they give at once, and what single models give."""

import pytest
import torch
from naive_llama import SMALL, add_noise, random_tokens

from atoll.model import walk
from atoll.model.cost import activation_bytes
from atoll.model.llama import Llama
from atoll.model.walk import Walk
from atoll.tensors import IGNORE

MODELS, ROWS, TOKENS = 3, 2, 20


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def models_at_once(monkeypatch):
    """Let parts hold so many models of these tests' rows."""

    def allow(count):
        model_bytes = ROWS * TOKENS * activation_bytes(SMALL, narrow=False)
        monkeypatch.setattr(walk, "PART_BYTES", count * model_bytes)

    return allow


def packed(config=SMALL, num_models=MODELS):
    model = Llama(config, num_models=num_models)
    add_noise(model)
    return model


def columns(*, weights=False, positions=False, documents=False):
    tokens_NBU = random_tokens(SMALL, MODELS, ROWS, TOKENS + 1)
    targets_NBT = tokens_NBU[..., 1:].clone()
    targets_NBT[1, 0, 3:] = IGNORE
    shape = (MODELS, ROWS, TOKENS)
    generator = torch.Generator().manual_seed(3)
    return [
        tokens_NBU[..., :-1],
        targets_NBT,
        torch.rand(shape, generator=generator) if weights else None,
        torch.randint(0, 90, shape, generator=generator) if positions else None,
        torch.randint(0, 2, shape, generator=generator).cumsum(-1) if documents else None,
    ]


def at_once(model, columns, divisor_N):
    """Naive twin of `Walk.gradients`: all models in one forward and backward."""
    sums_N, _ = model(*columns)
    (sums_N / divisor_N).sum().backward()
    return sums_N.detach()


def one_after_another(model, columns, divisor_N):
    """Return the loss sums and gradients of N models that know nothing of each other."""
    sums, gradients = [], []
    for index in range(model.arena.num_models):
        single = Llama(model.config)
        single.arena.data_NP.copy_(model.arena.data_NP[index : index + 1])
        own = [None if c is None else c[index : index + 1] for c in columns]
        sums.append(at_once(single, own, divisor_N[index : index + 1]))
        gradients.append(single.arena.grad_NP)
    return torch.cat(sums), torch.cat(gradients)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "given",
    [{}, {"weights": True}, {"documents": True}, {"positions": True, "documents": True}],
    ids=lambda given: "+".join(given) or "plain",
)
def test_one_model_at_a_time_equals_single_models_in_every_bit(models_at_once, tied, given):
    models_at_once(1)
    model = packed(SMALL.model_copy(update={"tied_embeddings": tied}))
    divisor_N = torch.tensor([7.0, 3.0, 40.0])
    sums_N, gradients_NP = one_after_another(model, columns(**given), divisor_N)
    assert torch.equal(Walk(model).gradients(columns(**given), divisor_N=divisor_N), sums_N)
    assert torch.equal(model.arena.grad_NP, gradients_NP)


@pytest.mark.parametrize("count", [2, 3, 50])
def test_parts_of_several_models_equal_single_models(models_at_once, count):
    models_at_once(count)
    model = packed()
    divisor_N = torch.tensor([7.0, 3.0, 40.0])
    sums_N, gradients_NP = one_after_another(model, columns(weights=True), divisor_N)
    found_N = Walk(model).gradients(columns(weights=True), divisor_N=divisor_N)
    # A batched product may sum in another order than a plain one: float32 rounding (6e-8) of sums
    # of at most 131 terms, through two layers.
    torch.testing.assert_close(found_N, sums_N, rtol=1e-6, atol=0)
    for index in range(MODELS):
        error = (model.arena.grad_NP[index] - gradients_NP[index]).abs().max()
        assert error <= 1e-6 * gradients_NP[index].abs().max(), index


def test_all_models_in_one_part_equal_the_forward_in_every_bit(models_at_once):
    models_at_once(MODELS)
    model, twin = packed(), packed()
    divisor_N = torch.tensor([7.0, 3.0, 40.0])
    found_N = Walk(model).gradients(columns(), divisor_N=divisor_N)
    assert torch.equal(found_N, at_once(twin, columns(), divisor_N))
    assert torch.equal(model.arena.grad_NP, twin.arena.grad_NP)


def test_gradients_add_to_those_that_are_there(models_at_once):
    models_at_once(1)
    model, twin = packed(), packed()
    walked, divisor_N = Walk(model), torch.ones(MODELS)
    for _ in range(2):
        walked.gradients(columns(), divisor_N=divisor_N)
    at_once(twin, columns(), divisor_N)
    # Twice the same numbers: float32 doubles exactly, so only the batched products differ.
    largest = twin.arena.grad_NP.abs().max()
    assert (model.arena.grad_NP - 2 * twin.arena.grad_NP).abs().max() <= 2e-6 * largest


def test_a_walk_sees_weights_that_an_optimizer_changed(models_at_once):
    models_at_once(1)
    model, divisor_N = packed(), torch.ones(MODELS)
    walked = Walk(model)
    before_N = walked.gradients(columns(), divisor_N=divisor_N)
    with torch.no_grad():
        model.arena.data_NP.mul_(1.5)
    model.zero_grad()
    after_N = walked.gradients(columns(), divisor_N=divisor_N)
    sums_N, gradients_NP = one_after_another(model, columns(), divisor_N)
    assert not torch.equal(before_N, after_N)
    assert torch.equal(after_N, sums_N)
    assert torch.equal(model.arena.grad_NP, gradients_NP)


def test_bfloat16_products_of_a_walk_equal_those_at_once(models_at_once):
    models_at_once(1)
    model, twin = packed(), packed()
    divisor_N = torch.ones(MODELS)
    found_N = Walk(model, amp=torch.bfloat16).gradients(columns(), divisor_N=divisor_N)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums_N, _ = twin(*columns())
    sums_N.sum().backward()
    # Products rounded to 8 bits (2^-9 relative), summed in another order by another kernel.
    torch.testing.assert_close(found_N, sums_N.detach(), rtol=2**-9, atol=0)
    error = (model.arena.grad_NP - twin.arena.grad_NP).norm()
    assert error <= 2**-6 * twin.arena.grad_NP.norm()


def test_activations_of_one_part_exist_at_a_time(models_at_once, monkeypatch):
    """A second part begins its forward only after the first part's backward."""
    models_at_once(2)
    events = []
    forward = Llama.forward

    def watched(part, *given):
        sum_N, weight_N = forward(part, *given)
        events.append(("forward", len(sum_N)))
        sum_N.register_hook(lambda grad: events.append(("backward", len(grad))))
        return sum_N, weight_N

    monkeypatch.setattr(Llama, "forward", watched)
    Walk(packed()).gradients(columns(), divisor_N=torch.ones(MODELS))
    assert events == [("forward", 2), ("backward", 2), ("forward", 1), ("backward", 1)]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's compiler uses what it deprecates
def test_parts_of_one_size_share_what_was_compiled(models_at_once):
    models_at_once(1)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def compiler(part):
        return torch.compile(part, fullgraph=True, dynamic=False, backend=backend)

    model = packed(SMALL.model_copy(update={"layers": 1}))
    divisor_N = torch.ones(MODELS)
    sums_N, gradients_NP = one_after_another(model, columns(), divisor_N)
    found_N = Walk(model, compiler=compiler).gradients(columns(), divisor_N=divisor_N)
    assert len(graphs) == 1
    torch.testing.assert_close(found_N, sums_N, rtol=1e-6, atol=0)
    # The plain twins run under a compiler: float32 rounding (6e-8) in another order.
    assert (model.arena.grad_NP - gradients_NP).abs().max() <= 1e-5 * gradients_NP.abs().max()
    torch._dynamo.reset()
