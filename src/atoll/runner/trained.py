"""Weights of a run or of one checkpoint, opened for reading: to evaluate, generate or export."""

from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.checkpoint.load import Checkpoint, load_checkpoint
from atoll.checkpoint.records import MANIFEST
from atoll.config.load import load_config
from atoll.config.runtime import RuntimeConfig
from atoll.config.schema import RunConfig
from atoll.data.cache import Cache
from atoll.data.tokenizer import Tokenizer
from atoll.errors import CheckpointError, StateMismatchError, UsageError
from atoll.evaluation.loss import LossResult, evaluate_loss, subset_rows
from atoll.model.huggingface import load_pretrained
from atoll.model.llama import Llama
from atoll.runner.build import cache_folder, open_split, recipe_strategy
from atoll.runner.folder import RunFolder
from atoll.runner.judge import evaluation_model
from atoll.train.device import Execution, resolve_execution
from atoll.train.state import layout_identity


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model of one.

    Attributes:
        weights: The folder that they were read from.
        step: Updates behind them.
        model: On its device, without gradients.
        local_model: Which of several local models it is; None for what the run itself judges.
        config: The recipe that trained it.
        cache_identity: The tokens that it was trained on.
        device: Where it is.
    """

    weights: Path
    step: int
    model: Llama
    local_model: int | None
    config: RunConfig
    cache_identity: str
    device: torch.device

    def cache(self) -> Cache:
        """Open the token cache that it was trained on.

        Raises:
            CacheError: It is not where the recipe says.
            StateMismatchError: Another one is there.
        """
        cache = Cache(cache_folder(self.config))
        if cache.manifest.cache_identity != self.cache_identity:
            raise StateMismatchError(
                f"{cache.folder} holds other tokens than {self.weights} was trained on: "
                f"{cache.manifest.cache_identity} for {self.cache_identity}.",
                hint="put the cache of the run back in its place",
            )
        return cache

    def tokenizer(self) -> Tokenizer:
        """Open the tokenizer of that cache."""
        return Tokenizer.from_cache(self.cache())


def open_trained(path: Path, *, device: torch.device, local_model: int | None = None) -> Trained:
    """Load the newest sound checkpoint of a run, its final weights, or one checkpoint.

    The final weights count where a run kept no checkpoint. Nothing is moved or changed, so that it
    may be done while the run goes on.

    Args:
        path: A run's folder or a checkpoint's.
        device: Where the model is wanted.
        local_model: Which of the run's local models, counted from 0. Default: what the run itself
            judges and exports, which is their average where there are several.

    Raises:
        UsageError: There is no checkpoint, or no such local model in it.
        CheckpointError: None verifies; says what is wrong with each.
    """
    run = RunFolder(path)
    if not (path / MANIFEST).is_file() and run.exported and not run.complete_checkpoints():
        return _exported(run, device, local_model)
    found = load_checkpoint(path) if (path / MANIFEST).is_file() else _newest_sound(path)
    config = RunConfig.model_validate(found.manifest.run["config"])
    _check_local_model(local_model, config, found.folder)
    kernels = judging_execution(config.runtime, device).kernels
    return Trained(
        weights=found.folder,
        step=found.manifest.step,
        model=_judged(found, config, device, kernels=kernels)
        if local_model is None
        else _local_model(found, config, device, local_model, kernels=kernels),
        local_model=local_model,
        config=config,
        cache_identity=found.manifest.run["cache_identity"],
        device=device,
    )


def evaluate_trained(trained: Trained, *, full: bool) -> LossResult:
    """Score the held-out split that the model's run set aside.

    Args:
        trained: The model.
        full: The whole split, or the recipe's fixed subset.
    """
    config, cache = trained.config, trained.cache()
    with open_split(config, cache, trained.device, "validation") as loader:
        rows = None
        if not full:
            rows = subset_rows(
                loader.num_rows,
                count=config.evaluation.subset_sequences,
                seed=config.evaluation.seed,
            )
        found = evaluate_loss(
            trained.model,
            loader,
            rows=rows,
            batch_size=config.evaluation.batch_size,
            text_bytes=cache.manifest.splits["validation"].text_bytes,
            amp=judging_execution(config.runtime, trained.device).amp,
        )
    assert found is not None, "nothing asks it to stop"
    return found


def judging_execution(runtime: RuntimeConfig, device: torch.device) -> Execution:
    """Return how a model that was trained as `runtime` says is evaluated on `device`.

    What the recipe insists on was for the device that trained: no update is compiled or captured
    here, and kernels are used where they are, unless the recipe trained without them.
    """
    without = runtime.kernels is False or runtime.compile is True
    relaxed = {"kernels": False if without else "auto", "compile": False, "capture": False}
    return resolve_execution(runtime.model_copy(update=relaxed), device)


def _judged(found: Checkpoint, config: RunConfig, device: torch.device, *, kernels: bool) -> Llama:
    """Return one model with the weights that the run judged at this checkpoint.

    The run's own strategy says what they are, so that a checkpoint, the run's export and its
    evaluations agree in every bit.
    """
    models = Llama(
        config.model,
        num_models=config.strategy.models,
        device=device,
        seed=None,
        trainable=False,
        kernels=kernels,
    )
    for name, view in models.arena.named().items():
        view.copy_(found.snapshot.tensors[f"model.{name}"])
    strategy = recipe_strategy(config, models)
    if found.snapshot.facts.get("layout") != layout_identity(models.arena):
        raise StateMismatchError(
            f"the parameters of {found.folder} lie in another order than in this version.",
            hint="open it with the version that its manifest names",
        )
    strategy.restore(found.snapshot.under("strategy"))
    return evaluation_model(models, strategy, step=found.manifest.step)


def _local_model(
    found: Checkpoint, config: RunConfig, device: torch.device, number: int, *, kernels: bool
) -> Llama:
    model = Llama(config.model, device=device, seed=None, trainable=False, kernels=kernels)
    for name, view in model.arena.named().items():
        view.copy_(found.snapshot.tensors[f"model.{name}"][number : number + 1])
    return model


def _check_local_model(number: int | None, config: RunConfig, where: Path) -> None:
    """Refuse a number that no local model has.

    Raises:
        UsageError: Says which there are.
    """
    models = config.strategy.models
    if number is not None and not 0 <= number < models:
        held = "one model, number 0" if models == 1 else f"{models} local models, 0 to {models - 1}"
        raise UsageError(
            f"local model {number} was asked for; {where} holds {held}.",
            hint="leave the number out for the average of all"
            if models > 1
            else "leave the number out",
        )


def _exported(run: RunFolder, device: torch.device, local_model: int | None) -> Trained:
    config = load_config([run.recipe_file()]).config
    _check_local_model(local_model, config, run.path)
    if local_model is not None and config.strategy.models > 1:
        raise UsageError(
            f"local model {local_model} was asked for; {run.path} kept no checkpoint, and its "
            f"final weights are the average of its {config.strategy.models} local models.",
            hint="leave the number out for the average, or train with "
            "training.checkpoint_policy=final, interval or explicit to keep every local model",
        )
    result = run.read_result()
    model = load_pretrained(run.weights, device=device, trainable=False)
    model.kernels = judging_execution(config.runtime, device).kernels
    return Trained(
        weights=run.weights,
        step=result["steps"],
        model=model,
        local_model=local_model,
        config=config,
        cache_identity=result["cache_identity"],
        device=device,
    )


def _newest_sound(path: Path) -> Checkpoint:
    folder = RunFolder(path)
    problems = []
    for listed in reversed(folder.complete_checkpoints()):
        try:
            return load_checkpoint(listed.folder)
        except CheckpointError as error:
            problems.append(error.message)
    if problems:
        raise CheckpointError(f"no checkpoint of {path} verifies:\n" + "\n".join(problems))
    if (path / "config.json").is_file():
        raise UsageError(
            f"{path} is one model by itself; the held-out text belongs to the run that trained it.",
            hint="name the run's folder, or a step-... folder in its checkpoints",
        )
    raise UsageError(
        f"{path} holds neither a checkpoint nor final weights.",
        hint="name a run's folder, or a step-... folder in its checkpoints",
    )
