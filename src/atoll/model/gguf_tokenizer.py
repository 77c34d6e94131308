"""The tokenizer inside a GGUF file, as the files that a model folder has."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from atoll.errors import DataError, UnavailableError
from atoll.model.tokenizer_folder import SETTINGS, TOKENIZER, SpecialIds, begin_with_bos

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that stand outside the merges


def gguf_tokenizer(facts: Mapping[str, Any]) -> tuple[dict[str, bytes], SpecialIds]:
    """Return the tokenizer's files by name, and the ids that begin and end a text.

    Args:
        facts: Metadata of an open GGUF file.

    Raises:
        UnavailableError: It is of a kind, or splits text in a way, that is not supported.
        DataError: Its lists do not fit each other.
    """
    kind, split = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    before = {
        "gpt-2": [_byte_level()],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), _byte_level()],
    }
    if kind != "gpt2" or split not in before:
        raise UnavailableError(
            f"the file's tokenizer is of kind {kind!r} and splits text as {split!r}; supported "
            f"are byte-level BPE ('gpt2') with {' or '.join(before)}.",
            hint="take the tokenizer from the model's Hugging Face folder",
        )
    native = _native(facts)
    native.pre_tokenizer = pre_tokenizers.Sequence(before[split])
    native.decoder = decoders.ByteLevel()
    special = {
        name: facts.get(f"tokenizer.ggml.{long}_token_id")
        for name, long in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    bos, eos = special["bos"], special["eos"]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    for name, id in special.items():
        if id is not None:
            settings[f"{name}_token"] = native.id_to_token(id)
    content = native.to_str(pretty=True).encode()
    if facts.get("tokenizer.ggml.add_bos_token") and bos is not None:
        content = begin_with_bos(content, bos)
    files = {
        TOKENIZER: content,
        SETTINGS: (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode(),
    }
    if template := facts.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template.encode()
    return files, SpecialIds(bos, () if eos is None else (eos,))


def _native(facts: Mapping[str, Any]) -> Tokenizer:
    try:
        tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    except KeyError as error:
        raise DataError(f"the file's tokenizer lacks {error.args[0]}.") from error
    if len(kinds) != len(tokens) or any(len(merge) != 2 for merge in merges):
        raise DataError("the file's tokenizer has lists that do not fit each other.")
    native = Tokenizer(BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            native.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            native.add_tokens([AddedToken(token, normalized=False)])
    return native


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
