"""The packaged demonstration: real text to a trained model that transformers loads, in small."""

import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from atoll.config.load import load_config
from atoll.config.recipes import shipped_recipes
from atoll.config.schema import RunConfig
from atoll.data.cache import Cache
from atoll.data.tokenizer import Tokenizer
from atoll.errors import AtollError, InterruptedRunError
from atoll.evaluation.baselines import gzip_bits_per_byte, unigram_bits_per_byte
from atoll.evaluation.loss import evaluate_loss
from atoll.files import write_json
from atoll.model.sampling import Sampler
from atoll.runner.build import open_or_prepare, open_split
from atoll.runner.compose import run
from atoll.runner.folder import RunFolder
from atoll.runner.opened import continue_text, open_model
from atoll.runner.progress import Progress

COMPARED_ROWS = 32
"""Held-out sequences whose loss is computed by atoll and by transformers."""

LOSS_TOLERANCE = 1e-5
"""Largest relative difference of the two losses; FP32 sums in another order differ by about 1e-6.
Source: measured, tests/model."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demonstration found.

    Attributes:
        run_folder: Where the run and its weights lie.
        steps: Updates made.
        training_targets: Targets trained on.
        model_bits_per_byte: Loss of the model on all held-out text.
        unigram_bits_per_byte: The same for token frequencies.
        gzip_bits_per_byte: Size of `gzip -9` of the same text.
        sample: A prompt and the model's continuation.
        atoll_loss_nats: Mean loss per target on some held-out sequences.
        transformers_loss_nats: The same by transformers, from the exported folder.
        seconds: Wall time of everything.
    """

    run_folder: str
    steps: int
    training_targets: int
    model_bits_per_byte: float
    unigram_bits_per_byte: float
    gzip_bits_per_byte: float
    sample: str
    atoll_loss_nats: float
    transformers_loss_nats: float
    seconds: float

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def run_demo(folder: Path, progress: Progress, *, overrides: list[str]) -> DemoResult:
    """Prepare, train, compare with two baselines, sample, export and load elsewhere.

    A second call makes another run over the same token cache; one that was stopped goes on.

    Args:
        folder: Gets the cache and the runs.
        progress: Where people look.
        overrides: Further `key=value` settings of the recipe `demo`.

    Raises:
        InterruptedRunError: A signal stopped the preparing or the training.
        AtollError: transformers computes another loss from the exported folder.
    """
    started = time.perf_counter()
    run_folder, resume = _next_run(folder / "runs")
    config = load_config(
        [shipped_recipes()["demo"]],
        [
            f"data.cache_dir={folder / 'caches'}",
            *overrides,
            f"runtime.output_dir={run_folder}",
        ],
    ).config
    cache = open_or_prepare(config, progress)
    trained = run(config, resume=resume, progress=progress)
    if trained.status != "finished":
        raise InterruptedRunError(
            f"stopped after update {trained.step}.", hint="run `atoll demo` again to go on"
        )
    progress.note("comparing with token frequencies and gzip -9 on the same held-out text")
    tokenizer = Tokenizer.from_cache(cache)
    unigram = unigram_bits_per_byte(cache)
    gzipped = gzip_bits_per_byte(cache, tokenizer)
    progress.note("loading the exported folder with transformers")
    ours, theirs = _losses(config, cache, RunFolder(run_folder).weights)
    result = DemoResult(
        run_folder=str(run_folder),
        steps=trained.step,
        training_targets=int(trained.facts["training_targets"]),
        model_bits_per_byte=trained.facts["validation_bits_per_byte"],
        unigram_bits_per_byte=unigram,
        gzip_bits_per_byte=gzipped,
        sample=_sample(RunFolder(run_folder).weights, config),
        atoll_loss_nats=ours,
        transformers_loss_nats=theirs,
        seconds=time.perf_counter() - started,
    )
    write_json(run_folder / "demo.json", result.facts())
    if abs(ours - theirs) > LOSS_TOLERANCE * abs(theirs):
        raise AtollError(
            f"transformers computes {theirs:.6f} nats from {RunFolder(run_folder).weights} where "
            f"atoll computes {ours:.6f}; they must agree within {LOSS_TOLERANCE:g}.",
            hint="please report this with the versions that `atoll doctor` prints",
        )
    return result


def _next_run(folder: Path) -> tuple[Path, Path | None]:
    """Return the run folder to use, and the same as one to resume where it was not finished."""
    numbers = [
        int(match[1])
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(r"demo-(\d+)", path.name))
    ]
    newest = max(numbers, default=0)
    found = folder / f"demo-{newest}"
    if newest and RunFolder(found).status not in (None, "finished"):
        return found, found
    return folder / f"demo-{newest + 1}", None


def _losses(config: RunConfig, cache: Cache, weights: Path) -> tuple[float, float]:
    """Return the exported model's mean loss on some held-out rows: by atoll, by transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from atoll.model.huggingface import load_pretrained

    with open_split(config, cache, torch.device("cpu"), "validation") as loader:
        rows = range(min(COMPARED_ROWS, loader.num_rows))
        ours = evaluate_loss(
            load_pretrained(weights), loader, rows=rows, batch_size=config.evaluation.batch_size
        )
        assert ours is not None, "nothing asks it to stop"
        disable_progress_bar()
        theirs = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
        total, count = 0.0, 0
        for row in rows:
            batch = loader.batch(row, 1)
            with torch.no_grad():
                logits_BTV = theirs(batch.inputs_BT).logits
            total += torch.nn.functional.cross_entropy(
                logits_BTV.flatten(0, 1), batch.targets_BT.flatten(), reduction="sum"
            ).item()
            count += int((batch.targets_BT >= 0).sum())
    return ours.nats_per_token, total / count


def _sample(weights: Path, config: RunConfig) -> str:
    """Return the recipe's prompt and what the exported model adds to it."""
    training = config.training
    prompt = training.sample_prompt or "def "
    pieces = continue_text(
        open_model(weights, device=torch.device("cpu")),
        prompt,
        max_tokens=training.sample_tokens,
        sampler=Sampler(temperature=0.8, top_p=0.95, seed=config.evaluation.seed),
    )
    return prompt + "".join(pieces)
