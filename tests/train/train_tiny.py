"""A model, a loader and a state that are small enough to train in milliseconds."""

from collections.abc import Callable

import torch

from atoll.config.model import ModelConfig
from atoll.config.optimizer import LrScheduleConfig, OptimizerConfig
from atoll.config.strategy import StrategyConfig
from atoll.data.batch import IGNORE, Batch
from atoll.model.llama import Llama
from atoll.optim.adamw import AdamW
from atoll.seeds import derive_seed
from atoll.strategy.build import build_strategy
from atoll.train.loop import TrainPlan
from atoll.train.plan import UpdatePlan
from atoll.train.state import TrainState

CONTEXT = 8
MODEL = ModelConfig(
    vocab_size=32, layers=2, width=16, heads=2, ffn_width=24, context_length=CONTEXT
)
OPTIMIZER = OptimizerConfig(lr=0.01)
SCHEDULE = LrScheduleConfig(warmup_steps=2)


class RandomRows:
    """A loader whose rows are drawn from their number; some targets are not counted."""

    identity = "0" * 64

    def __init__(self, num_rows: int = 10_000, *, ignore_share: float = 0.2) -> None:
        self.num_rows = num_rows
        self._ignore_share = ignore_share

    def batch(self, cursor: int, rows: int) -> Batch:
        drawn = [self._row(row) for row in range(cursor, cursor + rows)]
        tokens, targets = (torch.stack(column) for column in zip(*drawn, strict=True))
        return Batch(tokens, targets)

    def weight(self, cursor: int, rows: int) -> float:
        return float((self.batch(cursor, rows).targets_BT != IGNORE).sum())

    def close(self) -> None:
        return None

    def _row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(derive_seed(0, "row", row))
        tokens = torch.randint(0, MODEL.vocab_size, (CONTEXT + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[torch.rand(CONTEXT, generator=generator) < self._ignore_share] = IGNORE
        return tokens[:-1], targets


def make_state(
    *,
    seed: int = 0,
    device: str = "cpu",
    strategy: StrategyConfig | None = None,
    optimizer: OptimizerConfig = OPTIMIZER,
    weight: Callable[[int], float] | None = None,
) -> TrainState:
    strategy = strategy or StrategyConfig()
    model = Llama(MODEL, num_models=strategy.models, seed=seed, device=device)
    arena = model.arena
    inner = AdamW(arena.data_NP, arena.grad_NP, decay_size=arena.decay_size, config=optimizer)
    return TrainState(0, 0, model, inner, build_strategy(strategy, model, weight=weight))


def make_plan(
    *,
    total_steps: int,
    rows: int = 4,
    micro_rows: int = 2,
    log_every: int = 3,
    grad_clip: float | None = 1.0,
    rest_steps: frozenset[int] = frozenset(),
    amp: torch.dtype | None = None,
    models: int = 1,
    optimizer: OptimizerConfig = OPTIMIZER,
) -> TrainPlan:
    update = UpdatePlan(
        rows=rows,
        micro_rows=micro_rows,
        grad_clip=grad_clip,
        amp=amp,
        members=tuple(range(models)),
    )
    return TrainPlan(
        total_steps=total_steps,
        update=update,
        optimizer=optimizer,
        schedule=SCHEDULE,
        log_every=log_every,
        rest_steps=rest_steps,
    )
