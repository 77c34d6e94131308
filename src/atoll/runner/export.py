"""The final weights of a run as a Hugging Face folder."""

from pathlib import Path

from atoll.data.cache import TOKENIZER_NAME
from atoll.model.huggingface import save_pretrained
from atoll.model.tokenizer_folder import SpecialIds
from atoll.runner.build import Job
from atoll.runner.judge import evaluation_model


def export_weights(job: Job, folder: Path) -> None:
    """Write the weights to judge with their tokenizer; an older export gives way at the end."""
    facts = job.cache.manifest.tokenizer
    save_pretrained(
        evaluation_model(job.state),
        folder,
        tokenizer=job.cache.folder / TOKENIZER_NAME,
        special_ids=SpecialIds(
            facts.bos_id, () if facts.eos_id is None else (facts.eos_id,), add_bos=facts.add_bos
        ),
        overwrite=True,
    )
