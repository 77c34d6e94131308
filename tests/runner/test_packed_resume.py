"""Packed runs after SIGKILL: the end is that of a run which never stopped, in every bit."""

import json
import signal
import sys

import pytest
from in_a_process import run_in_a_process

from atoll import faults
from atoll.checkpoint.load import load_checkpoint
from atoll.config.budget import plan_budget
from atoll.errors import StateMismatchError
from atoll.files import MIB
from atoll.runner import fit, run
from atoll.runner.plot import read_metrics

GOSSIP = {
    "kind": "gossip",
    "placement": "packed",
    "models": 4,
    "topology": "one_peer_exponential",
    "scheme": "awc",
}
CASES = {
    "gossip awc one_peer_exponential of 4": {"strategy": GOSSIP},
    # 9 sequences an update, so that 3 models have 3 each.
    "adaptive gossip atc one_peer_base2 of 3": {
        "strategy": GOSSIP
        | {
            "models": 3,
            "topology": "one_peer_base2",
            "scheme": "atc",
            "consensus_power": 0.5,
            "consensus_start_fraction": 0.25,
        },
        "training": {"batch_tokens": 144},
    },
    # Kept after 4 and killed after 8 updates, each time between two outer steps; by then the
    # momentum of the outer step after 3 decides where the next ones lead.
    "diloco with momentum": {
        "strategy": {
            "kind": "diloco",
            "placement": "packed",
            "models": 4,
            "local_steps": 3,
            "outer_momentum": 0.9,
        }
    },
}
TIMES = ("seconds", "targets_per_second", "time_seconds")


def comparable_metrics(folder) -> list[dict]:
    """Return all lines about training and evaluation, without times."""
    return [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in read_metrics(folder / "metrics.jsonl")
        if line["event"] in ("train", "evaluation", "final")
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_as_one_that_was_left_alone(recipe, tmp_path, case):
    sections = CASES[case]
    training = sections.get("training", {}) | {"checkpoint_policy": "interval", "log_every": 3}
    config = recipe(strategy=sections["strategy"], training=training)
    place = {"output_dir": tmp_path / "whole"}
    whole = run(recipe(strategy=sections["strategy"], training=training, runtime=place))
    assert run_in_a_process(config, fault="train.after_update:6=kill") == -signal.SIGKILL
    assert run_in_a_process(config, fault="", resume=True) == 0
    folder = config.runtime.output_dir
    found = json.loads((folder / "result.json").read_text())
    assert found["resumed_from_step"] == 4
    assert set(found["state_digests"]) == {"model", "optimizer", "strategy", "generator"}
    for name in (
        *("status", "steps", "cursor", "state_digests", "parameter_digest"),
        *("validation", "best", "strategy", "training_targets"),
    ):
        assert found[name] == whole.facts[name], name
    assert comparable_metrics(folder) == comparable_metrics(whole.folder)
    assert (folder / "best.json").read_bytes() == (whole.folder / "best.json").read_bytes()


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_as_large_as_was_reckoned(recipe, case):
    sections = CASES[case] | {"epochs": 1}
    config = recipe(**sections)
    folder = run(config).folder
    (path,) = (folder / "checkpoints").glob("step-*/rank-000.safetensors")
    parameters = plan_budget(config).parameters
    saved = fit.checkpoint_bytes(config, parameters)
    # What is left is the file's header and the state of torch's generator.
    assert 0 < path.stat().st_size - saved < MIB / 16


def test_the_diloco_case_is_resumed_with_a_momentum_that_is_not_zero(recipe):
    """Control: with a momentum of zero the case above could not see it being lost."""
    config = recipe(epochs=1, **CASES["diloco with momentum"])
    folder = run(config).folder
    saved = load_checkpoint(folder / "checkpoints" / "step-00000004").snapshot.under("strategy")
    assert saved.tensors["momentum"].abs().max() > 0


@pytest.mark.parametrize(
    ("other", "lines"),
    [
        (
            {"topology": "complete", "scheme": "atc", "models": 2},
            [
                "strategy.models: 4 -> 2",
                "strategy.scheme: 'awc' -> 'atc'",
                "strategy.topology: 'one_peer_exponential' -> 'complete'",
            ],
        ),
        ({"consensus_power": 1.0}, ["strategy.consensus_power: None -> 1.0"]),
        (
            {"kind": "diloco", "topology": None, "scheme": None},
            [
                "strategy.kind: 'gossip' -> 'diloco'",
                "strategy.scheme: 'awc' -> None",
                "strategy.topology: 'one_peer_exponential' -> None",
            ],
        ),
    ],
)
def test_another_strategy_on_resume_is_refused_with_every_difference(recipe, other, lines):
    config = recipe(epochs=1, strategy=GOSSIP)
    faults.arm("train.after_update:2=interrupt")
    run(config)
    faults.disarm()
    before = (config.runtime.output_dir / "resolved.yaml").read_bytes()
    with pytest.raises(StateMismatchError) as raised:
        run(recipe(epochs=1, strategy=GOSSIP | other), resume=config.runtime.output_dir)
    assert raised.value.message.splitlines()[1:] == lines
    assert (config.runtime.output_dir / "resolved.yaml").read_bytes() == before
