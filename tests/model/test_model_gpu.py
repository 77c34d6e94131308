"""What only a GPU shows: bfloat16, deterministic algorithms, memory, and compiled updates."""

import copy

import pytest
import torch
from naive_llama import random_tokens

from atoll.config.model import ModelConfig
from atoll.model import gpu
from atoll.model.attention import attention
from atoll.model.cost import training_memory
from atoll.model.exact_attention import exact_attention
from atoll.model.generate import generate
from atoll.model.llama import Llama
from atoll.model.loss import PIECE_BYTES, weighted_loss
from atoll.train.gradients import COMPILE_OPTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CONFIG = ModelConfig(
    vocab_size=4096, layers=4, width=256, heads=4, kv_heads=2, ffn_width=704, context_length=256
)


EQUAL_HEADS = CONFIG.model_copy(update={"kv_heads": None})
"""With these, deterministic updates through kernels have an attention of their own."""


def compile_fully(model: Llama):
    """Return the model compiled as training compiles it, refusing graph breaks."""
    return torch.compile(model, fullgraph=True, dynamic=False, options=COMPILE_OPTIONS)


def update(model: Llama, tokens_NBU: torch.Tensor, *, narrow: bool, run=None) -> torch.Tensor:
    """Return the mean losses after a forward and a backward of `model`, or of `run` for it."""
    run = model if run is None else run
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=narrow):
        sums_N, weights_N = run(tokens_NBU[..., :-1], tokens_NBU[..., 1:])
    (sums_N / weights_N).sum().backward()
    return (sums_N / weights_N).detach()


def update_by_kernels(model: Llama, tokens_NBU: torch.Tensor) -> torch.Tensor:
    """Return the mean losses, and leave what `update` leaves, whatever was there before."""
    divisor_N = torch.full((len(tokens_NBU),), tokens_NBU[0, :, 1:].numel(), device="cuda").float()
    model.arena.grad_NP.fill_(float("nan"))
    sums_N = gpu.gradients(
        model, tokens_NBU[..., :-1], tokens_NBU[..., 1:], divisor_N=divisor_N, add=False
    )
    return sums_N / divisor_N


