"""The tokenizer's files in a model folder, and the ids that begin and end a text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from atoll.errors import DataError
from atoll.files import read_json, write_bytes, write_json

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
_FILES = (
    TOKENIZER,
    SETTINGS,
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
        add_bos: Whether a tokenizer that is written with these is to put `bos` before every text.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    add_bos: bool = False

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
    settings = _read_object(folder / SETTINGS)
    ids = _ids_by_spelling(folder / TOKENIZER) if settings else {}
    eos = ids.get(_spelling(settings.get("eos_token")))
    bos = ids.get(_spelling(settings.get("bos_token")))
    return SpecialIds(bos, () if eos is None else (eos,))


def read_tokenizer(source: Path) -> dict[str, bytes]:
    """Return a tokenizer's files by name.

    Args:
        source: A tokenizer.json, or a folder with one and the files that go with it.

    Raises:
        DataError: There is no tokenizer.json.
    """
    if source.is_file():
        return {TOKENIZER: source.read_bytes()}
    files = {name: (source / name).read_bytes() for name in _FILES if (source / name).is_file()}
    if TOKENIZER not in files:
        raise DataError(f"{source} has no {TOKENIZER}.")
    return files


def begin_with_bos(content: bytes, bos: int) -> bytes:
    """Return a tokenizer.json that puts the id `bos` before every text, as training did.

    Unchanged if it does so already.
    """
    native = Tokenizer.from_buffer(content)
    if native.encode("a").ids[:1] == [bos]:
        return content
    spelling = native.id_to_token(bos)
    first = processors.TemplateProcessing(
        single=[spelling, "$A"], pair=[spelling, "$A", "$B"], special_tokens=[(spelling, bos)]
    )
    before = native.post_processor
    native.post_processor = first if before is None else processors.Sequence([before, first])
    return native.to_str(pretty=True).encode()


def write_tokenizer(
    files: Mapping[str, bytes], folder: Path, special_ids: SpecialIds, *, context_length: int
) -> None:
    """Put a tokenizer's files into a model folder, as transformers' AutoTokenizer wants them.

    Args:
        files: Contents by name, with a tokenizer.json.
        folder: The model folder.
        special_ids: Named in a new tokenizer_config.json where `files` has none.
        context_length: Longest text of the model, in tokens.
    """
    files = dict(files)
    if special_ids.add_bos and special_ids.bos is not None:
        files[TOKENIZER] = begin_with_bos(files[TOKENIZER], special_ids.bos)
    for name, content in files.items():
        write_bytes(folder / name, content)
    if SETTINGS in files:
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
    write_json(folder / SETTINGS, settings)


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
