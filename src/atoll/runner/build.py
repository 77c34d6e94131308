"""From a recipe to everything that trains: cache, loaders, model, optimizer, strategy, plan."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atoll.config.budget import Budget, plan_budget
from atoll.config.schema import RunConfig
from atoll.data.cache import MANIFEST_NAME, Cache
from atoll.data.loader import TokenLoader
from atoll.data.placement import resolve_placement
from atoll.data.settings import check_vocabulary, locate
from atoll.data.tokenizer import Tokenizer
from atoll.errors import AtollError
from atoll.interrupt import raise_on_signal
from atoll.model.llama import Llama
from atoll.optim.adamw import AdamW
from atoll.runner.fit import first_line, is_out_of_memory
from atoll.runner.progress import Progress
from atoll.strategy.base import Strategy
from atoll.strategy.build import build_strategy
from atoll.strategy.consensus import mixing_weight
from atoll.train.binding import binding_facts
from atoll.train.device import Execution, resolve_execution
from atoll.train.loop import TrainPlan
from atoll.train.plan import UpdatePlan
from atoll.train.state import TrainState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that a run is made of, at the state it starts from.

    Attributes:
        config: The recipe.
        device: Where it computes.
        execution: How it computes there.
        budget: Its updates.
        cache: Its tokens.
        tokenizer: What made them; it still gives the same ids.
        loader: Rows to train on.
        validation: Held-out rows, None where the cache holds none.
        state: What the updates change.
        binding: What decides the numbers besides the state.
    """

    config: RunConfig
    device: torch.device
    execution: Execution
    budget: Budget
    cache: Cache
    tokenizer: Tokenizer
    loader: TokenLoader
    validation: TokenLoader | None
    state: TrainState
    binding: dict[str, Any]

    @property
    def rows(self) -> int:
        """Sequences of one update, over all local models."""
        return self.config.training.batch_tokens // self.config.model.context_length

    @property
    def plan(self) -> TrainPlan:
        """What the loop needs; it rests where virtual epochs end."""
        training = self.config.training
        return TrainPlan(
            total_steps=self.budget.total_steps,
            update=update_plan(self.config, self.execution),
            optimizer=self.config.optimizer,
            schedule=self.config.lr_schedule,
            log_every=training.log_every,
            rest_steps=frozenset(self.budget.epoch_ends),
        )


@contextmanager
def build(config: RunConfig, cache: Cache, device: torch.device) -> Iterator[Job]:
    """Yield the job; its loaders are closed at the end.

    Raises:
        ConfigError: The cache holds too few tokens for the budget, or too many ids for the model.
        CacheError: The cache is damaged, or the tokenizer gives other ids than it did.
    """
    tokenizer = Tokenizer.from_cache(cache)
    check_vocabulary(
        cache.manifest.tokenizer.vocab_size,
        model_vocab_size=config.model.vocab_size,
        where=str(cache.folder),
    )
    budget = plan_budget(config)
    execution = resolve_execution(config.runtime, device)
    with ExitStack() as stack:
        loader = stack.enter_context(open_split(config, cache, device, "train"))
        rows = config.training.batch_tokens // config.model.context_length
        loader.require_rows(budget.total_steps * rows)
        validation = None
        if cache.manifest.splits["validation"].tokens:
            validation = stack.enter_context(open_split(config, cache, device, "validation"))
        else:
            logger.warning(
                "%s holds no held-out text, so nothing will be evaluated; "
                "set data.validation_fraction and prepare again",
                cache.folder,
            )
        yield Job(
            config=config,
            device=device,
            execution=execution,
            budget=budget,
            cache=cache,
            tokenizer=tokenizer,
            loader=loader,
            validation=validation,
            state=_state_that_fits(config, device, kernels=execution.kernels),
            binding=binding_facts(
                device=device,
                execution=execution,
                seeds={
                    "runtime.seed": config.runtime.seed,
                    "data.shuffle_seed": config.data.shuffle_seed,
                    "evaluation.seed": config.evaluation.seed,
                },
            ),
        )


def _state_that_fits(config: RunConfig, device: torch.device, *, kernels: bool) -> TrainState:
    try:
        return new_state(config, device, kernels=kernels)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise AtollError(
            f"memory ran out on {device} for the weights, gradients and moments of "
            f"{config.strategy.models} local models: {first_line(error)}",
            hint="choose fewer strategy.models, or a smaller model.width or model.layers",
        ) from error


def update_plan(config: RunConfig, execution: Execution) -> UpdatePlan:
    """Return what all updates of a recipe have in common."""
    return UpdatePlan(
        rows=config.training.batch_tokens // config.model.context_length,
        micro_rows=config.training.micro_batch_size,
        grad_clip=config.optimizer.grad_clip,
        amp=execution.amp,
        compiled=execution.compiled,
        kernels=execution.kernels,
        captured=execution.captured,
        members=tuple(range(config.strategy.models)),
    )


def new_state(config: RunConfig, device: torch.device, *, kernels: bool = False) -> TrainState:
    """Return the state before the first update.

    Args:
        config: The recipe.
        device: Where it is to be.
        kernels: Whether model and optimizer use atoll's own GPU kernels.
    """
    model = Llama(
        config.model,
        num_models=config.strategy.models,
        device=device,
        seed=config.runtime.seed,
        kernels=kernels,
    )
    arena = model.arena
    optimizer = AdamW(
        arena.data_NP,
        arena.grad_NP,
        decay_size=arena.decay_size,
        config=config.optimizer,
        kernels=kernels,
    )
    return TrainState(0, 0, model, optimizer, recipe_strategy(config, model))


def recipe_strategy(config: RunConfig, model: Llama) -> Strategy:
    """Return the recipe's strategy for local models with the weights they start from."""
    weight = partial(
        mixing_weight,
        strategy=config.strategy,
        total_steps=plan_budget(config).total_steps,
        optimizer=config.optimizer,
        schedule=config.lr_schedule,
    )
    return build_strategy(config.strategy, model, weight=weight)


def open_or_prepare(config: RunConfig, progress: Progress) -> Cache:
    """Return the cache that the recipe names; one that is missing is prepared first.

    Preparing can be killed and goes on where it was, so that nothing is lost by doing it here.

    Raises:
        InterruptedRunError: A signal stopped the preparing.
    """
    folder = cache_folder(config)
    if (folder / MANIFEST_NAME).exists() or config.data.cache_path is not None:
        return Cache(folder)
    from atoll.data.prepare import prepare

    progress.note(f"no token cache in {folder} yet: preparing it")
    with raise_on_signal("preparing"):
        return prepare(
            config.data,
            config.model,
            progress=lambda seen: progress.work(f"prepare: {seen.phase}", seen.done, seen.total),
        )


def open_split(config: RunConfig, cache: Cache, device: torch.device, split: Any) -> TokenLoader:
    """Open one split of a cache as the recipe says."""
    return TokenLoader(
        cache,
        split,
        context_length=config.model.context_length,
        seed=config.data.shuffle_seed,
        group_shards=config.data.shuffle_group_size,
        passes=config.data.passes if split == "train" else 1,
        prefetch=config.data.prefetch,
        placement=resolve_placement(config.data.placement, device),
        device=device,
    )


def cache_folder(config: RunConfig) -> Path:
    """Return the folder of the cache that the recipe names."""
    return config.data.cache_path or locate(config.data, config.model)
