"""Llama models out of GGUF files: quantized weights are read as float32, whatever their type.

llama.cpp keeps query and key rows in the order that its own rotation wants (pairs side by side);
they are put back into the half-rotation order of `rope.py`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from pydantic import ValidationError
from torch import Tensor

from atoll.config.model import ModelConfig
from atoll.errors import DataError, UnavailableError, UsageError
from atoll.model import rope
from atoll.model.llama import Llama
from atoll.model.translate import describe

_BLOCK = {
    "attn_q": "qkv",
    "attn_k": "qkv",
    "attn_v": "qkv",
    "attn_output": "attention_out",
    "ffn_gate": "gate_up",
    "ffn_up": "gate_up",
    "ffn_down": "mlp_out",
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
}
_WHOLE = {"token_embd.weight": "embedding", "output_norm.weight": "norm", "output.weight": "head"}


def is_gguf(path: Path) -> bool:
    """Tell whether the file begins as a GGUF file does."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


class GgufFile:
    """An open GGUF file with one Llama model.

    Attributes:
        path: The file.
        facts: Its metadata by name: numbers, texts and lists of either.
        config: The shape of its model.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and read its metadata; tensors are read when they are loaded.

        Raises:
            UsageError: It is not a GGUF file.
            DataError: It is damaged.
            UnavailableError: Its model needs something that is not supported; names what.
        """
        if not is_gguf(path):
            raise UsageError(f"{path} is not a GGUF file.")
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, OverflowError) as error:
            raise DataError(f"{path} is damaged: {error}.") from error
        self.path = path
        self.facts = {name: _value(field) for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = _read_config(self.facts, set(self._tensors), source=str(path))

    def load(
        self,
        *,
        device: torch.device | str = "cpu",
        num_models: int = 1,
        trainable: bool = True,
    ) -> Llama:
        """Return the model; all N get the weights.

        Raises:
            DataError: Tensors are missing or misshapen; names them.
            UnavailableError: A tensor has a type that the installed `gguf` cannot read.
        """
        model = Llama(
            self.config, num_models=num_models, device=device, seed=None, trainable=trainable
        )
        for name, into, heads in _places(model):
            rows = self._rows(name)
            if rows.shape != into.shape[1:]:
                raise DataError(
                    f"{self.path}: {name} has the shape {list(rows.shape)}, not "
                    f"{list(into.shape[1:])}."
                )
            with torch.no_grad():
                into.copy_(rows if heads is None else _half_rotation_order(rows, heads))
        return model

    def _rows(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise DataError(f"{self.path} lacks the tensor {name}.")
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnavailableError(
                f"{self.path}: {name} has the type {tensor.tensor_type.name}, which the installed "
                "gguf package cannot read.",
                hint="convert the file to Q8_0, F16 or F32",
            ) from error
        return torch.from_numpy(values.copy())


def load_gguf(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    num_models: int = 1,
    trainable: bool = True,
) -> Llama:
    """Load the model of a GGUF file; see `GgufFile` for what is raised."""
    return GgufFile(path).load(device=device, num_models=num_models, trainable=trainable)


def _places(model: Llama) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield each GGUF name, the rows of the arena it fills, and its heads if it is rotated."""
    config, view = model.config, model.arena.view
    channels, keys = rope.head_width(config), config.kv_heads or config.heads
    query_rows, key_rows, ffn = config.heads * channels, keys * channels, config.ffn_width
    for foreign, name in _WHOLE.items():
        if name in model.arena.slices:
            yield foreign, view(name), None
    for layer in range(config.layers):
        here, there = f"layers.{layer}", f"blk.{layer}"
        q, k, v = view(f"{here}.qkv").split((query_rows, key_rows, key_rows), dim=1)
        gate, up = view(f"{here}.gate_up").split((ffn, ffn), dim=1)
        joint = {"attn_q": q, "attn_k": k, "attn_v": v, "ffn_gate": gate, "ffn_up": up}
        heads = {"attn_q": config.heads, "attn_k": keys}
        for foreign, name in _BLOCK.items():
            into = joint[foreign] if foreign in joint else view(f"{here}.{name}")
            yield f"{there}.{foreign}.weight", into, heads.get(foreign)


def _half_rotation_order(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of rows: of each head, even channels first, then odd ones."""
    pairs = rows.shape[0] // heads // 2
    return rows.view(heads, pairs, 2, -1).transpose(1, 2).reshape(rows.shape)


def _read_config(facts: Mapping[str, Any], tensors: set[str], *, source: str) -> ModelConfig:
    refused = list(_refusals(facts, tensors))
    if refused:
        raise UnavailableError(f"{source} cannot be run here: {'; '.join(refused)}.")
    try:
        width, heads = facts["llama.embedding_length"], facts["llama.attention.head_count"]
        keys = facts.get("llama.attention.head_count_kv", heads)
        channels = facts.get("llama.attention.key_length", width // heads)
        vocabulary = facts.get("llama.vocab_size") or len(facts["tokenizer.ggml.tokens"])
        scaling = None
        if facts.get("llama.rope.scaling.type", "none") == "linear":
            scaling = {"kind": "linear", "factor": facts["llama.rope.scaling.factor"]}
        return ModelConfig.model_validate(
            {
                "vocab_size": vocabulary,
                "layers": facts["llama.block_count"],
                "width": width,
                "heads": heads,
                "kv_heads": None if keys == heads else keys,
                "head_width": None if channels * heads == width else channels,
                "ffn_width": facts["llama.feed_forward_length"],
                "context_length": facts["llama.context_length"],
                "rope_theta": facts.get("llama.rope.freq_base", 10_000.0),
                "rope_scaling": scaling,
                "norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
                "tied_embeddings": "output.weight" not in tensors,
            }
        )
    except KeyError as error:
        raise DataError(f"{source} lacks {error.args[0]}.") from error
    except (ValidationError, TypeError, ZeroDivisionError) as error:
        raise DataError(f"{source} does not describe a Llama model: {describe(error)}.") from error


def _refusals(facts: Mapping[str, Any], tensors: set[str]) -> Iterator[str]:
    if facts.get("general.architecture") != "llama":
        yield f"its architecture is {facts.get('general.architecture')!r}, not 'llama'"
        return
    if facts.get("llama.expert_count"):
        yield f"it has {facts['llama.expert_count']} experts"
    if facts.get("llama.rope.scaling.type", "none") not in ("none", "linear"):
        yield f"its rope scaling is {facts['llama.rope.scaling.type']!r}"
    if "rope_freqs.weight" in tensors:
        yield "its rotary frequencies are a tensor (rope_freqs.weight)"
    width, heads = facts.get("llama.embedding_length"), facts.get("llama.attention.head_count")
    rotated = facts.get("llama.rope.dimension_count")
    if rotated and width and isinstance(heads, int):
        channels = facts.get("llama.attention.key_length", width // heads)
        if rotated != channels:
            yield f"only {rotated} of {channels} channels are rotated"
    if biases := sorted(name for name in tensors if name.endswith(".bias")):
        yield f"it has biases ({biases[0]})"


def _value(field: gguf.ReaderField) -> Any:
    """Return a metadata field as a Python number, text or list."""
    is_text = field.types[-1:] == [gguf.GGUFValueType.STRING]
    items = [
        bytes(field.parts[index]).decode("utf-8") if is_text else field.parts[index][0].item()
        for index in field.data
    ]
    return items if field.types[:1] == [gguf.GGUFValueType.ARRAY] else items[0]
