"""What is judged and opened of packed local models: their average, or one of them by its number."""

import json

import pytest
import torch

from atoll.checkpoint.load import load_checkpoint
from atoll.cli.main import run as atoll
from atoll.config.runtime import RuntimeConfig
from atoll.data.cache import Cache
from atoll.errors import UsageError
from atoll.evaluation.loss import evaluate_loss
from atoll.model.huggingface import load_pretrained
from atoll.model.llama import Llama
from atoll.runner import run
from atoll.runner.build import build
from atoll.runner.judge import Judge
from atoll.runner.opened import open_model
from atoll.runner.trained import evaluate_trained, judging_execution, open_trained
from atoll.tensors import parameter_digest
from atoll.train.loop import train

CPU = torch.device("cpu")
MODELS = 4
PACKED = {"placement": "packed", "models": MODELS}
STRATEGIES = {
    "gossip": PACKED | {"kind": "gossip", "topology": "one_peer_exponential", "scheme": "awc"},
    # Of the checkpoints after 4, 8 and 12 updates only the second one is made at the parent.
    "diloco": PACKED | {"kind": "diloco", "local_steps": 8},
}


@pytest.fixture(scope="module")
def folders(make_recipe, tmp_path_factory):
    """Folders of finished runs of 12 updates, each with checkpoints after 4, 8 and 12."""
    place = tmp_path_factory.mktemp("packed")
    return {
        kind: run(
            make_recipe(
                strategy=strategy,
                training={"checkpoint_policy": "interval"},
                runtime={"output_dir": place / kind},
            )
        ).folder
        for kind, strategy in STRATEGIES.items()
    }


@pytest.fixture(params=sorted(STRATEGIES))
def folder(folders, request):
    return folders[request.param]


def checkpoint(folder, step: int):
    return folder / "checkpoints" / f"step-{step:08d}"


def digest(model: Llama) -> str:
    return parameter_digest(model.arena.named())


def saved_weights(folder, step: int) -> dict[str, torch.Tensor]:
    """Return the weights of all local models after an update, [N, *shape] each."""
    return load_checkpoint(checkpoint(folder, step)).snapshot.under("model").tensors


@pytest.mark.parametrize("step", [4, 8, 12])
def test_the_model_judged_is_the_average_taken_in_float64(folder, step):
    judged = open_trained(checkpoint(folder, step), device=CPU).model.arena.named()
    for name, weights in saved_weights(folder, step).items():
        mean = weights.double().mean(dim=0, keepdim=True)
        # At most N + 3 roundings to float32, of values that are at most twice the largest weight.
        bound = (MODELS + 3) * 2 * weights.abs().amax(dim=0) * 2**-24
        assert ((judged[name].double() - mean).abs() <= bound).all(), name


def test_the_final_loss_is_that_of_the_average_taken_in_float64(folder):
    by_hand = Llama(open_trained(folder, device=CPU).config.model, seed=None, trainable=False)
    for name, weights in saved_weights(folder, 12).items():
        by_hand.arena.view(name).copy_(weights.double().mean(dim=0, keepdim=True))
    trained = open_trained(folder, device=CPU)
    with build(trained.config, Cache(trained.config.data.cache_path), CPU) as job:
        wanted = evaluate_loss(by_hand, job.validation, batch_size=5)
    result = json.loads((folder / "result.json").read_text())
    # Sums of 699 losses in float32, each right to a few units in the last place.
    assert result["validation_loss_nats_per_token"] == pytest.approx(
        wanted.nats_per_token, rel=1e-6
    )


def test_run_checkpoint_export_and_evaluation_have_one_digest(folder):
    result = json.loads((folder / "result.json").read_text())
    wanted = result["parameter_digest"]
    trained = open_trained(folder, device=CPU)
    assert trained.step == 12
    assert digest(trained.model) == wanted
    assert digest(load_pretrained(folder / "weights")) == wanted
    assert digest(open_model(folder, device=CPU).model) == wanted
    assert evaluate_trained(trained, full=True).facts() == result["validation"]


def test_the_best_epoch_names_the_average_of_its_checkpoint(folder):
    best = json.loads((folder / "best.json").read_text())
    trained = open_trained(checkpoint(folder, best["step"]), device=CPU)
    assert digest(trained.model) == best["parameter_digest"]
    found = evaluate_trained(trained, full=False)
    assert found.nats_per_token == best["loss_nats_per_token"]


def test_diloco_is_judged_at_its_parent_right_after_an_outer_step(folders):
    for step, at_parent in ((4, False), (8, True), (12, False)):
        path = checkpoint(folders["diloco"], step)
        parent_P = load_checkpoint(path).snapshot.tensors["strategy.parent"]
        judged_P = open_trained(path, device=CPU).model.arena.data_NP[0]
        assert torch.equal(judged_P, parent_P) == at_parent


def test_each_local_model_is_opened_as_it_was_saved(folder):
    weights = saved_weights(folder, 12)
    digests = set()
    for number in range(MODELS):
        trained = open_trained(folder, device=CPU, local_model=number)
        assert trained.local_model == number
        for name, view in trained.model.arena.named().items():
            assert torch.equal(view, weights[name][number : number + 1])
        digests.add(digest(trained.model))
    assert len(digests) == MODELS


@pytest.mark.parametrize("number", [-1, 4])
def test_a_number_that_no_local_model_has_is_refused_with_those_there_are(folder, number):
    with pytest.raises(UsageError, match=f"local model {number} was asked for; .*, 0 to 3"):
        open_trained(folder, device=CPU, local_model=number)


