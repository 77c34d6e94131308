"""Updates against a plain torch loop, and the laws that batches and snapshots obey."""

import pytest
import torch
from train_tiny import MODEL, OPTIMIZER, SCHEDULE, RandomRows, make_plan, make_state

from atoll.data.batch import IGNORE
from atoll.errors import NonFiniteError
from atoll.model.llama import Llama
from atoll.optim.schedule import learning_rate
from atoll.train.loop import train
from atoll.train.plan import UpdatePlan
from atoll.train.step import Update


def plain_training(steps: int, rows: int) -> tuple[list[float], list[float], dict]:
    """Train with torch's own parts: one batch an update, cross_entropy's mean, clip_grad_norm_."""
    model, loader = Llama(MODEL), RandomRows()
    parameters = dict(model.named_parameters())
    matrices = [p for name, p in parameters.items() if not name.endswith("norm")]
    scales = [p for name, p in parameters.items() if name.endswith("norm")]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": scales, "weight_decay": 0.0}],
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        foreach=False,
    )
    losses, norms = [], []
    for step in range(1, steps + 1):
        batch = loader.batch((step - 1) * rows, rows)
        logits = model.logits(batch.inputs_BT[None])[0]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORE
        )
        model.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step, total_steps=steps, optimizer=OPTIMIZER, schedule=SCHEDULE
            )
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.detach() for name, p in parameters.items()}


@pytest.mark.parametrize("micro_rows", [1, 2, 4, 16])
def test_training_equals_a_plain_torch_loop_whatever_the_microbatch(micro_rows):
    losses, norms, weights = plain_training(steps=5, rows=4)
    state = make_state()
    plan = make_plan(total_steps=5, rows=4, micro_rows=micro_rows, log_every=1)
    records = list(train(state, RandomRows(), plan))
    scalars = [record.window.scalars[0] for record in records if record.window]
    # FP32 sums in another order: about 1e-7 an operation; AdamW's first updates divide a gradient
    # by its own size, which lifts the difference of a weight to about 1e-6 of the rate's 0.01.
    assert [s.losses[0] for s in scalars] == pytest.approx(losses, rel=1e-5)
    assert [s.grad_norms[0] for s in scalars] == pytest.approx(norms, rel=1e-4)
    for name, weight in state.model.named_parameters():
        torch.testing.assert_close(weight.detach(), weights[name], rtol=1e-4, atol=1e-5)


def test_every_update_consumes_its_rows_and_no_others():
    state = make_state()
    records = list(train(state, RandomRows(), make_plan(total_steps=4, rows=4)))
    assert [(r.step, r.cursor) for r in records] == [(1, 4), (2, 8), (3, 12), (4, 16)]


def test_log_interval_changes_no_bit():
    digests = []
    for log_every in (1, 2, 100):
        state = make_state()
        list(train(state, RandomRows(), make_plan(total_steps=5, log_every=log_every)))
        digests.append(state.digests())
    assert digests[0] == digests[1] == digests[2]


def test_scalars_are_read_at_intervals_at_rests_and_at_the_end():
    plan = make_plan(total_steps=8, log_every=3, rest_steps=frozenset({4}))
    records = list(train(make_state(), RandomRows(), plan))
    read = {r.step: [s.step for s in r.window.scalars] for r in records if r.window}
    assert read == {3: [1, 2, 3], 4: [4], 6: [5, 6], 8: [7, 8]}


def test_time_at_rest_is_not_counted_as_training():
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    plan = make_plan(total_steps=3, log_every=3)
    quick = [
        r.window.seconds for r in train(make_state(), RandomRows(), plan, clock=clock) if r.window
    ]
    slow = []
    for record in train(make_state(), RandomRows(), plan, clock=clock):
        now[0] += 1000.0
        slow += [record.window.seconds] if record.window else []
    assert slow == quick


def test_window_counts_targets_that_are_counted():
    loader = RandomRows()
    (record,) = train(make_state(), loader, make_plan(total_steps=1))
    assert record.window is not None
    assert record.window.targets == loader.weight(0, 4) < 4 * 8


def test_stop_finishes_the_update_reads_and_ends():
    seen = []

    def should_stop() -> bool:
        return len(seen) == 1

    for record in train(
        make_state(), RandomRows(), make_plan(total_steps=9), should_stop=should_stop
    ):
        seen.append(record)
    assert [record.step for record in seen] == [1, 2]
    assert [s.step for s in seen[-1].window.scalars] == [1, 2]


def test_bad_gradient_stops_before_any_weight_changes_and_is_named():
    state = make_state()
    plan = make_plan(total_steps=9)
    records = train(state, RandomRows(), plan)
    next(records)
    state.model.arena.view("layers.1.mlp_norm")[0, 3] = float("nan")
    before = state.model.arena.data_NP.clone()
    with pytest.raises(NonFiniteError, match=r"update 2: .*parameter embedding .*loss was nan"):
        next(records)
    assert (state.step, state.cursor) == (1, 4)
    assert torch.equal(state.model.arena.data_NP.nan_to_num(), before.nan_to_num())


class LateGuardUpdate(Update):
    """An update that treats the CPU as a device that must not be asked, as on a GPU."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._guard.skip = torch.zeros(())


def test_on_a_device_the_first_bad_update_freezes_the_state_and_is_named_later():
    class PoisonedRows(RandomRows):
        """Rows of update 3 (cursor 8 to 11) carry a weight that no sum survives."""

        def batch(self, cursor: int, rows: int):
            batch = super().batch(cursor, rows)
            weights = torch.ones(batch.targets_BT.shape)
            if 8 <= cursor < 12:
                weights[0, 0] = float("inf")
            return type(batch)(batch.inputs_BT, batch.targets_BT.clamp(min=0), weights)

        def weight(self, cursor: int, rows: int) -> float:
            return float(rows * 8)

    state, sound = make_state(), make_state()
    plan = UpdatePlan(rows=4, micro_rows=4, grad_clip=1.0)
    update = LateGuardUpdate(state, PoisonedRows(), plan)
    for _ in range(6):
        update.run(lr=0.01)
    with pytest.raises(NonFiniteError, match=r"update 3: the gradient of parameter embedding"):
        update.read()
    twin = LateGuardUpdate(sound, PoisonedRows(), plan)
    for _ in range(2):
        twin.run(lr=0.01)
    assert (state.step, state.cursor) == (2, 8)
    assert state.digests() == sound.digests()


def test_without_clipping_gradients_are_used_as_they_are():
    clipped, free = make_state(), make_state()
    list(train(clipped, RandomRows(), make_plan(total_steps=2, grad_clip=1e9)))
    list(train(free, RandomRows(), make_plan(total_steps=2, grad_clip=None)))
    assert clipped.digests() == free.digests()


def test_autocast_trains_near_full_precision():
    losses = []
    for amp in (None, torch.bfloat16):
        plan = make_plan(total_steps=3, log_every=1, amp=amp)
        records = list(train(make_state(), RandomRows(), plan))
        losses.append([r.window.loss_nats_per_token for r in records if r.window])
    assert losses[0] != losses[1]
    # bfloat16 keeps 8 bits: logits near 0.1 move the loss of 3.4 nats by far less than 1%.
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
