"""How Hugging Face spells what we have: config.json and the names of tensors.

| here | there, rows in this order |
|---|---|
| embedding | model.embed_tokens.weight |
| layers.I.qkv | model.layers.I.self_attn.{q,k,v}_proj.weight |
| layers.I.attention_out | model.layers.I.self_attn.o_proj.weight |
| layers.I.gate_up | model.layers.I.mlp.{gate,up}_proj.weight |
| layers.I.mlp_out | model.layers.I.mlp.down_proj.weight |
| layers.I.attention_norm | model.layers.I.input_layernorm.weight |
| layers.I.mlp_norm | model.layers.I.post_attention_layernorm.weight |
| norm | model.norm.weight |
| head (untied only) | lm_head.weight |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from atoll.config.model import Llama3RopeScaling, ModelConfig
from atoll.errors import DataError, UnavailableError
from atoll.model import rope


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, stop) of one of our tensors, and the foreign name they have."""

    name: str
    start: int
    stop: int


def parts(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Return, for each canonical name, the foreign tensors that its rows are."""
    channels = rope.head_width(config)
    query, key = config.heads * channels, (config.kv_heads or config.heads) * channels
    ffn, width, vocabulary = config.ffn_width, config.width, config.vocab_size
    table = {"embedding": _stack(("model.embed_tokens", vocabulary))}
    for layer in range(config.layers):
        there, here = f"model.layers.{layer}", f"layers.{layer}"
        attention = f"{there}.self_attn"
        table |= {
            f"{here}.qkv": _stack(
                (f"{attention}.q_proj", query),
                (f"{attention}.k_proj", key),
                (f"{attention}.v_proj", key),
            ),
            f"{here}.attention_out": _stack((f"{attention}.o_proj", width)),
            f"{here}.gate_up": _stack(
                (f"{there}.mlp.gate_proj", ffn), (f"{there}.mlp.up_proj", ffn)
            ),
            f"{here}.mlp_out": _stack((f"{there}.mlp.down_proj", width)),
            f"{here}.attention_norm": _stack((f"{there}.input_layernorm", width)),
            f"{here}.mlp_norm": _stack((f"{there}.post_attention_layernorm", width)),
        }
    if not config.tied_embeddings:
        table["head"] = _stack(("lm_head", vocabulary))
    return table | {"norm": _stack(("model.norm", width))}


def read_config(facts: Mapping[str, Any], *, source: str) -> ModelConfig:
    """Return the shape that a config.json describes.

    Args:
        facts: The parsed file; absent keys have the defaults of transformers' LlamaConfig.
        source: Where it came from, for messages.

    Raises:
        UnavailableError: It asks for something that this model does not do; names all of it.
        DataError: A required key is missing or a value is impossible.
    """
    refused = list(_refusals(facts))
    if refused:
        raise UnavailableError(
            f"{source} cannot be run here: {'; '.join(refused)}.",
            hint="supported are Llama-architecture models with silu, no biases and rope types "
            "default, linear and llama3",
        )
    required = {
        "vocab_size": "vocab_size",
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "ffn_width": "intermediate_size",
    }
    missing = [there for there in required.values() if facts.get(there) is None]
    if missing:
        raise DataError(f"{source} lacks {', '.join(missing)}.")
    angles = _rope(facts)
    try:
        return ModelConfig.model_validate(
            {
                **{here: facts[there] for here, there in required.items()},
                **_heads(facts),
                "context_length": facts.get("max_position_embeddings", 2048),
                "rope_theta": float(angles.get("rope_theta") or 10_000.0),
                "rope_scaling": _scaling(angles, facts),
                "norm_eps": float(facts.get("rms_norm_eps", 1e-6)),
                "init_std": float(facts.get("initializer_range", 0.02)),
                "tied_embeddings": facts.get("tie_word_embeddings", False),
            }
        )
    except (ValidationError, KeyError, TypeError) as error:
        raise DataError(f"{source} does not describe a Llama model: {describe(error)}.") from error


def write_config(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Return the config.json of a shape, without special ids.

    Args:
        config: The shape.
        dtype: Element type of the weights, such as "float32".
    """
    scaling: dict[str, Any] | None = None
    if config.rope_scaling is not None:
        scaling = {"rope_type": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
    if isinstance(config.rope_scaling, Llama3RopeScaling):
        scaling = {
            **(scaling or {}),
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_context_length,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": rope.head_width(config),
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": config.context_length,
        # Readers before transformers 5 know the first two, later ones the third.
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_theta": config.rope_theta,
            **(scaling or {"rope_type": "default"}),
        },
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "dtype": dtype,
        "use_cache": True,
    }


def describe(error: Exception) -> str:
    """Return what made a shape impossible, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    faults = []
    for fault in error.errors(include_url=False, include_context=False):
        place = ".".join(map(str, fault["loc"]))
        faults.append(f"{place}: {fault['msg']}" if place else fault["msg"])
    return "; ".join(faults).rstrip(".")


def _stack(*named_rows: tuple[str, int]) -> tuple[Part, ...]:
    stop, found = 0, []
    for module, rows in named_rows:
        found.append(Part(f"{module}.weight", stop, stop + rows))
        stop += rows
    return tuple(found)


def _heads(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of heads, absent where they say what follows from the others."""
    heads, keys, channels = (
        facts.get(name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    usual = channels is not None and heads and channels * heads == facts["hidden_size"]
    return {
        "kv_heads": None if keys == heads else keys,
        "head_width": None if usual else channels,
    }


def _refusals(facts: Mapping[str, Any]) -> list[str]:
    found = []
    if facts.get("model_type") != "llama":
        found.append(f"model_type is {facts.get('model_type')!r}, not 'llama'")
    if facts.get("hidden_act", "silu") not in ("silu", "swish"):
        found.append(f"hidden_act is {facts['hidden_act']!r}, not 'silu'")
    found += [f"{name} is true" for name in ("attention_bias", "mlp_bias") if facts.get(name)]
    if facts.get("attention_dropout"):
        found.append(f"attention_dropout is {facts['attention_dropout']}, not 0")
    if facts.get("quantization_config"):
        found.append("its weights are quantized (quantization_config)")
    angles = _rope(facts)
    if angles["rope_type"] not in ("default", "linear", "llama3"):
        found.append(f"rope_type is {angles['rope_type']!r}")
    if angles.get("partial_rotary_factor", 1.0) != 1.0:
        found.append(f"partial_rotary_factor is {angles['partial_rotary_factor']}, not 1")
    return found


def _rope(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Join the old spelling (rope_theta, rope_scaling) and the new one (rope_parameters)."""
    joined: dict[str, Any] = {"rope_theta": facts.get("rope_theta"), "rope_type": "default"}
    if "partial_rotary_factor" in facts:
        joined["partial_rotary_factor"] = facts["partial_rotary_factor"]
    for spelling in ("rope_scaling", "rope_parameters"):
        given = dict(facts.get(spelling) or {})
        if "type" in given:  # before transformers 4.43
            given.setdefault("rope_type", given.pop("type"))
        joined |= given
    return joined


def _scaling(angles: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any] | None:
    match angles["rope_type"]:
        case "default":
            return None
        case "linear":
            return {"kind": "linear", "factor": float(angles["factor"])}
        case _:
            context = angles.get("original_max_position_embeddings")
            return {
                "kind": "llama3",
                "factor": float(angles["factor"]),
                "low_freq_factor": float(angles["low_freq_factor"]),
                "high_freq_factor": float(angles["high_freq_factor"]),
                "original_context_length": context or facts["max_position_embeddings"],
            }
