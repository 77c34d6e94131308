"""Finding the tokenizer that a recipe names, and its beginning and end tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.config.data import HUB, TokenizerConfig
from atoll.data.tokenizer import Tokenizer
from atoll.errors import ConfigError, DataError, UnavailableError

FetchFile = Callable[[str, str, str], Path | None]
"""(repository, revision, file name) -> a local copy, or None where there is no such file."""


_KNOWN_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
_KNOWN_EOS = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")


def open_tokenizer(config: TokenizerConfig, *, fetch: FetchFile | None = None) -> Tokenizer:
    """Open the tokenizer at `config.path`: a folder, a tokenizer.json or `hub:OWNER/NAME`.

    Raises:
        DataError: There is none, or it cannot be read.
        ConfigError: A token that is to be added, or is named, is not in it.
    """
    assert config.path is not None
    content, facts = _read_files(config, fetch or fetch_from_hub)
    tokenizer = Tokenizer(content)
    tokenizer.bos_id = _special_id(tokenizer, config, facts, kind="bos", known=_KNOWN_BOS)
    tokenizer.eos_id = _special_id(tokenizer, config, facts, kind="eos", known=_KNOWN_EOS)
    return tokenizer


def fetch_from_hub(repository: str, revision: str, name: str) -> Path | None:
    """Download one file of a model repository, or return None where it has no such file.

    Raises:
        UnavailableError: huggingface_hub is not installed.
        DataError: The hub does not answer, or knows no such repository or revision.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise UnavailableError(
            f"the tokenizer hub:{repository} needs the package huggingface_hub.",
            hint="pip install 'atoll[hub]'",
        ) from error
    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:  # the hub's errors are all one or the other
        raise DataError(
            f"cannot fetch {name} of hub:{repository} at {revision}: {error}",
            hint="check the name, the revision, the network and HF_TOKEN, or give a local folder",
        ) from error


def _read_files(config: TokenizerConfig, fetch: FetchFile) -> tuple[bytes, dict[str, Any]]:
    name = config.path or ""
    if name.startswith(HUB):
        repository, revision = name.removeprefix(HUB), config.revision or ""
        main = fetch(repository, revision, "tokenizer.json")
        beside = [fetch(repository, revision, extra) for extra in _EXTRA_FILES]
    else:
        path = Path(name).expanduser()
        main = path / "tokenizer.json" if path.is_dir() else path
        beside = [main.parent / extra for extra in _EXTRA_FILES]
    if main is None or not main.is_file():
        raise DataError(
            f"data.tokenizer {name!r} holds no tokenizer.json.",
            hint="give a folder or file with one; for a sentencepiece or slow tokenizer: "
            "transformers.AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)",
        )
    facts: dict[str, Any] = {}
    for path in beside:
        if path is not None and path.is_file():
            facts |= _read_json(path)
    return main.read_bytes(), facts


_EXTRA_FILES = ("special_tokens_map.json", "tokenizer_config.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}.") from error
    return found if isinstance(found, dict) else {}


def _special_id(
    tokenizer: Tokenizer,
    config: TokenizerConfig,
    facts: dict[str, Any],
    *,
    kind: str,
    known: tuple[str, ...],
) -> int | None:
    """Find the id by the recipe, else by the files beside, else by a well-known spelling."""
    setting = f"data.tokenizer.{kind}_token"
    named = config.bos_token if kind == "bos" else config.eos_token
    is_added = config.add_bos if kind == "bos" else config.add_eos
    token = named or _token_text(facts.get(f"{kind}_token"))
    if token is None:
        present = [text for text in known if tokenizer.native.token_to_id(text) is not None]
        token = present[0] if len(present) == 1 else None
    id = None if token is None else tokenizer.native.token_to_id(token)
    if id is None and named is not None:
        raise ConfigError(
            [f"{setting} is {named!r}, which {config.path} does not hold."],
            hint="name a token of its vocabulary",
        )
    if id is None and is_added:
        raise ConfigError(
            [f"data.tokenizer.add_{kind} is true, but {config.path} names no {kind} token."],
            hint=f"set {setting} to one of its tokens, or data.tokenizer.add_{kind} to false",
        )
    return id


def _token_text(entry: object) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None
