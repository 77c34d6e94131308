"""Layers, origins, and every fault at once."""

import json
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.describe import sections_in
from atoll.config.load import load_config
from atoll.config.recipes import shipped_recipes
from atoll.config.schema import RunConfig
from atoll.errors import ConfigError


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Write recipes into the working folder, so that places are short names."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="a.yaml"):
        data = text if isinstance(text, bytes) else text.encode()
        Path(name).write_bytes(data)
        return Path(name)

    return write


def faults_of(*files, sets=()):
    with pytest.raises(ConfigError) as caught:
        load_config(files, sets)
    assert caught.value.exit_code == 2
    assert caught.value.message == "\n".join(caught.value.faults)
    return list(caught.value.faults)


def test_without_files_every_value_is_a_default():
    loaded = load_config([])
    assert loaded.config == RunConfig()
    assert set(loaded.origins.values()) == {"default"}


def test_a_later_file_and_then_set_override_and_mappings_merge(recipe):
    first = recipe("optimizer:\n  lr: 0.1\n  beta1: 0.5\nruntime: {seed: 1}", "first.yaml")
    second = recipe("optimizer:\n  lr: 0.2", "second.yaml")
    loaded = load_config([first, second], ["runtime.seed=3"])
    assert loaded.config.optimizer.lr == 0.2
    assert loaded.config.optimizer.beta1 == 0.5
    assert loaded.config.runtime.seed == 3
    assert loaded.origins["optimizer.lr"] == "second.yaml:2"
    assert loaded.origins["optimizer.beta1"] == "first.yaml:3"
    assert loaded.origins["runtime.seed"] == "--set 1"
    assert loaded.origins["runtime.device"] == "default"


def test_lists_are_replaced_and_not_joined(recipe):
    first = recipe("data:\n  source: [{path: a}, {path: b}]", "first.yaml")
    second = recipe("data:\n  source: [{path: c}]", "second.yaml")
    source = load_config([first, second]).config.data.source
    assert [part.path for part in source] == ["c"]


def test_origins_name_every_setting_inside_a_mapping(recipe):
    path = recipe("data:\n  source:\n    path: x\n  tokenizer: {add_bos: true}")
    origins = load_config([path]).origins
    assert origins["data.source.path"] == "a.yaml:3"
    assert origins["data.source.weight"] == "default"
    assert origins["data.tokenizer.add_bos"] == "a.yaml:4"


def test_a_section_whose_lines_are_all_comments_changes_nothing(recipe):
    first = recipe("optimizer: {lr: 0.1}", "first.yaml")
    second = recipe("optimizer:\n  # lr: 0.2", "second.yaml")
    assert load_config([first, second]).config.optimizer.lr == 0.1


def test_set_takes_lists_mappings_and_null(recipe):
    path = recipe("optimizer: {grad_clip: 1}")
    sets = [
        "optimizer.grad_clip=null",
        "runtime.trackers=[tensorboard]",
        "data.source={path: x, weight: 2}",
        "optimizer.eps=1e-6",
        "training.sample_prompt=a=b: c".replace(": ", ":"),
    ]
    config = load_config([path], sets).config
    assert config.optimizer.grad_clip is None
    assert config.runtime.trackers == ["tensorboard"]
    assert config.data.source.weight == 2
    assert config.optimizer.eps == 1e-6
    assert config.training.sample_prompt == "a=b:c"


def test_a_relative_path_stays_relative_to_the_working_folder(recipe, tmp_path):
    (tmp_path / "sub").mkdir()
    path = recipe("runtime: {output_dir: runs/x}", "sub/a.yaml")
    assert load_config([path]).config.runtime.output_dir == Path("runs/x")


def test_a_bare_name_means_a_shipped_recipe_and_a_file_of_that_name_goes_first(recipe):
    assert load_config([Path("tiny")]).config.model.width == 128
    recipe("model: {width: 320}", "tiny")
    assert load_config([Path("tiny")]).config.model.width == 320


