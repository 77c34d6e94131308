"""Our folders load in transformers, its folders load here; anything else is refused."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from naive_llama import SMALL, random_tokens, transformers_twin
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from atoll.config.model import LinearRopeScaling, Llama3RopeScaling
from atoll.errors import DataError, StorageError, UnavailableError, UsageError
from atoll.model.huggingface import is_model_folder, load_pretrained, save_pretrained
from atoll.model.llama import Llama
from atoll.model.tokenizer_folder import SpecialIds, read_special_ids

UNTIED = SMALL.model_copy(update={"tied_embeddings": False})
SCALINGS = [
    None,
    LinearRopeScaling(kind="linear", factor=2.0),
    Llama3RopeScaling(
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context_length=64,
    ),
]


@pytest.fixture
def folder(tmp_path):
    """A folder with an untied model."""
    save_pretrained(Llama(UNTIED, seed=1), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def tokenizer_file(tmp_path):
    """A tokenizer.json of 131 ids: bytes that occur in ASCII text, and two special tokens."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet())[:128], "Ġ"]
    native = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    native.add_special_tokens(["<s>", "</s>"])
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    native.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def change(folder, **facts):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_what_we_write_gives_the_same_logits_in_transformers(tmp_path, config, scaling):
    from transformers import AutoModelForCausalLM

    config = config.model_copy(update={"rope_scaling": scaling})
    model = Llama(config, seed=2, trainable=False)
    save_pretrained(model, tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    inputs = random_tokens(config, 2, 40)
    with torch.no_grad():
        ours, exact = model.logits(inputs[None])[0], theirs(inputs).logits
    assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()
    back = load_pretrained(tmp_path / "model")
    assert back.config == config
    assert torch.equal(back.arena.data_NP, model.arena.data_NP)


def test_what_transformers_writes_loads_in_shards_into_every_model(tmp_path):
    model = Llama(UNTIED, seed=3, trainable=False)
    transformers_twin(model).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    packed = load_pretrained(tmp_path, num_models=2)
    assert packed.config == UNTIED
    for row in packed.arena.data_NP:
        assert torch.equal(row, model.arena.data_NP[0])


def test_one_of_several_models_is_written(tmp_path):
    packed = Llama(SMALL, num_models=3)
    packed.arena.data_NP.normal_(generator=torch.Generator().manual_seed(1))
    save_pretrained(packed, tmp_path / "model", model_index=2)
    assert torch.equal(
        load_pretrained(tmp_path / "model").arena.data_NP[0], packed.arena.data_NP[2]
    )


def test_narrow_weights_are_read_as_float32(tmp_path):
    model = Llama(SMALL, seed=4)
    save_pretrained(model, tmp_path / "model", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    back = load_pretrained(tmp_path / "model").arena.data_NP
    assert torch.equal(back, model.arena.data_NP.bfloat16().float())


def test_tokenizer_and_ids_arrive_in_transformers(tmp_path, tokenizer_file):
    from transformers import AutoTokenizer, GenerationConfig

    ids = SpecialIds(129, (130,), add_bos=True)
    save_pretrained(Llama(SMALL), tmp_path / "model", tokenizer=tokenizer_file, special_ids=ids)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    native = Tokenizer.from_file(str(tokenizer_file))
    text = "a few words </s>"
    assert theirs(text).input_ids == [129, *native.encode(text).ids]
    assert theirs.decode(native.encode(text).ids) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (129, 130)
    assert theirs.model_max_length == SMALL.context_length
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == 130
    assert read_special_ids(tmp_path / "model") == SpecialIds(129, (130,))


def test_a_tokenizer_folder_is_copied_as_it_is(tmp_path, tokenizer_file):
    source = tmp_path / "tokenizer"
    source.mkdir()
    shutil.copy(tokenizer_file, source)
    (source / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "model.safetensors").write_text("not a tokenizer's file")
    save_pretrained(Llama(SMALL), tmp_path / "model", tokenizer=source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((tmp_path / "model" / "config.json").read_text())["bos_token_id"] == 129


def test_several_ids_may_end_a_text(tmp_path):
    save_pretrained(Llama(SMALL), tmp_path / "model", special_ids=SpecialIds(None, (5, 7)))
    assert read_special_ids(tmp_path / "model") == SpecialIds(None, (5, 7))


def test_no_special_ids_are_invented(folder):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    assert config.bos_token_id is None
    assert config.eos_token_id is None
    assert read_special_ids(folder) == SpecialIds()


def test_a_folder_that_is_not_empty_is_kept(folder):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="exists and is not empty"):
        save_pretrained(Llama(SMALL), folder)
    assert (folder / "model.safetensors").read_bytes() == before


def test_overwriting_leaves_nothing_of_the_old_folder(folder):
    (folder / "old").write_text("x")
    save_pretrained(Llama(SMALL), folder, overwrite=True)
    assert load_pretrained(folder).config == SMALL
    assert not (folder / "old").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_failed_write_leaves_the_old_folder(folder, monkeypatch):
    def refuse(*arguments, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("atoll.model.huggingface.save_file", refuse)
    with pytest.raises(StorageError, match="No space left"):
        save_pretrained(Llama(SMALL), folder, overwrite=True)
    assert load_pretrained(folder).config == UNTIED
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_disk_that_safetensors_finds_full_leaves_nothing_behind(tmp_path, monkeypatch):
    def refuse(*arguments, **named):
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr("atoll.model.huggingface.save_file", refuse)
    with pytest.raises(StorageError, match="No space left") as caught:
        save_pretrained(Llama(SMALL), tmp_path / "model")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("free space or choose another disk")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_what_safetensors_itself_says_of_a_refused_write_is_understood(tmp_path):
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from atoll.config.model import ModelConfig\n"
        "from atoll.errors import StorageError\n"
        "from atoll.model.huggingface import save_pretrained\n"
        "from atoll.model.llama import Llama\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try:\n"
        f"    save_pretrained(Llama({SMALL!r}), Path(sys.argv[1]) / 'model')\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"cannot write {tmp_path / 'model'}: {os.strerror(errno.EFBIG)}.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_type is 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_cannot_be_run_is_named(folder, facts, named):
    change(folder, **facts)
    with pytest.raises(UnavailableError, match="cannot be run here") as caught:
        load_pretrained(folder)
    assert named in caught.value.message
    assert "hint" not in caught.value.message
    assert caught.value.hint


def test_everything_that_cannot_be_run_is_named_at_once(folder):
    change(folder, hidden_act="gelu", mlp_bias=True)
    with pytest.raises(UnavailableError, match=r"hidden_act is 'gelu'.*; mlp_bias is true"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": "many"}, "does not describe a Llama model: vocab_size: Input should be"),
        ({"num_key_value_heads": 4}, "kv_heads 4 does not divide model.heads 6"),
        ({"head_dim": 7}, "head_width 7 is odd"),
        ({"head_dim": None, "hidden_size": 50}, "width 50 does not split into 6"),
        ({"intermediate_size": 81}, "shape"),
    ],
)
def test_an_impossible_config_is_refused(folder, facts, named):
    change(folder, **facts)
    with pytest.raises(DataError, match=named):
        load_pretrained(folder)


def test_old_spellings_of_rotary_angles_are_read(folder):
    change(
        folder,
        rope_parameters=None,
        rope_theta=500.0,
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    config = load_pretrained(folder).config
    assert config.rope_theta == 500.0
    assert config.rope_scaling == LinearRopeScaling(kind="linear", factor=4.0)


def test_a_missing_tensor_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"lacks the tensors model.layers.1.self_attn.k_proj"):
        load_pretrained(folder)


def test_a_bias_that_config_does_not_mention_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnavailableError, match=r"q_proj.bias"):
        load_pretrained(folder)


def test_buffers_and_tied_heads_of_old_exports_are_ignored(tmp_path):
    model = Llama(SMALL)
    save_pretrained(model, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    back = load_pretrained(tmp_path / "model")
    assert torch.equal(back.arena.data_NP, model.arena.data_NP)


def test_a_truncated_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"cannot read .*model.safetensors"):
        load_pretrained(folder)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnavailableError, match="pickle"):
        load_pretrained(folder)


def test_a_folder_without_weights_or_with_half_of_them_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"neither model.safetensors nor"):
        load_pretrained(folder)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"lacks model-00001-of-00002.safetensors"):
        load_pretrained(folder)


def test_what_is_no_model_folder_is_told_from_one(tmp_path, folder):
    assert is_model_folder(folder)
    assert not is_model_folder(tmp_path)
    with pytest.raises(UsageError, match=r"no config.json"):
        load_pretrained(tmp_path)
