"""Updates whose forward, backward, clipping, AdamW and mixing are kernels, against plain ones.

They run on a GPU where there is one, else under triton's interpreter.

Shapes: N local models, B rows, T tokens, P parameters of one model.
"""

import dataclasses
from functools import cache

import pytest
import torch
from torch import Tensor
from train_tiny import MODEL, RandomRows

from atoll.config.optimizer import OptimizerConfig
from atoll.config.strategy import StrategyConfig
from atoll.data.batch import Batch
from atoll.errors import NonFiniteError
from atoll.model.llama import Llama
from atoll.optim.adamw import AdamW
from atoll.strategy.build import build_strategy
from atoll.train.plan import UpdatePlan
from atoll.train.state import TrainState
from atoll.train.step import Update

STEPS, TOKENS = 5, 4
ONE_LAYER = MODEL.model_copy(update={"layers": 1})
# An eps above most clipped gradients (0.5 over 70, the root of 5000 parameters). Far below, AdamW
# would turn the rounding of gradients near zero into whole steps of either sign.
OPTIMIZER = OptimizerConfig(lr=0.05, eps=1e-2, weight_decay=0.1)
SINGLE = StrategyConfig()
GOSSIP = {
    scheme: StrategyConfig(
        kind="gossip", placement="packed", models=4, topology="one_peer_ring", scheme=scheme
    )
    for scheme in ("awc", "atc")
}
WAYS = {"single": SINGLE, **GOSSIP}


class ShortRows(RandomRows):
    """The first tokens of each row of the stand-in loader, where the model is."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def batch(self, cursor: int, rows: int) -> Batch:
        whole = super().batch(cursor, rows)
        parts = (whole.inputs_BT, whole.targets_BT)
        return Batch(*(part[:, :TOKENS].contiguous().to(self._device) for part in parts))


def make_update(
    device: torch.device,
    strategy: StrategyConfig,
    *,
    kernels: bool,
    amp: torch.dtype | None = torch.bfloat16,
    local_rows: int = 1,
    micro_rows: int = 1,
    loader: ShortRows | None = None,
) -> tuple[TrainState, Update]:
    model = Llama(ONE_LAYER, num_models=strategy.models, device=device)
    arena = model.arena
    inner = AdamW(
        arena.data_NP,
        arena.grad_NP,
        decay_size=arena.decay_size,
        config=OPTIMIZER,
        kernels=kernels,
    )
    state = TrainState(0, 0, model, inner, build_strategy(strategy, model))
    plan = UpdatePlan(
        rows=local_rows * strategy.models,
        micro_rows=micro_rows,
        grad_clip=0.5,  # below most gradient norms
        amp=amp,
        kernels=kernels,
        members=tuple(range(strategy.models)),
    )
    return state, Update(state, loader or ShortRows(device), plan)


@cache
def train(
    device: torch.device, way: str, *, kernels: bool, amp: torch.dtype | None = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Return the weights [N, P] and the losses [steps, N] of a few updates."""
    state, update = make_update(device, WAYS[way], kernels=kernels, amp=amp)
    for _ in range(STEPS):
        update.run(lr=OPTIMIZER.lr)
    losses = torch.tensor([scalars.losses for scalars in update.read()])
    return state.model.arena.data_NP.clone(), losses


@pytest.mark.parametrize("way", WAYS)
def test_updates_by_kernels_are_as_near_to_float32_as_those_of_autocast(kernel_device, way):
    exact_NP, exact_losses = train(kernel_device, way, kernels=False, amp=None)
    narrow_NP, _ = train(kernel_device, way, kernels=False)
    found_NP, losses = train(kernel_device, way, kernels=True)
    error_N = (found_NP - exact_NP).norm(dim=1)
    usual_N = (narrow_NP - exact_NP).norm(dim=1)
    # As for gradients (tests/model/test_kernels_gradients.py): the interpreter cuts off where a
    # GPU and autocast round.
    assert (error_N <= (1.5 if found_NP.is_cuda else 3.0) * usual_N).all(), (error_N, usual_N)
    # Losses near log 32 = 3.5 of logits near 0.1, each rounded to 2^-9 of its size.
    torch.testing.assert_close(losses, exact_losses, rtol=2**-9, atol=0)


def test_ways_to_mix_differ_by_more_than_their_rounding(kernel_device):
    found = [train(kernel_device, way, kernels=True)[0] for way in GOSSIP]
    narrow_NP = train(kernel_device, "awc", kernels=False)[0]
    assert (found[0] - found[1]).norm() > 4 * (found[0] - narrow_NP).norm()


# numpy, which the interpreter computes with, tells what is meant to happen here.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("scheme", GOSSIP)
def test_a_gradient_that_is_no_number_moves_no_weight_and_is_not_mixed(kernel_device, scheme):
    state, update = make_update(kernel_device, GOSSIP[scheme], kernels=True)
    update.run(lr=0.01)
    with torch.no_grad():
        state.model.arena.view("norm")[2] = float("nan")
    before = state.snapshot()
    with pytest.raises(NonFiniteError, match=r"update 2: .* of local model 2"):
        run_and_read(update)
    after = state.snapshot()
    assert (state.step, state.cursor) == (1, 4)
    for name, tensor in before.tensors.items():
        assert torch.equal(tensor.nan_to_num(), after.tensors[name].nan_to_num()), name


def run_and_read(update: Update) -> None:
    update.run(lr=0.01)  # a CPU tells here, a GPU when it is read
    update.read()


@pytest.mark.parametrize("way", ["single", "atc"])
def test_microbatches_add_up_to_the_gradients_of_one(kernel_device, way):
    found = []
    for micro_rows in (2, 1):
        state, update = make_update(
            kernel_device, WAYS[way], kernels=True, local_rows=2, micro_rows=micro_rows
        )
        state.model.arena.grad_NP.fill_(float("nan"))
        update.run(lr=0.01)
        found.append((state.model.arena.grad_NP.double(), update.read()[0]))
    (whole_NP, whole), (parts_NP, parts) = found
    # Products of fewer rows may add in another order, which moves a few of their results to the
    # next number in bfloat16; microbatches are added in float32.
    assert ((parts_NP - whole_NP).norm(dim=1) < 2**-8 * whole_NP.norm(dim=1)).all()
    assert parts.losses == pytest.approx(whole.losses, rel=2**-9)


def test_rows_with_document_numbers_are_computed_plainly(kernel_device):
    class Documents(ShortRows):
        def batch(self, cursor: int, rows: int) -> Batch:
            batch = super().batch(cursor, rows)
            return dataclasses.replace(batch, documents_BT=torch.zeros_like(batch.inputs_BT))

    found = []
    for kernels in (True, False):
        loader = Documents(kernel_device)
        _, update = make_update(kernel_device, SINGLE, kernels=kernels, loader=loader)
        update.run(lr=0.0)
        found.append(update.read()[0])
    assert found[0] == found[1]
