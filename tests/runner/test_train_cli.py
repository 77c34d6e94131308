"""The verbs train, evaluate and checkpoint as a person meets them: output, errors, exit codes."""

import json
import signal
import subprocess
import sys

import pytest

from atoll import faults
from atoll.cli.main import run as atoll
from atoll.config.explain import dump_resolved


@pytest.fixture
def recipe_file(recipe, tmp_path):
    """A recipe of 2 epochs (8 updates) on the made-up cache, as a file."""
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_resolved(recipe(epochs=2)))
    return path


def test_last_line_on_standard_output_is_the_runs_folder(recipe_file, tmp_path, capsys):
    assert atoll(["train", "--config", str(recipe_file), "--set", "training.log_every=4"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'run'}\n"
    assert "update 4/8  loss " in err
    assert "bits per byte" in err


def test_json_is_the_result(recipe_file, tmp_path, capsys):
    assert atoll(["train", "--config", str(recipe_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "run" / "result.json").read_text())


def test_interrupted_run_exits_130_and_resume_alone_goes_on(recipe_file, tmp_path, capsys):
    faults.arm("train.after_update:3=interrupt")
    assert atoll(["train", "--config", str(recipe_file)]) == 130
    faults.disarm()
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'run'}\n"
    assert "SIGINT: stopped after update 3 of 8." in err
    assert f"hint: atoll train --resume {tmp_path / 'run'}" in err
    assert atoll(["train", "--resume", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["resumed_from_step"] == 3


def test_resuming_with_another_recipe_exits_2_and_lists_it(recipe_file, tmp_path, capsys):
    faults.arm("train.after_update:3=interrupt")
    atoll(["train", "--config", str(recipe_file)])
    faults.disarm()
    capsys.readouterr()
    assert atoll(["train", "--resume", str(tmp_path / "run"), "--set", "optimizer.lr=0.5"]) == 2
    assert "optimizer.lr: 0.01 -> 0.5" in capsys.readouterr().err


def test_resumed_run_stays_in_its_folder_when_that_was_moved(recipe_file, tmp_path, capsys):
    faults.arm("train.after_update:3=interrupt")
    atoll(["train", "--config", str(recipe_file)])
    faults.disarm()
    (tmp_path / "run").rename(tmp_path / "moved")
    capsys.readouterr()
    assert atoll(["train", "--resume", str(tmp_path / "moved")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'moved'}\n"
    assert not (tmp_path / "run").exists()


def test_strategy_of_a_later_version_exits_2(recipe_file, tmp_path, capsys):
    arguments = ["--set", "strategy.kind=diloco"]
    assert atoll(["train", "--config", str(recipe_file), *arguments]) == 2
    assert "strategy.kind is diloco" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_evaluate_reports_the_end_of_the_run(recipe_file, tmp_path, capsys):
    atoll(["train", "--config", str(recipe_file), "--json"])
    result = json.loads(capsys.readouterr().out)
    run = str(tmp_path / "run")
    assert atoll(["evaluate", run, "--full", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss_nats_per_token"] == result["validation_loss_nats_per_token"]
    assert found["step"] == 8
    assert atoll(["evaluate", run, "--device", "cpu"]) == 0
    assert "bits per byte" in capsys.readouterr().out


def test_evaluate_takes_final_weights_where_no_checkpoint_was_kept(recipe_file, tmp_path, capsys):
    policy = ["--set", "training.checkpoint_policy=none", "--json"]
    atoll(["train", "--config", str(recipe_file), *policy])
    result = json.loads(capsys.readouterr().out)
    assert atoll(["evaluate", str(tmp_path / "run"), "--full", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weights"] == str(tmp_path / "run" / "weights")
    # The export splits and joins matrices but computes nothing.
    assert found["loss_nats_per_token"] == result["validation_loss_nats_per_token"]


def test_evaluate_of_an_empty_folder_exits_2(tmp_path, capsys):
    assert atoll(["evaluate", str(tmp_path), "--device", "cpu"]) == 2
    assert "neither a checkpoint nor final weights" in capsys.readouterr().err


def test_checkpoint_verbs_list_verify_and_compare(recipe_file, tmp_path, capsys):
    atoll(["train", "--config", str(recipe_file), "--set", "training.checkpoint_policy=interval"])
    capsys.readouterr()
    run = tmp_path / "run"
    assert atoll(["checkpoint", "list", str(run), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["step"] for entry in listed] == [4, 8]
    assert atoll(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": sound") == 2
    a, b = (entry["folder"] for entry in listed)
    assert atoll(["checkpoint", "compare", a, a]) == 0
    assert atoll(["checkpoint", "compare", a, b]) == 1
    out = capsys.readouterr().out
    assert "scalar state.step: 4 -> 8" in out
    assert "tensor model.embedding: " in out


def test_compare_takes_a_runs_newest_checkpoint(recipe_file, tmp_path, capsys):
    atoll(["train", "--config", str(recipe_file), "--set", "training.checkpoint_policy=interval"])
    capsys.readouterr()
    run = tmp_path / "run"
    newest = run / "checkpoints" / "step-00000008"
    assert atoll(["checkpoint", "compare", str(run), str(newest)]) == 0
    assert capsys.readouterr().out.startswith("equal: ")
    (newest / "manifest.json").unlink()
    assert atoll(["checkpoint", "compare", str(run), str(newest.with_name("step-00000004"))]) == 0
    assert capsys.readouterr().out.startswith("equal: ")


def test_compare_of_a_run_without_checkpoints_exits_2(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert atoll(["checkpoint", "compare", str(tmp_path), str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path / 'checkpoints'} holds no complete checkpoint.\n\n"
        "hint: training.checkpoint_policy decides when a run keeps one\n"
    )


def test_verify_names_the_damage_and_exits_1(recipe_file, tmp_path, capsys):
    atoll(["train", "--config", str(recipe_file)])
    capsys.readouterr()
    path = tmp_path / "run" / "checkpoints" / "step-00000008" / "rank-000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert atoll(["checkpoint", "verify", str(tmp_path / "run"), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert not found["sound"]
    assert found["damages"][0]["file"] == str(path)
    assert found["damages"][0]["mib"] == 0


def test_verify_without_checkpoints_exits_2(tmp_path, capsys):
    assert atoll(["checkpoint", "verify", str(tmp_path)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_process_stopped_by_sigterm_exits_130_and_resumes_to_the_same_weights(
    recipe_file, tmp_path, capsys
):
    command = [sys.executable, "-c", "from atoll.cli.main import main; main()", "train"]
    command += ["--config", str(recipe_file), "--set", "training.log_every=1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("update 2/8"):
                process.send_signal(signal.SIGTERM)
                break
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert "SIGTERM: stopped after update" in rest
    run = tmp_path / "run"
    assert atoll(["train", "--resume", str(run), "--json"]) == 0
    resumed = json.loads(capsys.readouterr().out)
    other = ["--set", f"runtime.output_dir={tmp_path / 'whole'}", "--json"]
    assert atoll(["train", "--config", str(recipe_file), *other]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert 2 <= resumed["resumed_from_step"] < 8
    assert resumed["state_digests"] == whole["state_digests"]