def test_a_run_of_one_model_has_number_0_alone(recipe):
    path = run(recipe(epochs=1)).folder
    average = open_trained(path, device=CPU)
    assert digest(open_trained(path, device=CPU, local_model=0).model) == digest(average.model)
    with pytest.raises(UsageError, match="holds one model, number 0"):
        open_trained(path, device=CPU, local_model=1)


def test_final_weights_alone_are_the_average_and_say_how_to_keep_the_rest(recipe):
    path = run(
        recipe(epochs=1, strategy=STRATEGIES["gossip"], training={"checkpoint_policy": "none"})
    ).folder
    result = json.loads((path / "result.json").read_text())
    assert digest(open_trained(path, device=CPU).model) == result["parameter_digest"]
    with pytest.raises(UsageError, match="final weights are the average of its 4") as raised:
        open_trained(path, device=CPU, local_model=2)
    assert "training.checkpoint_policy" in str(raised.value.hint)


def test_a_model_folder_has_no_local_models(folder):
    with pytest.raises(UsageError, match="is one model by itself"):
        open_model(folder / "weights", device=CPU, local_model=0)


def test_what_is_judged_takes_one_piece_of_memory_for_a_whole_run(recipe, cache_path):
    with build(recipe(strategy=STRATEGIES["gossip"]), Cache(cache_path), CPU) as job:
        judge = Judge(job, lambda: False)
        first = judge.model()
        before = first.arena.data_NP.clone()
        for _ in train(job.state, job.loader, job.plan, should_stop=lambda: True):
            pass
        assert judge.model() is first
        assert not torch.equal(first.arena.data_NP, before)


def test_a_single_model_is_judged_where_it_is(recipe, cache_path):
    with build(recipe(), Cache(cache_path), CPU) as job:
        assert Judge(job, lambda: False).model() is job.state.model


@pytest.mark.parametrize(
    "trained_with", [{"kernels": True}, {"capture": True}, {"compile": True}, {}]
)
def test_a_recipe_that_insists_on_a_gpu_is_evaluated_on_a_cpu(trained_with):
    execution = judging_execution(RuntimeConfig.model_validate(trained_with), CPU)
    assert (execution.kernels, execution.compiled, execution.captured) == (False, False, False)
    assert execution.amp is None


def test_a_run_whose_recipe_asks_for_kernels_is_opened_on_a_cpu(recipe):
    path = run(recipe(epochs=1, training={"checkpoint_policy": "none"})).folder
    file = path / "resolved.yaml"
    file.write_text(file.read_text().replace("kernels: auto", "kernels: true"))
    trained = open_trained(path, device=CPU)
    assert trained.config.runtime.kernels is True
    result = json.loads((path / "result.json").read_text())
    assert evaluate_trained(trained, full=True).facts() == result["validation"]


def test_export_writes_the_average_or_the_local_model_that_is_named(folders, tmp_path, capsys):
    folder = folders["gossip"]
    for number in (None, 3):
        output = tmp_path / str(number)
        words = ["export", str(folder), "--output", str(output)]
        more = [] if number is None else ["--local-model", str(number)]
        assert atoll([*words, *more]) == 0
        wanted = open_trained(folder, device=CPU, local_model=number).model
        assert digest(load_pretrained(output)) == digest(wanted)
    files = {
        name: (tmp_path / "3" / name).read_bytes() for name in ("config.json", "tokenizer.json")
    }
    for name, content in files.items():
        assert (tmp_path / "None" / name).read_bytes() == content
    capsys.readouterr()
    taken = str(tmp_path / "taken")
    assert atoll(["export", str(folder), "--output", taken, "--local-model", "4"]) == 2
    err = capsys.readouterr().err
    assert "local model 4 was asked for" in err
    assert "hint: leave the number out for the average of all" in err


def test_transformers_computes_the_same_scores_from_the_exported_average(folders, tmp_path):
    from transformers import AutoModelForCausalLM

    assert atoll(["export", str(folders["diloco"]), "--output", str(tmp_path / "out")]) == 0
    ids = torch.tensor([[3, 10, 17, 24]])
    ours = open_trained(folders["diloco"], device=CPU).model
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
        error = (ours.logits(ids[None])[0] - exact).abs().max()
    assert error < 1e-5 * exact.abs().max()  # float32 products in another order


def test_evaluate_scores_the_average_or_the_local_model_that_is_named(folders, capsys):
    folder = folders["gossip"]
    result = json.loads((folder / "result.json").read_text())
    words = ["evaluate", str(folder), "--full", "--device", "cpu"]
    assert atoll([*words, "--json"]) == 0
    average = json.loads(capsys.readouterr().out)
    assert average["loss_nats_per_token"] == result["validation_loss_nats_per_token"]
    assert (average["local_models"], average["local_model"]) == (4, None)
    assert atoll([*words, "--json", "--local-model", "1"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["local_model"] == 1
    assert one["loss_nats_per_token"] != average["loss_nats_per_token"]
    assert atoll(words) == 0
    assert "(update 12, average of 4 local models)" in capsys.readouterr().out
    assert atoll([*words, "--local-model", "1"]) == 0
    assert "(update 12, number 1 of 4 local models)" in capsys.readouterr().out


def test_generate_goes_on_with_the_local_model_that_is_named(folders, capsys):
    from atoll.model.generate import generate

    folder = folders["gossip"]
    words = ["generate", str(folder), "--prompt", "w3 w10", "--max-tokens", "6"]
    for number in (None, 2):
        more = [] if number is None else ["--local-model", str(number)]
        assert atoll([*words, "--device", "cpu", *more]) == 0
        model = open_trained(folder, device=CPU, local_model=number).model
        (found,) = generate(model, [[3, 10]], max_tokens=6)
        assert capsys.readouterr().out == " ".join(f"w{id}" for id in found.ids) + "\n"
