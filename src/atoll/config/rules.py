"""Rules between sections; each names every setting it reads and the nearest values that fit."""

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor

from atoll.config.base import BrokenRule
from atoll.config.budget import num_epochs, steps_per_epoch
from atoll.config.model import ModelConfig, parameter_count
from atoll.config.strategy import StrategyConfig
from atoll.config.training import TrainingConfig

MAX_EPOCHS = 1_000_000
"""Each virtual epoch ends in an evaluation, so more of them can only be a slip of the pen."""

_RATIO_KEYS = ("training.tokens_per_parameters", "training.epoch_tokens_per_parameters")
_SIZE_KEYS = ("vocab_size", "layers", "width", "heads", "kv_heads", "head_width", "ffn_width")


def broken_rules(
    model: ModelConfig, training: TrainingConfig, strategy: StrategyConfig
) -> Iterator[BrokenRule]:
    """Yield each rule between these sections that does not hold."""
    yield from _batch_rules(model, training, strategy)
    epochs = num_epochs(training)
    if epochs.denominator != 1:
        yield _ratio_rule(training, epochs)
    else:
        yield from _epoch_rules(model, training, epochs.numerator)


def _batch_rules(
    model: ModelConfig, training: TrainingConfig, strategy: StrategyConfig
) -> Iterator[BrokenRule]:
    keys = ("training.batch_tokens", "model.context_length", "strategy.models")
    tokens, context, models = training.batch_tokens, model.context_length, strategy.models
    rows, rest = divmod(tokens, models * context)
    if rest:
        yield BrokenRule(
            keys,
            f"training.batch_tokens {tokens} is not a multiple of strategy.models x "
            f"model.context_length = {models} x {context} = {models * context}. "
            f"Set it to {_near(rows * models * context, (rows + 1) * models * context)}.",
        )
        return
    micro = training.micro_batch_size
    if micro < rows and rows % micro:
        below = next(n for n in range(micro, 0, -1) if rows % n == 0)
        above = next(n for n in range(micro, rows + 1) if rows % n == 0)
        yield BrokenRule(
            (*keys, "training.micro_batch_size"),
            f"training.micro_batch_size {micro} does not divide the {rows} sequences that one "
            f"update gives each local model. Set it to {_near(below, above)}.",
        )


def _ratio_rule(training: TrainingConfig, epochs: Fraction) -> BrokenRule:
    epoch = Decimal(repr(training.epoch_tokens_per_parameters))
    fits = [f"{(n * epoch).normalize():f}" for n in (floor(epochs), ceil(epochs)) if n]
    return BrokenRule(
        _RATIO_KEYS,
        f"training.tokens_per_parameters {training.tokens_per_parameters} is not a whole number of "
        f"virtual epochs of training.epoch_tokens_per_parameters {epoch}. "
        f"Set the total to {' or '.join(fits)}.",
    )


def _epoch_rules(model: ModelConfig, training: TrainingConfig, epochs: int) -> Iterator[BrokenRule]:
    if epochs > MAX_EPOCHS:
        yield BrokenRule(
            _RATIO_KEYS,
            f"training.tokens_per_parameters {training.tokens_per_parameters} holds {epochs} "
            f"virtual epochs; at most {MAX_EPOCHS} are allowed. "
            "Raise training.epoch_tokens_per_parameters.",
        )
        return
    parameters = parameter_count(model)
    steps = steps_per_epoch(training, parameters)
    # Below one update an epoch, rounding leaves some epoch without one unless the total rounds up
    # to an update for each.
    if steps < 1 and epochs * (1 - steps) > Fraction(1, 2):
        needed = training.batch_tokens / parameters
        yield BrokenRule(
            (
                *_RATIO_KEYS,
                "training.batch_tokens",
                *(f"model.{name}" for name in (*_SIZE_KEYS, "tied_embeddings")),
            ),
            f"training.epoch_tokens_per_parameters {training.epoch_tokens_per_parameters} x "
            f"{parameters} parameters is {float(steps):.3g} updates of {training.batch_tokens} "
            f"targets, so some virtual epochs are empty. Set it to at least {needed:.4g}, or "
            f"training.batch_tokens to at most {floor(steps * training.batch_tokens)}.",
        )
    listed = training.checkpoint_epochs if training.checkpoint_policy == "explicit" else []
    if isinstance(listed, list) and max(listed, default=0) > epochs:
        yield BrokenRule(
            (*_RATIO_KEYS, "training.checkpoint_policy", "training.checkpoint_epochs"),
            f"training.checkpoint_epochs {listed} goes beyond the {epochs} virtual epochs of "
            f"the budget. Leave out those above {epochs}.",
        )


def _near(below: int, above: int) -> str:
    return f"{below} or {above}" if below and below != above else str(above)