def test_a_byte_order_mark_is_no_fault(recipe):
    assert load_config([recipe(b"\xef\xbb\xbfruntime: {seed: 4}")]).config.runtime.seed == 4


def test_a_missing_file_is_named_with_the_shipped_recipes(recipe):
    names = ", ".join(shipped_recipes())
    assert faults_of(Path("tin")) == [
        f"tin: there is no such file. Did you mean tiny? Shipped recipes: {names}."
    ]
    assert faults_of(Path("sub/x.yaml")) == ["sub/x.yaml: there is no such file."]


def test_an_empty_file_is_refused(recipe):
    assert faults_of(recipe("# nothing\n")) == [
        "a.yaml: the file is empty; a recipe holds at least one section."
    ]


def test_a_file_that_is_no_mapping_is_refused(recipe):
    assert faults_of(recipe("- model\n")) == [
        "a.yaml:1: a recipe is a mapping of sections, such as `model:`."
    ]


def test_a_folder_is_refused(recipe, tmp_path):
    assert faults_of(tmp_path) == [f"{tmp_path}: this is a folder; a recipe is a YAML file."]


def test_bytes_that_are_no_text_are_refused_with_their_line(recipe):
    assert faults_of(recipe(b"model:\n  width: \xff\n")) == [
        "a.yaml:2: not UTF-8 text (byte 0xff)."
    ]


def test_a_file_that_cannot_be_read_says_why(recipe, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    path = recipe("model: {}")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert faults_of(path) == ["a.yaml: cannot be read: Permission denied."]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "model:\n  laers: 3",
            "a.yaml:2: there is no setting model.laers. Did you mean model.layers?",
        ),
        ("modle: {}", "a.yaml:1: there is no setting modle. Did you mean model?"),
        ("model: {lr: 1}", "a.yaml:1: there is no setting model.lr. Did you mean optimizer.lr?"),
        ("lr: 1", "a.yaml:1: there is no setting lr. Did you mean optimizer.lr?"),
        (
            "data: {seed: 1}",
            "a.yaml:1: there is no setting data.seed. "
            "Did you mean evaluation.seed or runtime.seed?",
        ),
        (
            "optimizer: {batch_token: 1}",
            "a.yaml:1: there is no setting optimizer.batch_token. "
            "Did you mean training.batch_tokens?",
        ),
        (
            "evaluation: {zzz: 1}",
            "a.yaml:1: there is no setting evaluation.zzz. "
            "Settings here: subset_sequences, batch_size, seed.",
        ),
        (
            "data:\n  source:\n    - path: x\n    - path: y\n      wieght: 2",
            "a.yaml:5: there is no setting data.source[1].wieght. "
            "Did you mean data.source[1].weight?",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(recipe, text, fault):
    assert faults_of(recipe(text)) == [fault]


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        (
            "model.layers=ten",
            "model.layers is the text 'ten'; it must be a whole number, at least 1.",
        ),
        (
            "model.layers='3'",
            "model.layers is the text '3'; it must be a whole number, at least 1.",
        ),
        (
            "model.layers=010",
            "model.layers is the text '010'; it must be a whole number, at least 1.",
        ),
        ("model.layers=1.5", "model.layers is 1.5; it must be a whole number, at least 1."),
        ("model.layers=true", "model.layers is true; it must be a whole number, at least 1."),
        ("model.layers=", "model.layers is null; it must be a whole number, at least 1."),
        ("optimizer.lr=0", "optimizer.lr is 0; it must be a number, above 0."),
        ("optimizer.lr=1e400", "optimizer.lr is .inf; it must be a number, above 0."),
        ("optimizer.lr=.nan", "optimizer.lr is the text '.nan'; it must be a number, above 0."),
        ("optimizer.beta1=1", "optimizer.beta1 is 1; it must be a number, at least 0, below 1."),
        (
            "optimizer.grad_clip=[1]",
            "optimizer.grad_clip is the list [1]; it must be a number, above 0; or null.",
        ),
        ("data.prefetch=no", "data.prefetch is the text 'no'; it must be true or false."),
        ("data.cache_dir=3", "data.cache_dir is 3; it must be a path."),
        ("data.tokenizer=4", "data.tokenizer is 4; it must be text; or a mapping."),
        (
            "data.source=[]",
            "data.source is the list []; it must be text; or a mapping; "
            "or a list of at least one item, each a mapping.",
        ),
        ("data.source={format: text}", "data.source.path is missing; it must be text."),
        (
            "data.source=[{path: a}, {path: b, split: 0}]",
            "data.source[1].split is 0; it must be text.",
        ),
        (
            "lr_schedule.name=linear",
            "lr_schedule.name is the text 'linear'; it must be one of cosine, wsd.",
        ),
        (
            "runtime.compile=maybe",
            "runtime.compile is the text 'maybe'; it must be true or false; or auto.",
        ),
        (
            "runtime.device=gpu",
            "runtime.device is the text 'gpu'; "
            "it must be auto, cpu, cuda, cuda:N (N from 0) or mps.",
        ),
        (
            "runtime.trackers=[tensorboard, x]",
            "runtime.trackers[1] is the text 'x'; it must be one of tensorboard, wandb.",
        ),
        ("training={}", None),
        ("training=3", "training is 3; it must be a mapping."),
        (
            "training.checkpoint_epochs=[1, a]",
            "training.checkpoint_epochs[1] is the text 'a'; it must be a whole number, at least 1.",
        ),
        ("model.rope_scaling={kind: x}", "model.rope_scaling.kind must be one of linear, llama3."),
        ("model.rope_scaling={}", "model.rope_scaling.kind must be one of linear, llama3."),
        (
            "model.rope_scaling={kind: linear}",
            "model.rope_scaling.factor is missing; it must be a number, above 0.",
        ),
        ("foo", "'foo' is not of the form section.name=value."),
        ("=3", "'=3' is not of the form section.name=value."),
        ("model..width=3", "'model..width=3' is not of the form section.name=value."),
        (
            "model.width=[3",
            "not valid YAML: while parsing a flow sequence, expected ',' or ']', "
            "but got '<stream end>'.",
        ),
    ],
)
def test_a_wrong_value_says_what_was_found_and_what_is_required(setting, fault):
    if fault is None:
        assert load_config([], [setting]).config == RunConfig()
    else:
        assert faults_of(sets=[setting]) == [f"--set 1: {fault}"]


