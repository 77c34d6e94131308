"""Whole updates as CUDA graphs: the bits of updates that are not, and no question of the device."""

import numpy as np
import pytest
import torch

from atoll.config.model import ModelConfig
from atoll.config.optimizer import OptimizerConfig
from atoll.config.strategy import StrategyConfig
from atoll.data.batch import Batch, Loader
from atoll.data.cache import Cache
from atoll.data.cachewriter import write_cache
from atoll.data.loader import TokenLoader
from atoll.errors import NonFiniteError
from atoll.model.llama import Llama
from atoll.optim.adamw import AdamW
from atoll.strategy.build import build_strategy
from atoll.train.capture import WARM_UPDATES
from atoll.train.exact import torch_switches
from atoll.train.plan import UpdatePlan
from atoll.train.state import TrainState
from atoll.train.step import Update

pytestmark = pytest.mark.gpu

CONTEXT, LOCAL_ROWS, STEPS = 64, 4, 8
MODEL = ModelConfig(
    vocab_size=512, layers=2, width=128, heads=2, ffn_width=192, context_length=CONTEXT
)
"""Heads of 64 channels, as fused attention wants them."""


def packed(**settings) -> StrategyConfig:
    return StrategyConfig(placement="packed", models=4, **settings)


SINGLE = StrategyConfig()
AWC = packed(kind="gossip", topology="one_peer_ring", scheme="awc", consensus_power=1.0)
ATC = packed(kind="gossip", topology="one_peer_exponential", scheme="atc")
DILOCO = packed(kind="diloco", local_steps=3)
WAYS = pytest.mark.parametrize(
    "strategy", [SINGLE, AWC, ATC, DILOCO], ids=["single", "awc", "atc", "diloco"]
)


class Rows:
    """Random rows that all lie on the GPU from the start."""

    identity = "0" * 64

    def __init__(self, *, num_rows: int = 256, poisoned: range = range(0)) -> None:
        self.num_rows = num_rows
        generator = torch.Generator().manual_seed(0)
        shape = num_rows, CONTEXT + 1
        tokens = torch.randint(0, MODEL.vocab_size, shape, generator=generator)
        weights = torch.ones(num_rows, CONTEXT)
        weights[list(poisoned), 0] = float("inf")
        self._tokens, self._weights = tokens.cuda(), weights.cuda()

    def batch(self, cursor: int, rows: int) -> Batch:
        part = self._tokens[cursor : cursor + rows]
        return Batch(part[:, :-1], part[:, 1:], self._weights[cursor : cursor + rows])

    def weight(self, cursor: int, rows: int) -> float:
        return float(rows * CONTEXT)

    def close(self) -> None:
        return None


def make_state(strategy: StrategyConfig, *, seed: int = 0) -> TrainState:
    model = Llama(MODEL, num_models=strategy.models, seed=seed, device="cuda")
    arena = model.arena
    inner = AdamW(
        arena.data_NP,
        arena.grad_NP,
        decay_size=arena.decay_size,
        config=OptimizerConfig(lr=0.01),
        kernels=True,
    )
    return TrainState(
        0, 0, model, inner, build_strategy(strategy, model, weight=lambda step: 1 / step)
    )


def make_update(
    state: TrainState, loader: Loader, *, captured: bool = True, micro_rows: int = LOCAL_ROWS
) -> Update:
    models = state.model.arena.num_models
    plan = UpdatePlan(
        rows=LOCAL_ROWS * models,
        micro_rows=micro_rows,
        grad_clip=1.0,
        amp=torch.bfloat16,
        kernels=True,
        captured=captured,
        members=tuple(range(models)),
    )
    return Update(state, loader, plan)


def run(update: Update, first: int, last: int) -> list[tuple[float, ...]]:
    """Make updates first ... last, each at a rate of its own; return their losses."""
    for step in range(first, last + 1):
        update.run(lr=0.01 / step)
    return [scalars.losses for scalars in update.read()]


