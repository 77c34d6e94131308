"""The tokenizer's files in a model folder, and the ids that begin and end a text."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import DataError
from atoll.files import read_json, write_bytes, write_json

TOKENIZER = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_COPIED = (
    TOKENIZER,
    _SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids with a meaning outside the text.

    Attributes:
        bos: Begins a text, or None.
        eos: Each of these ends a text; the first is the one that is written after one.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return both as a config.json and a generation_config.json spell them."""
        match self.eos:
            case ():
                eos = None
            case (only,):
                eos = only
            case several:
                eos = list(several)
        return {"bos_token_id": self.bos, "eos_token_id": eos}


def read_special_ids(folder: Path) -> SpecialIds:
    """Return the ids that a model folder names; none for a bare tokenizer.json.

    generation_config.json is asked first, then config.json, then tokenizer_config.json.

    Raises:
        DataError: One of these files is not what it should be.
    """
    for name in ("generation_config.json", "config.json"):
        facts = _read_object(folder / name)
        bos, eos = facts.get("bos_token_id"), facts.get("eos_token_id")
        if bos is not None or eos is not None:
            several = eos if isinstance(eos, list) else [] if eos is None else [eos]
            return SpecialIds(bos, tuple(several))
    settings = _read_object(folder / _SETTINGS)
    ids = _ids_by_spelling(folder / TOKENIZER) if settings else {}
    eos = ids.get(_spelling(settings.get("eos_token")))
    bos = ids.get(_spelling(settings.get("bos_token")))
    return SpecialIds(bos, () if eos is None else (eos,))


def write_tokenizer(
    source: Path, folder: Path, special_ids: SpecialIds, *, context_length: int
) -> None:
    """Put the tokenizer's files into a model folder, as transformers' AutoTokenizer wants them.

    Args:
        source: A tokenizer.json, or a folder whose tokenizer files are copied as they are.
        folder: The model folder, which exists.
        special_ids: Named in tokenizer_config.json where `source` has no such file.
        context_length: Longest text of the model, in tokens.

    Raises:
        DataError: `source` has no tokenizer.json.
    """
    files = [source / name for name in _COPIED] if source.is_dir() else [source]
    copied = [path for path in files if path.is_file()]
    if not any(path.name == TOKENIZER or path == source for path in copied):
        raise DataError(f"{source} has no {TOKENIZER}.")
    for path in copied:
        write_bytes(folder / (TOKENIZER if path == source else path.name), path.read_bytes())
    if (folder / _SETTINGS).exists():
        return
    spellings = {id: text for text, id in _ids_by_spelling(folder / TOKENIZER).items()}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    if special_ids.bos is not None:
        settings["bos_token"] = spellings[special_ids.bos]
    if special_ids.eos:
        settings["eos_token"] = spellings[special_ids.eos[0]]
    write_json(folder / _SETTINGS, settings)


def _ids_by_spelling(path: Path) -> dict[str, int]:
    facts = _read_object(path)
    try:
        vocabulary = facts["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [piece, score] in the order of ids
            vocabulary = {piece: id for id, (piece, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in facts.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a tokenizer: {error!r}.") from error
    return {**vocabulary, **added}


def _spelling(token: Any) -> str:
    """Return the text of a special token, written as text or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, or an empty one where there is no such file."""
    if not path.is_file():
        return {}
    facts = read_json(path)
    if not isinstance(facts, dict):
        raise DataError(f"{path} is not a JSON object but {json.dumps(facts)[:40]}.")
    return facts
