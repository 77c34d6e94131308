"""A cache of made-up tokens, and recipes that train on it within a second."""

import sys
from pathlib import Path

import numpy as np
import pytest

from atoll.config.model import parameter_count
from atoll.config.schema import RunConfig
from atoll.data.cachewriter import write_cache

sys.path.insert(0, str(Path(__file__).parent))

VOCAB = 64
MODEL = {
    "vocab_size": VOCAB,
    "layers": 2,
    "width": 32,
    "heads": 2,
    "ffn_width": 48,
    "context_length": 16,
}
BATCH_TOKENS = 128
EPOCH_STEPS = 4


def tokenizer_json() -> bytes:
    """Return a tokenizer of the words w0 ... w63."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer.to_str().encode()


def made_up_tokens(count: int, seed: int) -> np.ndarray:
    """Return ids where the next one mostly follows from the last, so that there is to learn."""
    random = np.random.default_rng(seed)
    jumps = np.where(random.random(count) < 0.8, 7, random.integers(0, VOCAB, count))
    return np.cumsum(jumps) % VOCAB


@pytest.fixture(scope="session")
def cache_path(tmp_path_factory) -> Path:
    """A finished cache of 6 small shards."""
    folder = tmp_path_factory.mktemp("cache") / "tokens"
    write_cache(
        folder,
        train=made_up_tokens(12_000, 0),
        validation=made_up_tokens(700, 1),
        shard_tokens=2048,
        vocab_size=VOCAB,
        tokenizer_json=tokenizer_json(),
    )
    return folder


@pytest.fixture
def recipe(make_recipe, tmp_path):
    """Return a function that makes recipes of runs in this test's own folder."""

    def make(*, epochs: int = 3, **sections: dict) -> RunConfig:
        sections["runtime"] = {"output_dir": tmp_path / "run"} | sections.get("runtime", {})
        return make_recipe(epochs=epochs, **sections)

    return make


@pytest.fixture(scope="session")
def make_recipe(cache_path):
    """Return a function that makes recipes; sections are given as mappings."""

    def make(*, epochs: int = 3, **sections: dict) -> RunConfig:
        model = MODEL | sections.pop("model", {})
        defaults: dict[str, dict] = {
            "model": model,
            "data": {"cache_path": cache_path},
            "optimizer": {"lr": 0.01},
            "lr_schedule": {"warmup_steps": 3},
            "training": budget(epochs) | {"batch_tokens": BATCH_TOKENS, "micro_batch_size": 4},
            "evaluation": {"subset_sequences": 16},
            "runtime": {"device": "cpu", "deterministic": True},
        }
        return RunConfig.model_validate(
            {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
        )

    return make


def budget(epochs: int) -> dict[str, float]:
    """Return the ratios of a budget of `epochs` virtual epochs of EPOCH_STEPS updates."""
    from atoll.config.model import ModelConfig

    parameters = parameter_count(ModelConfig(**MODEL))
    epoch = round(EPOCH_STEPS * BATCH_TOKENS / parameters, 4)
    return {
        "tokens_per_parameters": round(epochs * epoch, 4),
        "epoch_tokens_per_parameters": epoch,
    }
