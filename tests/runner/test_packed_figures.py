"""What metrics.jsonl, trackers, the progress line and result.json say about packed local models."""

import io
import json
from types import SimpleNamespace

import pytest
import torch

from atoll import faults
from atoll.checkpoint.load import load_checkpoint
from atoll.runner import run
from atoll.runner.progress import Lines

MODELS = 4
PACKED = {"placement": "packed", "models": MODELS}
GOSSIP = PACKED | {"kind": "gossip", "topology": "one_peer_ring", "scheme": "awc"}
ADAPTIVE = GOSSIP | {"consensus_power": 0.5, "consensus_start_fraction": 0.5}
DILOCO = PACKED | {"kind": "diloco", "local_steps": 8, "outer_momentum": 0.5}


@pytest.fixture(scope="module")
def finished(make_recipe, tmp_path_factory):
    """Results of runs of 12 updates, read after 3, 4, 6, 8, 9 and 12 and kept after 4, 8 and 12."""
    place = tmp_path_factory.mktemp("packed")
    return {
        name: run(
            make_recipe(
                strategy=strategy,
                training={"checkpoint_policy": "interval", "log_every": 3},
                runtime={"output_dir": place / name},
            ),
            progress=Lines(stream := io.StringIO()),
        ).facts
        | {"folder": place / name, "shown": stream.getvalue()}
        for name, strategy in (("gossip", ADAPTIVE), ("diloco", DILOCO))
    }


def train_lines(folder) -> list[dict]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["event"] == "train"]


@pytest.mark.parametrize("kind", ["gossip", "diloco"])
def test_every_line_tells_how_far_the_models_are_from_their_mean(finished, kind):
    folder = finished[kind]["folder"]
    lines = {line["step"]: line for line in train_lines(folder)}
    assert all(line["consensus_distance"] >= 0 for line in lines.values())
    for step in (4, 8, 12):
        saved = load_checkpoint(folder / "checkpoints" / f"step-{step:08d}").snapshot
        weights_NP = torch.cat(
            [t.double().flatten(1) for t in saved.under("model").tensors.values()], dim=1
        )
        mean_P = weights_NP.mean(dim=0)
        distance = float((weights_NP - mean_P).square().sum(dim=1).mean().sqrt())
        # A float32 mean and a difference from it are off by some units in the last place of a
        # weight, 2^-24 of it, and the weights are less than 50 times as large as the differences.
        assert lines[step]["consensus_distance"] == pytest.approx(distance, rel=1e-5)
        relative = distance / float(mean_P.norm())
        assert lines[step]["consensus_distance_relative"] == pytest.approx(relative, rel=1e-5)
        assert (distance == 0) == (kind == "diloco" and step == 8)


def test_the_share_of_mixing_follows_the_rate_once_adaptive_consensus_has_begun(finished):
    for line in train_lines(finished["gossip"]["folder"]):
        wanted = 1.0 if line["step"] <= 6 else (line["lr"] / 0.01) ** 0.5
        assert line["mixing_weight"] == wanted


def test_an_outer_step_tells_its_length_in_the_line_that_ends_with_it(finished):
    found = {line["step"]: line for line in train_lines(finished["diloco"]["folder"])}
    assert [step for step, line in found.items() if "outer_step_norm" in line] == [8]
    assert found[8]["outer_step_norm"] > 0


@pytest.mark.parametrize("kind", ["gossip", "diloco"])
def test_losses_and_gradient_norms_are_told_for_each_model(finished, kind):
    for line in train_lines(finished[kind]["folder"]):
        losses, norms = line["local_losses_nats_per_token"], line["local_grad_norms"]
        assert len(losses) == len(norms) == MODELS
        assert len(set(losses)) == MODELS  # each read rows of its own
        assert line["min_local_loss_nats_per_token"] == min(losses)
        assert line["max_local_loss_nats_per_token"] == max(losses)
        assert line["last_loss_nats_per_token"] == pytest.approx(sum(losses) / 4, rel=1e-15)
        assert (line["min_local_grad_norm"], line["max_local_grad_norm"]) == (
            min(norms),
            max(norms),
        )
        assert line["grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-15)
        assert line["max_grad_norm"] >= max(norms)
        if line["updates"] == 1:
            assert line["loss_nats_per_token"] == pytest.approx(sum(losses) / 4, rel=1e-15)


def test_one_model_has_no_figures_of_several(recipe):
    facts = run(recipe(epochs=1)).facts
    (line,) = train_lines(recipe().runtime.output_dir)
    assert not [name for name in line if "local" in name or "consensus" in name]
    assert facts["strategy"] == {"kind": "single", "placement": "ranks", "models": 1}


def test_trackers_get_the_scalars_and_no_lists(recipe, monkeypatch):
    written = []
    tracker = SimpleNamespace(
        write=lambda numbers, *, step: written.append(numbers), close=lambda: None
    )
    monkeypatch.setattr("atoll.runner.compose.open_trackers", lambda *_, **__: [tracker])
    run(recipe(epochs=1, strategy=GOSSIP))
    numbers = next(each for each in written if "train/lr" in each)
    for name in ("consensus_distance", "mixing_weight", "max_local_loss_nats_per_token"):
        assert isinstance(numbers[f"train/{name}"], float)
    assert all(isinstance(value, float) for value in numbers.values())
    assert "train/local_losses_nats_per_token" not in numbers


def test_the_progress_line_tells_how_many_models_there_are_and_how_far_apart(finished):
    line = train_lines(finished["gossip"]["folder"])[0]
    wanted = (
        f"update 3/12  loss {line['loss_nats_per_token']:.4f}  "
        f"4 local models {line['consensus_distance']:.3g} from their mean  targets "
    )
    assert wanted in finished["gossip"]["shown"]


def test_the_result_says_how_the_models_shared_and_how_far_apart_they_ended(finished):
    gossip, diloco = (finished[kind]["strategy"] for kind in ("gossip", "diloco"))
    assert {name: gossip[name] for name in ADAPTIVE} == ADAPTIVE
    assert {name: diloco[name] for name in DILOCO} == DILOCO
    assert "topology" not in diloco
    for kind in ("gossip", "diloco"):
        last = train_lines(finished[kind]["folder"])[-1]
        assert finished[kind]["strategy"]["consensus_distance"] == last["consensus_distance"] > 0


def test_traffic_is_predicted_for_each_local_model_over_the_whole_run(finished):
    for kind, exchanges in (("gossip", 12), ("diloco", 1)):
        facts = finished[kind]
        lines = train_lines(facts["folder"])
        sent = facts["strategy"]["predicted_traffic_per_local_model"]
        weights = 4 * facts["parameters"] * exchanges
        # A peer gets all weights; an all-reduce puts 2 (N - 1) / N of them on the wire.
        wire = weights if kind == "gossip" else weights * 2 * 3 / 4
        assert sent == {"payload_bytes": weights, "wire_bytes": wire, "exchanges": exchanges}
        assert sum(line["traffic_payload_bytes"] for line in lines) == weights
        assert sum(line["traffic_wire_bytes"] for line in lines) == wire


def test_traffic_of_a_resumed_run_is_that_of_the_whole_run(recipe, finished):
    config = recipe(strategy=ADAPTIVE)
    faults.arm("train.after_update:7=interrupt")
    stopped = run(config).facts
    faults.disarm()
    resumed = run(config, resume=config.runtime.output_dir).facts
    name = "predicted_traffic_per_local_model"
    assert stopped["strategy"][name]["exchanges"] == 7
    assert resumed["strategy"] == finished["gossip"]["strategy"]