def test_all_faults_of_all_layers_come_at_once(recipe):
    first = recipe("model: {width: wide, heads: 3}\noptimizer: {lr: -1}", "first.yaml")
    broken = recipe("a: [", "broken.yaml")
    faults = faults_of(first, broken, sets=["runtime.sede=1", "training.batch_tokens=1000"])
    assert faults == [
        "broken.yaml:1: not valid YAML: while parsing a flow node, expected the node content, "
        "but found '<stream end>'.",
        "--set 1: there is no setting runtime.sede. Did you mean runtime.seed?",
        "first.yaml:1: model.width is the text 'wide'; it must be a whole number, at least 2.",
        "first.yaml:2: optimizer.lr is -1; it must be a number, above 0.",
    ]


def test_rules_between_settings_are_reported_beside_wrong_values(recipe):
    path = recipe("optimizer: {lr: -1}\nmodel: {kv_heads: 2}\nstrategy: {models: 8}")
    assert faults_of(path, sets=["training.tokens_per_parameters=0.7"]) == [
        "a.yaml:2: model.kv_heads 2 does not divide model.heads 5. Set it to one of 1, 5.",
        "a.yaml:1: optimizer.lr is -1; it must be a number, above 0.",
        "a.yaml:3: strategy.models 8 are packed on one device, but strategy.placement is ranks. "
        "Set strategy.placement to packed, or strategy.models to 1.",
        "--set 1: training.tokens_per_parameters 0.7 is not a whole number of virtual epochs of "
        "training.epoch_tokens_per_parameters 0.5. Set the total to 0.5 or 1.",
    ]


