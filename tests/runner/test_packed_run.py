"""Whole runs of packed local models: the shipped recipe in small, stops, kills, other budgets."""

import json
import logging
import math
import signal
import sys
from pathlib import Path

import pytest
import yaml
from in_a_process import run_in_a_process

from atoll import faults
from atoll.config.recipes import find_recipe
from atoll.errors import AtollError, NonFiniteError, StateMismatchError
from atoll.runner import build, run
from atoll.runner.changes import check_changes

INTERVAL = {"checkpoint_policy": "interval"}
PACKED = {"placement": "packed", "models": 4}
GOSSIP = PACKED | {
    "kind": "gossip",
    "topology": "one_peer_base2",
    "scheme": "atc",
    "consensus_power": 0.5,
    "consensus_start_fraction": 0.25,
}
DILOCO = PACKED | {"kind": "diloco", "local_steps": 5}

strategies = pytest.mark.parametrize("strategy", [GOSSIP, DILOCO], ids=["gossip", "diloco"])


def same_end(found: dict, wanted: dict) -> bool:
    names = ("status", "steps", "cursor", "state_digests", "parameter_digest", "validation", "best")
    return all(found[name] == wanted[name] for name in names)


def test_the_shipped_packed_recipe_trains_in_small(recipe):
    layer = yaml.safe_load(find_recipe(Path("packed8-20m-awc")).read_text(encoding="utf-8"))
    config = recipe(strategy=layer["strategy"], optimizer={"beta1": 0.95, "beta2": 0.999})
    assert config.strategy.models == 8
    result = run(config)
    assert (result.status, result.step) == ("finished", 12)
    # Twelve updates of made-up tokens, most of which follow from the last: below an even guess.
    assert result.facts["validation_loss_nats_per_token"] < math.log(64)
    lines = (config.runtime.output_dir / "metrics.jsonl").read_text().splitlines()
    sent = sum(json.loads(line).get("traffic_payload_bytes", 0) for line in lines)
    assert sent == 12 * 4 * result.facts["parameters"]  # its float32 weights in every update


@strategies
@pytest.mark.parametrize("step", [1, 4, 5, 6, 11])
def test_a_packed_run_stopped_and_resumed_equals_an_unbroken_one(recipe, tmp_path, strategy, step):
    whole = run(recipe(strategy=strategy, runtime={"output_dir": tmp_path / "whole"}))
    config = recipe(strategy=strategy)
    faults.arm(f"train.after_update:{step}=interrupt")
    stopped = run(config)
    faults.disarm()
    assert (stopped.status, stopped.step) == ("interrupted", step)
    resumed = run(config, resume=config.runtime.output_dir)
    assert same_end(resumed.facts, whole.facts)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.slow
@strategies
def test_a_packed_run_killed_and_resumed_equals_an_unbroken_one(recipe, tmp_path, strategy):
    whole = run(recipe(strategy=strategy, runtime={"output_dir": tmp_path / "whole"}))
    config = recipe(strategy=strategy, training=INTERVAL)
    assert run_in_a_process(config, fault="train.after_update:6=kill") == -signal.SIGKILL
    assert run_in_a_process(config, fault="", resume=True) == 0
    found = json.loads((config.runtime.output_dir / "result.json").read_text())
    assert found["resumed_from_step"] == 4
    assert same_end(found, whole.facts)


def test_another_topology_on_resume_is_refused_with_both_names(recipe):
    faults.arm("train.after_update:4=interrupt")
    run(recipe(strategy=GOSSIP))
    faults.disarm()
    config = recipe(strategy=GOSSIP | {"topology": "complete"})
    with pytest.raises(StateMismatchError, match="topology: 'one_peer_base2' -> 'complete'"):
        run(config, resume=config.runtime.output_dir)


def test_a_longer_budget_is_refused_where_it_moves_adaptive_consensus(recipe):
    held = {"name": "wsd", "warmup_steps": 3, "decay_fraction": 0.01}
    was, now = (recipe(epochs=n, strategy=GOSSIP, lr_schedule=held) for n in (1, 3))
    # Of 4 updates the second is adaptive, of 12 the fourth; the rates of both are the same.
    check_changes(was, now, step=1)
    with pytest.raises(StateMismatchError, match=r"gives update 2 another share of mixing when"):
        check_changes(was, now, step=2)
    always = GOSSIP | {"consensus_start_fraction": 0.0}
    was, now = (recipe(epochs=n, strategy=always, lr_schedule=held) for n in (1, 3))
    check_changes(was, now, step=4)


@pytest.mark.parametrize(
    ("local_steps", "told"),
    [
        (
            3,
            "the run ends 1 updates after its last outer step (4 updates, strategy.local_steps 3): "
            "what is judged and exported at its end is the average of the local models",
        ),
        (4, None),
        (
            5,
            "strategy.local_steps is 5 and the run has 4 updates, so no outer step is taken: the "
            "local models never exchange, and their average is judged; set it to 4 or less",
        ),
    ],
)
def test_a_run_that_ends_between_outer_steps_says_what_is_judged(recipe, caplog, local_steps, told):
    with caplog.at_level(logging.INFO, logger="atoll"):
        result = run(recipe(epochs=1, strategy=DILOCO | {"local_steps": local_steps}))
    log = (result.folder / "run.log").read_text()
    assert told in log if told else "outer step" not in log


@pytest.mark.parametrize("strategy", [GOSSIP, DILOCO], ids=["gossip", "diloco"])
def test_weights_that_are_no_numbers_end_the_run_by_name(recipe, strategy):
    config = recipe(
        strategy=strategy,
        optimizer={"lr": 3e38},
        lr_schedule={"warmup_steps": 0},
        training={"log_every": 1},
    )
    with pytest.raises(NonFiniteError, match=r"update 1 parameter .* of local model \d is not"):
        run(config)
    facts = json.loads((config.runtime.output_dir / "result.json").read_text())
    assert facts["status"] == "failed"
    assert "is not finite" in facts["error"]


def test_models_beyond_all_memory_are_an_error_with_a_remedy(recipe, monkeypatch):
    def no_memory(*arguments, **settings):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 TB")

    monkeypatch.setattr(build, "Llama", no_memory)
    with pytest.raises(AtollError, match="4 local models: DefaultCPUAllocator") as error:
        run(recipe(strategy=GOSSIP))
    assert "fewer strategy.models" in str(error.value.hint)
