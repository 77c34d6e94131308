"""Weights of a run or of one checkpoint, opened for reading: to evaluate, generate or export."""

from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.checkpoint.load import Checkpoint, load_checkpoint
from atoll.checkpoint.records import MANIFEST
from atoll.config.load import load_config
from atoll.config.schema import RunConfig
from atoll.data.cache import Cache
from atoll.data.tokenizer import Tokenizer
from atoll.errors import CheckpointError, StateMismatchError, UsageError
from atoll.evaluation.loss import LossResult, evaluate_loss, subset_rows
from atoll.model.huggingface import load_pretrained
from atoll.model.llama import Llama
from atoll.runner.build import cache_folder, open_split
from atoll.runner.folder import RunFolder
from atoll.train.device import resolve_amp


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained model of one.

    Attributes:
        weights: The folder that they were read from.
        step: Updates behind them.
        model: On its device, without gradients.
        config: The recipe that trained it.
        cache_identity: The tokens that it was trained on.
        device: Where it is.
    """

    weights: Path
    step: int
    model: Llama
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


def open_trained(path: Path, *, device: torch.device) -> Trained:
    """Load the newest sound checkpoint of a run, its final weights, or one checkpoint.

    The final weights count where a run kept no checkpoint. Nothing is moved or changed, so that it
    may be done while the run goes on.

    Args:
        path: A run's folder or a checkpoint's.
        device: Where the model is wanted.

    Raises:
        UsageError: There is no checkpoint.
        CheckpointError: None verifies; says what is wrong with each.
    """
    run = RunFolder(path)
    if not (path / MANIFEST).is_file() and run.exported and not run.complete_checkpoints():
        return _exported(run, device)
    found = load_checkpoint(path) if (path / MANIFEST).is_file() else _newest_sound(path)
    config = RunConfig.model_validate(found.manifest.run["config"])
    model = Llama(config.model, device=device, trainable=False)
    for name, view in model.arena.named().items():
        # One of several local models stands for all where they were packed; N = 1 is that one.
        view.copy_(found.snapshot.tensors[f"model.{name}"][:1])
    return Trained(
        weights=found.folder,
        step=found.manifest.step,
        model=model,
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
            amp=resolve_amp(config.runtime.amp, trained.device),
        )
    assert found is not None, "nothing asks it to stop"
    return found


def _exported(run: RunFolder, device: torch.device) -> Trained:
    result = run.read_result()
    return Trained(
        weights=run.weights,
        step=result["steps"],
        model=load_pretrained(run.weights, device=device, trainable=False),
        config=load_config([run.recipe_file()]).config,
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
    raise UsageError(
        f"{path} holds neither a checkpoint nor final weights.",
        hint="name a run's folder, or a step-... folder in its checkpoints",
    )