def relative_norm(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_bfloat16_stays_near_float32(models, compiled):
    model = Llama(CONFIG, num_models=models, device="cuda")
    run = compile_fully(model) if compiled else model
    tokens = random_tokens(CONFIG, models, 4, 257).cuda()
    exact = update(model, tokens, narrow=False)
    exact_grad = model.arena.grad_NP.clone()
    losses = update(model, tokens, narrow=True, run=run)
    assert losses.dtype == torch.float32
    # Products rounded to 8 bits (2^-9 each), some tens of them in a row with random signs.
    assert ((losses - exact).abs() / exact).max() < 2**-9
    assert relative_norm(model.arena.grad_NP, exact_grad) < 0.02


@pytest.mark.parametrize("config", [CONFIG, EQUAL_HEADS], ids=["grouped", "equal heads"])
@pytest.mark.parametrize("models", [1, 3])
def test_kernels_stay_as_near_to_float32_as_autocast(models, config):
    model = Llama(config, num_models=models, device="cuda")
    tokens = random_tokens(config, models, 4, 257).cuda()
    exact = update(model, tokens, narrow=False)
    exact_grad = model.arena.grad_NP.clone()
    losses = update_by_kernels(model, tokens)
    # As above.
    assert ((losses - exact).abs() / exact).max() < 2**-9
    assert relative_norm(model.arena.grad_NP, exact_grad) < 0.02


def test_pieces_of_the_logits_join_without_a_seam(monkeypatch):
    model = Llama(CONFIG, num_models=2, device="cuda")
    tokens = random_tokens(CONFIG, 2, 4, 258).cuda()  # 4 * 257 rows of each model
    whole = update_by_kernels(model, tokens)
    whole_grad = model.arena.grad_NP.clone()
    memory = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(gpu, "LOGITS_SHARE", memory)  # pieces of 256 rows, the last of four
    losses = update_by_kernels(model, tokens)
    # Products of fewer rows may add in another order, which moves some results to the next number
    # in bfloat16.
    torch.testing.assert_close(losses, whole, rtol=2**-9, atol=0)
    assert relative_norm(model.arena.grad_NP, whole_grad) < 2**-8


def test_float32_on_the_gpu_equals_the_cpu():
    here, there = Llama(CONFIG), Llama(CONFIG, device="cuda")
    tokens = random_tokens(CONFIG, 1, 2, 65)
    ours, theirs = update(there, tokens.cuda(), narrow=False), update(here, tokens, narrow=False)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert relative_norm(there.arena.grad_NP.cpu(), here.arena.grad_NP) < 1e-5


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("models", [1, 2])
def test_deterministic_updates_repeat_every_bit(models, compiled, documents):
    model = Llama(CONFIG, num_models=models, device="cuda")
    run = compile_fully(model) if compiled else model
    tokens = random_tokens(CONFIG, models, 4, 257).cuda()
    where = (torch.arange(256, device="cuda") // 100).expand(models, 4, -1) if documents else None
    found = []
    for _ in range(3):
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            sums_N, _ = run(tokens[..., :-1], tokens[..., 1:], None, None, where)
        sums_N.sum().backward()
        found.append((sums_N.detach().clone(), model.arena.grad_NP.clone()))
    for sums_N, grad_NP in found[1:]:
        assert torch.equal(sums_N, found[0][0])
        assert torch.equal(grad_NP, found[0][1])


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("config", [CONFIG, EQUAL_HEADS], ids=["grouped", "equal heads"])
@pytest.mark.parametrize("models", [1, 2])
def test_deterministic_updates_by_kernels_repeat_every_bit(models, config):
    model = Llama(config, num_models=models, device="cuda")
    tokens = random_tokens(config, models, 4, 257).cuda()
    found = [(update_by_kernels(model, tokens), model.arena.grad_NP.clone()) for _ in range(3)]
    for losses, grad_NP in found[1:]:
        assert torch.equal(losses, found[0][0])
        assert torch.equal(grad_NP, found[0][1])


@pytest.mark.parametrize(("tokens", "channels"), [(16, 32), (200, 64), (256, 128)])
def test_exact_attention_is_its_twin_and_repeats_every_bit(tokens, channels):
    generator = torch.Generator().manual_seed(0)
    shape = 3, tokens, 4, channels
    qkv_and_grad = [
        torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for _ in range(4)
    ]
    found = []
    for function, dtype in ((exact_attention, None), (exact_attention, None), (attention, "wide")):
        leaves = [x.double() if dtype else x.clone() for x in qkv_and_grad]
        *qkv, grad = (x.transpose(1, 2).requires_grad_() for x in leaves)
        result = function(*qkv)
        found.append([result, *torch.autograd.grad(result, qkv, grad)])
    for once, again, exact in zip(*found, strict=True):
        assert torch.equal(once, again)
        # Probabilities and results rounded to bfloat16, 2^-9 each.
        assert relative_norm(once, exact) < 2**-7


def test_memory_of_the_loss_is_bounded_by_its_pieces():
    rows, vocabulary, width = 131_072, 32_000, 320
    x = torch.randn(1, rows, width, device="cuda", requires_grad=True)
    weight = torch.randn(1, vocabulary, width, device="cuda", requires_grad=True)
    ids = torch.randint(0, vocabulary, (1, rows), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        sums_N, _ = weighted_loss(x, weight, ids)
    sums_N.sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    # A piece in float32 and in bfloat16, and the gradients of both inputs with a copy.
    allowed = 1.5 * PIECE_BYTES["cuda"] + 2 * 4 * (rows + vocabulary) * width + (64 << 20)
    assert peak < allowed
    assert peak < rows * vocabulary * 2 / 3


@pytest.mark.parametrize("narrow", [False, True])
def test_the_estimate_of_memory_is_near_the_peak(narrow):
    config = ModelConfig(layers=4, width=320, heads=5, ffn_width=896, context_length=512)
    tokens = random_tokens(config, 1, 32, 513).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = Llama(config, device="cuda")
    update(model, tokens, narrow=narrow)
    peak = torch.cuda.max_memory_allocated() - before
    estimate = training_memory(config, micro_batch_size=32, narrow=narrow, device_type="cuda")
    assert peak == pytest.approx(estimate.total - estimate.moments, rel=0.15)


def test_generation_on_the_gpu_equals_the_cpu():
    config = CONFIG.model_copy(update={"init_std": 0.1})
    here = Llama(config, trainable=False)
    there = Llama(config, device="cuda", trainable=False)
    prompts = [random_tokens(config, length).tolist() for length in (3, 17)]
    assert generate(there, prompts, max_tokens=24) == generate(here, prompts, max_tokens=24)


def test_a_deep_copy_stays_on_its_device():
    model = Llama(CONFIG, device="cuda")
    assert copy.deepcopy(model).arena.data_NP.is_cuda
