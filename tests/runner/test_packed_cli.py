"""Packed local models as a person meets them at the command line, from a recipe to an export."""

import json
import shutil

import pytest

from atoll import faults
from atoll.cli.main import run as atoll
from atoll.config.explain import dump_resolved

SMALL = ["--set", "training.batch_tokens=128", "--set", "training.micro_batch_size=1"]
"""The shipped layer's batch is for 20 million parameters; 8 sequences are one for each model."""


@pytest.fixture
def recipe_file(recipe, tmp_path):
    """A recipe of one model and 2 epochs (8 updates) on the made-up cache, as a file."""
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_resolved(recipe(epochs=2, training={"checkpoint_policy": "interval"})))
    return path


def packed(recipe_file) -> list[str]:
    """Return the words that train it with the shipped packed layer on top."""
    return ["train", "--config", str(recipe_file), "--config", "packed8-20m-awc", *SMALL]


def test_the_shipped_layer_trains_judges_exports_and_verifies(recipe_file, tmp_path, capsys):
    assert atoll([*packed(recipe_file), "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    run, strategy = str(tmp_path / "run"), result["strategy"]
    assert (result["status"], result["steps"], strategy["models"]) == ("finished", 8, 8)
    assert strategy["topology"] == "one_peer_exponential"
    assert "8 local models" in err

    assert atoll(["evaluate", run, "--full", "--device", "cpu", "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["loss_nats_per_token"]
    assert loss == result["validation_loss_nats_per_token"]

    assert atoll(["generate", run, "--prompt", "w3 w10", "--max-tokens", "4"]) == 0
    assert len(capsys.readouterr().out.split()) == 4

    for name, more in (("average", []), ("last", ["--local-model", "7"])):
        assert atoll(["export", run, "--output", str(tmp_path / name), *more]) == 0
    weights = [
        (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("run/weights", "average", "last")
    ]
    assert weights[0] == weights[1] != weights[2]

    capsys.readouterr()
    assert atoll(["checkpoint", "verify", run]) == 0
    assert capsys.readouterr().out.count(": sound") == 2


def test_a_resumed_run_compares_equal_to_one_that_was_not_stopped(recipe_file, tmp_path, capsys):
    whole = tmp_path / "whole"
    assert atoll([*packed(recipe_file), "--set", f"runtime.output_dir={whole}"]) == 0
    faults.arm("train.after_update:3=interrupt")
    assert atoll(packed(recipe_file)) == 130
    faults.disarm()
    run = tmp_path / "run"
    assert atoll(["train", "--resume", str(run)]) == 0
    capsys.readouterr()
    assert atoll(["checkpoint", "compare", str(run), str(whole)]) == 0
    assert capsys.readouterr().out.startswith("equal: ")
    earlier = whole / "checkpoints" / "step-00000004"
    assert atoll(["checkpoint", "compare", str(earlier), str(whole)]) == 1
    assert "tensor model.embedding: " in capsys.readouterr().out


def test_resuming_with_another_scheme_exits_2_and_lists_it(recipe_file, tmp_path, capsys):
    faults.arm("train.after_update:3=interrupt")
    atoll(packed(recipe_file))
    faults.disarm()
    capsys.readouterr()
    assert atoll(["train", "--resume", str(tmp_path / "run"), "--set", "strategy.scheme=atc"]) == 2
    assert "strategy.scheme: 'awc' -> 'atc'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["strategy.models=3"],
            "training.batch_tokens 128 is not a multiple of strategy.models x "
            "model.context_length = 3 x 16 = 48. Set it to 96 or 144.",
        ),
        (
            ["strategy.models=16"],  # more models than the 8 sequences of an update
            "training.batch_tokens 128 is not a multiple of strategy.models x "
            "model.context_length = 16 x 16 = 256. Set it to 256.",
        ),
        (
            ["strategy.models=2", "training.micro_batch_size=3"],
            "training.micro_batch_size 3 does not divide the 4 sequences that one update gives "
            "each local model. Set it to 2 or 4.",
        ),
        (
            ["strategy.models=1"],
            "strategy.placement packed holds 1 local model; it needs at least 2.",
        ),
    ],
)
def test_a_batch_that_the_models_cannot_share_exits_2_with_what_they_can(
    recipe_file, tmp_path, capsys, settings, message
):
    words = [word for setting in settings for word in ("--set", setting)]
    assert atoll([*packed(recipe_file), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", ["export --output out", "evaluate", "generate --prompt w3"])
def test_a_local_model_that_was_not_kept_exits_2_and_says_how_to_keep_it(
    recipe_file, tmp_path, capsys, monkeypatch, verb
):
    monkeypatch.chdir(tmp_path)
    words = [*packed(recipe_file), "--set", "training.checkpoint_policy=none"]
    assert atoll(words) == 0
    run = tmp_path / "run"
    name, *options = verb.split()
    assert atoll([name, str(run), *options]) == 0
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    capsys.readouterr()
    assert atoll([name, str(run), *options, "--local-model", "0"]) == 2
    assert capsys.readouterr().err == (
        f"local model 0 was asked for; {run} kept no checkpoint, and its final weights are the "
        "average of its 8 local models.\n\n"
        "hint: leave the number out for the average, or train with "
        "training.checkpoint_policy=final, interval or explicit to keep every local model\n"
    )
    assert not (tmp_path / "out").exists()
