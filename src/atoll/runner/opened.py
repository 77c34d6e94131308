"""Any model by its path, together with its tokenizer: to continue a text or to export it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from atoll.checkpoint.records import MANIFEST
from atoll.errors import DataError, UsageError
from atoll.model.generate import stream
from atoll.model.gguf import GgufFile, is_gguf
from atoll.model.gguf_tokenizer import gguf_tokenizer
from atoll.model.huggingface import is_model_folder, load_pretrained
from atoll.model.llama import Llama
from atoll.model.sampling import Sampler
from atoll.model.tokenizer_folder import (
    TOKENIZER,
    SpecialIds,
    begin_with_bos,
    read_special_ids,
    read_tokenizer,
)
from atoll.runner.folder import RunFolder
from atoll.runner.trained import open_trained

_UNFINISHED = "�"  # what a decoder shows for a character whose last bytes are still to come


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model of one, and what its folder or file says about text.

    Attributes:
        source: What was opened: a checkpoint, a model folder or a GGUF file.
        model: On its device, without gradients.
        tokenizer_files: The tokenizer's files by name; empty where there is none.
        special_ids: Ids that begin and end a text.
    """

    source: Path
    model: Llama
    tokenizer_files: Mapping[str, bytes]
    special_ids: SpecialIds

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            DataError: There is none, or the installed `tokenizers` cannot read it.
        """
        if TOKENIZER not in self.tokenizer_files:
            raise DataError(
                f"{self.source} has no {TOKENIZER}.",
                hint="put the tokenizer's files into the model's folder",
            )
        try:
            return Tokenizer.from_buffer(self.tokenizer_files[TOKENIZER])
        except ValueError as error:
            raise DataError(f"{self.source}: {TOKENIZER} cannot be read: {error}.") from error


def open_model(path: Path, *, device: torch.device, local_model: int | None = None) -> OpenedModel:
    """Open a run, a checkpoint, a Hugging Face model folder or a GGUF file.

    Args:
        path: Of a run, the newest sound checkpoint is taken, or else its final weights.
        device: Where the model is wanted.
        local_model: Which local model of a run or checkpoint, counted from 0. Default: what the
            run itself judges, which is their average where there are several.

    Raises:
        UsageError: There is no model at `path`, or no such local model.
        UnavailableError: The model needs something that is not supported; names what.
        CheckpointError: No checkpoint verifies.
    """
    if local_model is not None and (is_gguf(path) or is_model_folder(path)):
        raise UsageError(
            f"local model {local_model} was asked for; {path} is one model by itself.",
            hint="name the folder of a run with local models, or one of its checkpoints",
        )
    if is_gguf(path):
        file = GgufFile(path)
        files, special_ids = gguf_tokenizer(file.facts)
        return OpenedModel(path, file.load(device=device, trainable=False), files, special_ids)
    if is_model_folder(path):
        files = read_tokenizer(path) if (path / TOKENIZER).is_file() else {}
        model = load_pretrained(path, device=device, trainable=False)
        return OpenedModel(path, model, files, read_special_ids(path))
    is_checkpoint = (path / MANIFEST).is_file()
    run = RunFolder(path.parent.parent if is_checkpoint else path)
    if not is_checkpoint and not run.resolved.is_file():
        raise UsageError(
            f"{path} is not a model." if path.exists() else f"{path} does not exist.",
            hint="name a run's folder, one of its checkpoints, a Hugging Face model folder or a "
            ".gguf file",
        )
    trained = open_trained(path, device=device, local_model=local_model)
    if run.exported:
        files, special_ids = read_tokenizer(run.weights), read_special_ids(run.weights)
    else:
        facts = trained.cache().manifest.tokenizer
        content = trained.tokenizer().content
        if facts.add_bos and facts.bos_id is not None:
            content = begin_with_bos(content, facts.bos_id)
        files = {TOKENIZER: content}
        special_ids = SpecialIds(facts.bos_id, () if facts.eos_id is None else (facts.eos_id,))
    return OpenedModel(trained.weights, trained.model, files, special_ids)


def continue_text(
    opened: OpenedModel, prompt: str, *, max_tokens: int, sampler: Sampler
) -> Iterator[str]:
    """Yield what the model adds to `prompt`, in pieces of whole characters.

    Args:
        opened: The model.
        prompt: The beginning; an empty one stands for the start of a document.
        max_tokens: At most this many tokens are added.
        sampler: How each is chosen.

    Raises:
        UsageError: The prompt is empty and no id begins or ends a document.
    """
    tokenizer, special = opened.tokenizer(), opened.special_ids
    ids = tokenizer.encode(prompt).ids
    if not ids:
        starts = [id for id in (special.bos, *special.eos) if id is not None]
        if not starts:
            raise UsageError(
                "the prompt is empty and the tokenizer has no id that begins or ends a text.",
                hint="give --prompt at least one character",
            )
        ids = starts[:1]
    new: list[int] = []
    shown = ""
    for (id,) in stream(
        opened.model, [ids], max_tokens=max_tokens, stop_ids=special.eos, sampler=sampler
    ):
        assert id is not None, "the only row ends the stream when it ends"
        new.append(id)
        text = tokenizer.decode(new, skip_special_tokens=True)
        if not text.endswith(_UNFINISHED):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(new, skip_special_tokens=True)[len(shown) :]
