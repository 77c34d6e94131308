"""The final weights of a run as a Hugging Face folder."""

from pathlib import Path

from atoll.data.cache import TOKENIZER_NAME
from atoll.model.huggingface import save_pretrained
from atoll.model.llama import Llama
from atoll.model.tokenizer_folder import SpecialIds
from atoll.runner.build import Job


def export_weights(job: Job, model: Llama, folder: Path) -> None:
    """Write one model with the job's tokenizer; an older export gives way at the end."""
    facts = job.cache.manifest.tokenizer
    save_pretrained(
        model,
        folder,
        tokenizer=job.cache.folder / TOKENIZER_NAME,
        special_ids=SpecialIds(
            facts.bos_id, () if facts.eos_id is None else (facts.eos_id,), add_bos=facts.add_bos
        ),
        overwrite=True,
    )
