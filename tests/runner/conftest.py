"""A cache of made-up tokens, and recipes that train on it within a second."""

import sys
from pathlib import Path

import pytest

from atoll.config.schema import RunConfig
from atoll.data.cachewriter import write_cache

sys.path.insert(0, str(Path(__file__).parent))

from made_up import BATCH_TOKENS, MODEL, VOCAB, budget, made_up_tokens, tokenizer_json


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