@pytest.fixture
def exact():
    with torch_switches(deterministic=True, cpu_threads=None, compiled=False):
        yield


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("micro_rows", [LOCAL_ROWS, 1], ids=["whole", "microbatches"])
@WAYS
def test_captured_updates_equal_others_bit_for_bit(strategy, micro_rows):
    found = []
    for captured in (False, True):
        state = make_state(strategy)
        update = make_update(state, Rows(), captured=captured, micro_rows=micro_rows)
        found.append((run(update, 1, STEPS), state.digests()))
    assert found[0] == found[1]
    assert found[0][0][0] != found[0][0][-1]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("rest", [1, WARM_UPDATES, 5])
@WAYS
def test_a_captured_run_resumes_bit_for_bit_with_a_capture_of_its_own(strategy, rest):
    whole, first, second = (make_state(strategy, seed=seed) for seed in (0, 0, 1))
    run(make_update(whole, Rows()), 1, STEPS)
    run(make_update(first, Rows()), 1, rest)
    second.restore(first.snapshot())
    run(make_update(second, Rows()), rest + 1, STEPS)
    assert (second.step, second.cursor) == (whole.step, whole.cursor)
    assert second.digests() == whole.digests()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("strategy", [SINGLE, AWC, ATC], ids=["single", "awc", "atc"])
def test_captured_updates_never_wait_for_the_device(strategy):
    update = make_update(make_state(strategy), Rows())
    for _ in range(WARM_UPDATES + 1):  # the last of them captures
        update.run(lr=0.01)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            update.run(lr=0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    steps = [scalars.step for scalars in update.read()]
    assert steps == list(range(1, WARM_UPDATES + 6))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("bad", [2, WARM_UPDATES + 1, 6])
@pytest.mark.parametrize("strategy", [SINGLE, AWC, ATC], ids=["single", "awc", "atc"])
def test_first_bad_captured_update_freezes_the_weights_and_is_named(strategy, bad):
    rows = LOCAL_ROWS * strategy.models
    last = range(bad * rows - 1, bad * rows)  # of the last local model
    state, sound = make_state(strategy), make_state(strategy)
    message = rf"update {bad}: the gradient of parameter embedding"
    if strategy.models > 1:
        message += rf" of local model {strategy.models - 1}"
    with pytest.raises(NonFiniteError, match=message):
        run(make_update(state, Rows(poisoned=last)), 1, STEPS)
    run(make_update(sound, Rows()), 1, bad - 1)
    assert (state.step, state.cursor) == (bad - 1, (bad - 1) * rows)
    for part in ("model", "optimizer"):
        assert state.digests()[part] == sound.digests()[part]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("bad", [2, 4, 6])
def test_no_outer_step_follows_a_bad_captured_update(bad):
    rows = LOCAL_ROWS * DILOCO.models
    state, sound = make_state(DILOCO), make_state(DILOCO)
    update = make_update(state, Rows(poisoned=range(bad * rows - 1, bad * rows)))
    outer = -(-bad // 3) * 3
    for step in range(1, outer):
        update.run(lr=0.01 / step)
    with pytest.raises(NonFiniteError, match=rf"update {bad}: .* of local model 3"):
        update.run(lr=0.01 / outer)
    run(make_update(sound, Rows()), 1, bad - 1)
    assert (state.step, state.cursor) == (bad - 1, (bad - 1) * rows)
    assert state.digests() == sound.digests()


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Cache:
    """Random tokens in groups of twelve rows."""
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, 40_000)
    folder = tmp_path_factory.mktemp("cache")
    return write_cache(folder, train=tokens, validation=tokens[:1000], shard_tokens=400)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("placement", ["pageable", "pinned", "device"])
@pytest.mark.parametrize("strategy", [SINGLE, ATC], ids=["single", "atc"])
def test_a_loader_that_reads_ahead_feeds_captured_updates(cache, strategy, placement):
    """Groups change every few updates, or in each of them, so that some are read meanwhile."""
    found = []
    for captured, prefetch in ((False, False), (True, True)):
        state = make_state(strategy)
        options = {"context_length": CONTEXT, "seed": 0, "group_shards": 2, "passes": 2}
        with TokenLoader(
            cache, "train", prefetch=prefetch, placement=placement, device="cuda", **options
        ) as loader:
            update = make_update(state, loader, captured=captured)
            found.append((run(update, 1, 24), state.digests()))
    assert found[0] == found[1]
