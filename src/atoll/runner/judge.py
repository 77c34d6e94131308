"""What is judged while a run goes on: held-out loss, the best epoch so far, and a sample."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from atoll.data.loader import TokenLoader
from atoll.evaluation.loss import LossResult, evaluate_loss, subset_rows
from atoll.model.generate import generate
from atoll.model.llama import Llama
from atoll.model.sampling import Sampler
from atoll.runner.build import Job
from atoll.strategy.base import Strategy
from atoll.tensors import parameter_digest

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Judge:
    """Scores the state of a job and remembers the best epoch.

    Attributes:
        job: What is judged.
        should_stop: Ends an evaluation early.
        best: Facts of the best epoch so far; what best.json holds.
    """

    job: Job
    should_stop: Callable[[], bool]
    best: dict[str, Any] | None = field(default=None)
    _judged: Llama | None = field(default=None)

    def model(self) -> Llama:
        """Return one model with the weights to judge now; valid until the next call or update."""
        state = self.job.state
        found = evaluation_model(state.model, state.strategy, step=state.step, into=self._judged)
        if found is not state.model:
            self._judged = found  # its memory serves the next evaluation again
        return found

    def epoch(self, epoch: int) -> LossResult | None:
        """Score the fixed subset after a virtual epoch, and note when it is the best so far.

        None where nothing is held out, or where a stop ended it early.
        """
        evaluation = self.job.config.evaluation
        if self.job.validation is None:
            return None
        rows = subset_rows(
            self.job.validation.num_rows, count=evaluation.subset_sequences, seed=evaluation.seed
        )
        found = self._score(self.job.validation, rows)
        if found and (self.best is None or found.nats_per_token < self.best["loss_nats_per_token"]):
            self.best = {
                "step": self.job.state.step,
                "epoch": epoch,
                "parameter_digest": parameter_digest(self.model().arena.named()),
                **found.facts(),
            }
        return found

    def full(self) -> LossResult | None:
        """Score all that is held out; None as in `epoch`."""
        return None if self.job.validation is None else self._score(self.job.validation, None)

    def sample(self) -> str | None:
        """Return the recipe's prompt with the model's continuation; None where none is wanted."""
        config, tokenizer = self.job.config, self.job.tokenizer
        prompt = config.training.sample_prompt
        if prompt is None:
            return None
        begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        ids = tokenizer.encode(prompt) or [begin or 0]
        (found,) = generate(
            self.model(),
            [ids],
            max_tokens=config.training.sample_tokens,
            stop_ids=() if tokenizer.eos_id is None else (tokenizer.eos_id,),
            sampler=Sampler(temperature=0.8, seed=config.evaluation.seed),
        )
        return prompt + tokenizer.decode(found.ids, keep_special=False)

    def _score(self, loader: TokenLoader, rows: Any) -> LossResult | None:
        return evaluate_loss(
            self.model(),
            loader,
            rows=rows,
            batch_size=self.job.config.evaluation.batch_size,
            text_bytes=self.job.cache.manifest.splits["validation"].text_bytes,
            amp=self.job.execution.amp,
            should_stop=self.should_stop,
        )


def evaluation_model(
    model: Llama, strategy: Strategy, *, step: int, into: Llama | None = None
) -> Llama:
    """Return one model with the weights to judge: the live one where they are its own.

    Args:
        model: All local models.
        strategy: Says what is judged of them.
        step: Updates behind them.
        into: What an earlier call returned and may be overwritten. Default: a new model.
    """
    weights = strategy.evaluation_weights(step)
    own = model.arena.named()
    if all(weights[name].data_ptr() == own[name].data_ptr() for name in own):
        return model
    judged = into
    if judged is None:
        judged = Llama(
            model.config,
            device=model.arena.data_NP.device,
            seed=None,
            trainable=False,
            kernels=model.kernels,
        )
    with torch.no_grad():
        for name, view in judged.arena.named().items():
            view.copy_(weights[name])
    return judged