def test_a_rule_stays_silent_when_one_of_its_values_is_already_reported(recipe):
    faults = faults_of(recipe("model: {context_length: long}\ntraining: {batch_tokens: 1000}"))
    assert faults == [
        "a.yaml:1: model.context_length is the text 'long'; it must be a whole number, at least 1."
    ]


def test_a_broken_rule_names_the_place_of_every_value_that_was_written(recipe):
    path = recipe("training:\n  batch_tokens: 1000\nmodel:\n  context_length: 300\n")
    (fault,) = faults_of(path, sets=["training.micro_batch_size=1"])
    assert fault.startswith("a.yaml:2, a.yaml:4: training.batch_tokens 1000 is not a multiple")


def test_the_error_says_where_all_settings_are_listed():
    with pytest.raises(ConfigError) as caught:
        load_config([], ["x=1"])
    assert "atoll config show" in str(caught.value.hint)


numbers = st.fixed_dictionaries(
    {},
    optional={
        "runtime": st.fixed_dictionaries({}, optional={"seed": st.integers(0, 9)}),
        "evaluation": st.fixed_dictionaries(
            {}, optional={"seed": st.integers(0, 9), "batch_size": st.integers(1, 9)}
        ),
        "optimizer": st.fixed_dictionaries(
            {}, optional={"lr": st.floats(0.1, 1), "grad_clip": st.none() | st.just(1.0)}
        ),
    },
)


def merge(base, over):
    """Merge two plain mappings; the independent oracle."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if both else value
    return result


@given(st.lists(numbers, max_size=4))
@settings(deadline=None, max_examples=60)
def test_layers_give_what_merging_plain_mappings_gives(layers):
    sets = [
        f"{s}.{k}={json.dumps(v)}" for layer in layers for s in layer for k, v in layer[s].items()
    ]
    expected = RunConfig.model_validate(reduce(merge, layers, {}))
    assert load_config([], sets).config == expected


@given(numbers)
@settings(deadline=None, max_examples=30)
def test_the_same_layer_twice_changes_nothing(tmp_path_factory, layer):
    path = tmp_path_factory.mktemp("layers") / "a.yaml"
    path.write_text(json.dumps(layer))
    assert load_config([path, path]) == load_config([path])


@pytest.mark.parametrize("key", ["tokenizer", "source", "validation_source"])
def test_an_option_is_added_to_a_path_given_as_text(key):
    option = "add_bos=true" if key == "tokenizer" else "format=jsonl"
    found = load_config([], [f"data.{key}=some/path", f"data.{key}.{option}"]).config
    assert getattr(found.data, key).path == "some/path"


def test_text_replaces_a_path_and_its_options():
    sets = ["data.source.path=a", "data.source.format=jsonl", "data.source=b"]
    assert load_config([], sets).config.data.source == "b"


def test_more_threads_than_any_machine_has_are_refused():
    with pytest.raises(ConfigError, match=r"runtime\.cpu_threads is 100000") as caught:
        load_config([], ["runtime.cpu_threads=100000"])
    assert caught.value.exit_code == 2


def names(section, prefix=""):
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_in(field.annotation):
            yield from names(inner, f"{prefix}{name}.")


junk = st.recursive(
    st.sampled_from([None, True, 0, -1, 3, 8, 0.3, 1e300, "x", "hub:a/b", "gossip", "packed", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["path", "kind", "weight", "x"]), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(st.lists(st.tuples(st.sampled_from(sorted(set(names(RunConfig)))), junk), max_size=6))
@settings(deadline=None, max_examples=150)
def test_any_values_give_a_recipe_or_one_config_error(settings_given):
    sets = [f"{name}={json.dumps(value)}" for name, value in settings_given]
    faults: tuple[str, ...] = ()
    try:
        load_config([], sets)
    except ConfigError as error:
        faults = error.faults or ("none",)
    assert all(fault.startswith("--set ") and fault.endswith((".", "?")) for fault in faults)
