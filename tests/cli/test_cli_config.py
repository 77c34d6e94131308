"""`atoll config show` and `atoll doctor`."""

import json

from atoll.cli import checks
from atoll.config.load import load_config


def test_config_show_prints_a_recipe_that_loads_again(atoll, tmp_path):
    outcome = atoll("config", "show", "--config", "tiny", "--set", "optimizer.lr=1e-3")
    assert (outcome.code, outcome.err) == (0, "")
    path = tmp_path / "again.yaml"
    path.write_text(outcome.out)
    assert load_config([path]).config.optimizer.lr == 0.001
    assert outcome.out.startswith(
        "# 1,066,112 trainable parameters\n# 390 updates of 8,192 targets"
    )


def test_config_show_writes_origins(atoll):
    outcome = atoll("config", "show", "--config", "tiny", "--origins", "--set", "runtime.seed=2")
    assert "  seed: 2  # --set 1\n" in outcome.out
    assert "tiny.yaml:4\n" in outcome.out


def test_config_show_for_machines_is_one_document(atoll):
    outcome = atoll("config", "show", "--config", "tiny", "--json")
    document = json.loads(outcome.out)
    assert document["config"]["model"]["width"] == 128
    assert document["origins"]["model.width"].endswith("tiny.yaml:6")
    assert document["derived"]["parameters"] == 1_066_112


def test_config_show_prints_every_fault_and_exits_2(atoll):
    outcome = atoll("config", "show", "--set", "model.layers=x", "--set", "modle.width=3")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        "--set 2: there is no setting modle. Did you mean model?\n"
        "--set 1: model.layers is the text 'x'; it must be a whole number, at least 1.\n"
        "\n"
        "hint: `atoll config show` lists every setting with its default, and with --origins where "
        "each value comes from\n"
    )


def test_doctor_on_this_machine_finds_nothing_broken(atoll, tmp_path):
    sets = ["--set", f"data.cache_dir={tmp_path}", "--set", f"runtime.output_dir={tmp_path}/run"]
    outcome = atoll("doctor", *sets, "--set", "runtime.device=cpu", "--json")
    document = json.loads(outcome.out)
    assert (outcome.code, document["ok"]) == (0, True)
    status = {check["name"]: check["status"] for check in document["checks"]}
    assert status["python"] == status["torch"] == status["packages"] == "ok"
    assert status["data.cache_dir"] == status["runtime.output_dir"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_doctor_exits_1_for_a_device_that_the_recipe_needs(atoll, tmp_path):
    sets = ["--set", f"data.cache_dir={tmp_path}", "--set", f"runtime.output_dir={tmp_path}"]
    outcome = atoll("doctor", *sets, "--set", "runtime.device=cuda:99")
    assert outcome.code == 1
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("broken"))
    assert "runtime.device is cuda:99, and this machine has" in line
    assert "hint: set runtime.device=auto" in outcome.out


def test_an_unsupported_torch_is_broken_and_says_what_to_install():
    remedy = "pip install 'torch>=2.11,<2.15'"
    for version in ("2.10.1", "2.15.0+cpu", "3.0.0", None):
        check = checks.check_torch(version)
        assert (check.status, check.remedy) == ("broken", remedy)
    assert checks.check_torch("2.11.0").status == "ok"
    assert checks.check_torch("2.14.1+cu130").status == "ok"


def test_an_old_python_is_broken():
    assert checks.check_python((3, 10, 9)).status == "broken"
    assert checks.check_python((3, 11, 0)).status == "ok"


def test_no_compiler_is_broken_only_for_a_recipe_that_compiles(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    assert checks.check_compiler(required=False).status == "missing"
    assert checks.check_compiler(required=True).status == "broken"


def test_a_folder_that_does_not_exist_is_probed_where_it_would_be_made(tmp_path):
    check = checks.check_folder("data.cache_dir", tmp_path / "a" / "b")
    assert check.status == "ok"
    assert "GiB free" in check.found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_refuses_writes_is_broken(tmp_path, monkeypatch):
    from atoll import faults

    faults.arm("file.before_fsync=enospc")
    check = checks.check_folder("data.cache_dir", tmp_path)
    assert check.status == "broken"
    assert "No space left on device" in check.found
    assert check.remedy.startswith("free space")


def test_an_extra_is_broken_only_for_a_recipe_that_uses_it(monkeypatch):
    monkeypatch.setattr(checks, "_installed", lambda package: None)
    plain = load_config([]).config
    hub = load_config([], ["data.source={path: 'hub:a/b', revision: main}"]).config
    logged = load_config([], ["runtime.trackers=[wandb]"]).config

    def status(config, name):
        return next(c.status for c in checks.all_checks(config) if c.name == name)

    assert status(plain, "extra hub") == "missing"
    assert status(hub, "extra hub") == "broken"
    assert status(plain, "extra wandb") == "missing"
    assert status(logged, "extra wandb") == "broken"
