"""Model folders of the Hugging Face kind, read and written without transformers.

FOLDER/config.json              the shape (`translate.py`)
FOLDER/generation_config.json   ids that begin and end a text
FOLDER/model.safetensors        the weights, or several files and model.safetensors.index.json
FOLDER/tokenizer.json, tokenizer_config.json, ...
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atoll.errors import DataError, UnavailableError, UsageError
from atoll.files import fsync_folder, read_json, storage_error, write_json
from atoll.model.card import write_card
from atoll.model.llama import Llama
from atoll.model.tokenizer_folder import (
    SpecialIds,
    read_special_ids,
    read_tokenizer,
    write_tokenizer,
)
from atoll.model.translate import parts, read_config, write_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # a buffer that old exports carry; it follows from config


def load_pretrained(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    num_models: int = 1,
    trainable: bool = True,
) -> Llama:
    """Load a Llama-architecture folder; all N models get its weights, as float32.

    Args:
        folder: A folder with config.json and safetensors, whole or sharded.
        device: Where the model is to live.
        num_models: N.
        trainable: Whether gradients exist.

    Raises:
        UsageError: The folder holds no model.
        UnavailableError: The model needs something that is not supported; names what.
        DataError: Tensors are missing, left over, misshapen or damaged; names them.
    """
    config = read_config(_read_facts(folder), source=str(folder / "config.json"))
    files = _weight_files(folder)
    model = Llama(config, num_models=num_models, device=device, seed=None, trainable=trainable)
    wanted = {
        part.name: model.arena.view(name)[:, part.start : part.stop]
        for name, stacked in parts(config).items()
        for part in stacked
    }
    left_over = fill(wanted, files)
    if config.tied_embeddings:
        left_over.discard("lm_head.weight")  # transformers ties it too, whatever it holds
    left_over = {name for name in left_over if not name.endswith(_IGNORED_SUFFIX)}
    if left_over:
        raise UnavailableError(
            f"{folder} has tensors that a Llama without biases has no place for: "
            f"{_some(left_over)}."
        )
    return model


def is_model_folder(folder: Path) -> bool:
    """Tell whether the folder looks like a model: it has a config.json with a model_type."""
    path = folder / "config.json"
    facts = read_json(path) if path.is_file() else None
    return isinstance(facts, dict) and "model_type" in facts


def save_pretrained(
    model: Llama,
    folder: Path,
    *,
    tokenizer: Path | Mapping[str, bytes] | None = None,
    special_ids: SpecialIds | None = None,
    model_index: int = 0,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
) -> None:
    """Write one of the models as a folder that transformers loads without remote code.

    The folder appears complete or not at all; with `overwrite` the old one gives way at the end.

    Args:
        model: The N models.
        folder: Where to; its parents are created.
        tokenizer: A tokenizer.json, a folder whose tokenizer files are copied, or such files by
            name. Default: none.
        special_ids: Ids that begin and end a text. Default: those that the folder `tokenizer`
            names.
        model_index: Which of the N models.
        dtype: Element type of the written weights.
        overwrite: Whether an existing folder may be replaced.

    Raises:
        UsageError: The folder exists and may not be replaced, or is a file.
        StorageError: The file system refused.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder.", hint="choose a new folder")
    if not overwrite and folder.exists() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} exists and is not empty.", hint="choose a new folder, or remove this one"
        )
    if special_ids is None:
        special_ids = read_special_ids(tokenizer) if isinstance(tokenizer, Path) else SpecialIds()
    files = read_tokenizer(tokenizer) if isinstance(tokenizer, Path) else tokenizer
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _write_model(model, staging, special_ids, model_index, dtype)
        if files is not None:
            write_tokenizer(files, staging, special_ids, context_length=model.config.context_length)
        write_card(
            staging / "README.md",
            model.config,
            name=folder.name,
            has_tokenizer=files is not None,
        )
        _replace(folder, staging)
    except OSError as error:
        raise storage_error(error, folder) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def foreign_tensors(
    model: Llama, *, model_index: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return one model's weights under Hugging Face names, as CPU tensors of `dtype`."""
    return {
        part.name: model.arena.view(name)[model_index, part.start : part.stop]
        .detach()
        .to("cpu", dtype)
        .contiguous()
        for name, stacked in parts(model.config).items()
        for part in stacked
    }


def fill(wanted: Mapping[str, Tensor], files: list[Path]) -> set[str]:
    """Copy every wanted tensor out of the files, and return the names nobody wanted.

    Args:
        wanted: Name -> [N, *shape], all N of which are filled.
        files: safetensors files; together they hold each name once.

    Raises:
        DataError: A tensor is missing or misshapen, or a file is not safetensors.
    """
    missing, left_over = set(wanted), set()
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name not in wanted:
                        left_over.add(name)
                        continue
                    _copy(file.get_tensor(name), wanted[name], source=f"{path}: {name}")
                    missing.discard(name)
        except (SafetensorError, OSError) as error:
            raise DataError(f"cannot read {path}: {error}.") from error
    if missing:
        raise DataError(f"{files[0].parent} lacks the tensors {_some(missing)}.")
    return left_over


@torch.no_grad()
def _copy(tensor: Tensor, into: Tensor, *, source: str) -> None:
    if tensor.shape != into.shape[1:]:
        raise DataError(
            f"{source} has the shape {list(tensor.shape)}; config.json asks for "
            f"{list(into.shape[1:])}."
        )
    into.copy_(tensor.to(into.device))


def _read_facts(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} is not a model folder: it has no config.json.",
            hint="give a folder written by `atoll export` or by transformers' save_pretrained",
        )
    facts = read_json(folder / "config.json")
    if not isinstance(facts, dict):
        raise DataError(f"{folder / 'config.json'} is not a JSON object.")
    return facts


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        try:
            names = sorted(set(index["weight_map"].values()))
        except (TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{folder / INDEX} has no weight_map of file names.") from error
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise DataError(f"{folder} lacks {_some(set(absent))}, which {INDEX} names.")
        return [folder / name for name in names]
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickles:
        raise UnavailableError(
            f"{folder} has its weights as pickle ({pickles[0]}), which can run code and is not "
            "read.",
            hint="convert it once where you trust it: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
        )
    raise DataError(f"{folder} has neither {WEIGHTS} nor {INDEX}.")


def _write_model(
    model: Llama, folder: Path, special_ids: SpecialIds, model_index: int, dtype: torch.dtype
) -> None:
    special = special_ids.facts()
    shape = write_config(model.config, dtype=str(dtype).removeprefix("torch."))
    write_json(folder / "config.json", shape | special | {"pad_token_id": None})
    write_json(folder / "generation_config.json", special)
    tensors = foreign_tensors(model, model_index=model_index, dtype=dtype)
    try:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:
        raise _refusal(error) from error
    with open(folder / WEIGHTS, "r+b") as file:
        os.fsync(file.fileno())


def _refusal(error: SafetensorError) -> Exception:
    """Return the OSError that safetensors hides in its text, or the error itself."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else error


def _replace(folder: Path, staging: Path) -> None:
    """Give `staging` the name `folder`; what was there is removed after it has made room."""
    fsync_folder(staging)
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        os.replace(folder, old)
    os.replace(staging, folder)
    fsync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _some(names: set[str]) -> str:
    """Spell at most five names."""
    listed = sorted(names)
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(listed[:5]) + more
