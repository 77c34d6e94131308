"""A recipe shown whole, and the reference page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.explain import derive, dump_resolved, remarks, show
from atoll.config.load import load_config
from atoll.config.recipes import find_recipe, shipped_recipes
from atoll.config.reference import reference_page
from atoll.config.schema import RunConfig

REPOSITORY = Path(__file__).parents[2]
REFERENCE_RUN = [
    "training.tokens_per_parameters=14",
    "training.epoch_tokens_per_parameters=14",
    "training.checkpoint_policy=none",
    "training.log_every=100",
]

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12)
awkward = texts | st.sampled_from(["1e-3", "no", "null", "~", "010", "a: b", "# x", " a", "- a"])
paths = awkward.filter(lambda text: not text.startswith("hub:"))
sources = st.fixed_dictionaries({"path": paths}, optional={"text_field": awkward, "split": awkward})
positive = st.floats(1e-12, 1e12)


@st.composite
def recipes(draw):
    return RunConfig.model_validate(
        {
            "model": {
                "rope_theta": draw(positive),
                "kv_heads": draw(st.sampled_from([None, 1, 5])),
            },
            "data": {
                "source": draw(paths | sources | st.lists(sources, min_size=1, max_size=3)),
                "tokenizer": draw(paths | st.fixed_dictionaries({"path": paths})),
            },
            "optimizer": {"lr": draw(positive), "grad_clip": draw(st.none() | positive)},
            "training": {
                "sample_prompt": draw(st.none() | awkward),
                "checkpoint_epochs": draw(
                    st.integers(1, 5) | st.lists(st.integers(1, 9), min_size=1)
                ),
            },
            "runtime": {"compile": draw(st.booleans() | st.just("auto")), "output_dir": "x"},
        }
    )


@given(recipes())
@settings(deadline=None, max_examples=50)
def test_resolved_yaml_loads_by_itself_and_gives_an_equal_recipe(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("resolved") / "resolved.yaml"
    path.write_text(dump_resolved(config), encoding="utf-8")
    loaded = load_config([path])
    assert loaded.config == config
    assert "default" not in loaded.origins.values()


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_a_shipped_recipe_loads_by_name_and_says_why_in_comments(name):
    loaded = load_config([Path(name)])
    text = find_recipe(Path(name)).read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert any(name in origin for origin in loaded.origins.values())
    assert not any("warning" in line for line in remarks(loaded.config))


def test_the_first_line_of_a_recipe_states_its_true_size():
    for name, path in shipped_recipes().items():
        stated = re.search(r"([\d,]+) parameters", path.read_text(encoding="utf-8").split("\n")[0])
        if stated is None:
            assert name.startswith("packed"), "only a layer has no size of its own"
            continue
        size = derive(load_config([path]).config)["parameters"]
        assert int(stated[1].replace(",", "")) == size


def test_the_small_recipes_keep_to_what_a_cpu_can_do():
    for name in ("tiny", "smoke"):
        config = load_config([Path(name)]).config
        assert config.data.source == "stdlib"
        assert 256 <= config.model.vocab_size <= 4096
    assert 900_000 < derive(load_config([Path("tiny")]).config)["parameters"] < 1_100_000


def test_the_small_packed_layer_shares_the_batch_of_the_recipe_it_is_laid_over():
    alone, packed = (
        load_config([Path(name) for name in names]).config
        for names in (["tiny"], ["tiny", "packed4-tiny"])
    )
    assert packed.training == alone.training
    assert derive(packed) == derive(alone) | {"microbatches_per_update": 1}
    assert (packed.strategy.placement, packed.strategy.models) == ("packed", 4)


def test_the_command_line_of_the_reference_run_is_accepted_as_it_is(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    files = [Path("configs/20m.yaml"), Path("configs/packed8-20m-awc.yaml")]
    loaded = load_config(files, REFERENCE_RUN)
    assert derive(loaded.config) == {
        "parameters": 20_403_520,
        "total_steps": 2179,
        "total_targets": 2179 * 131_072,
        "num_epochs": 1,
        "sequences_per_update": 128,
        "microbatches_per_update": 1,
    }
    assert loaded.config.strategy.models == 8
    assert loaded.origins["optimizer.beta1"] == "configs/packed8-20m-awc.yaml:6"
    assert loaded.origins["training.log_every"] == "--set 4"


def test_show_is_itself_a_recipe_and_writes_each_origin_behind_its_value(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("optimizer: {lr: 0.5}\ndata: {source: [{path: a}, {path: b}]}\n")
    loaded = load_config([path], ["runtime.seed=7"])
    text = show(loaded, origins=True)
    assert f"  lr: 0.5  # {path}:1\n" in text
    assert "  seed: 7  # --set 1\n" in text
    assert "  beta1: 0.9  # default\n" in text
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert load_config([again]).config == loaded.config


def test_remarks_state_what_follows_and_warn_of_a_warm_up_longer_than_the_run():
    assert remarks(load_config([]).config) == [
        "20,403,520 trainable parameters",
        "3,113 updates of 131,072 targets (128 sequences and 8 backwards each): "
        "408,027,136 targets",
        "40 virtual epochs",
    ]
    warned = remarks(load_config([], ["training.tokens_per_parameters=1"]).config)
    assert warned[-1] == (
        "warning: lr_schedule.warmup_steps 312 never reaches the peak rate in 156 updates"
    )


def test_every_setting_is_explained():
    page = reference_page()
    assert "|  |" not in page.replace("required |  |", "")


def test_the_reference_page_is_what_the_schema_says(update_golden):
    path = REPOSITORY / "docs" / "reference" / "recipe.md"
    if update_golden:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(reference_page(), encoding="utf-8")
    assert path.read_text(encoding="utf-8") == reference_page()


def test_settings_need_no_torch():
    code = (
        "import sys, atoll.config.explain, atoll.config.reference\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
