"""What result.json says while a run goes on, when it failed, and when it is done."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from atoll.errors import AtollError
from atoll.evaluation.loss import LossResult
from atoll.files import identity
from atoll.runner.build import Job
from atoll.runner.changes import config_identity
from atoll.runner.figures import consensus_figures, strategy_summary
from atoll.tensors import parameter_digest
from atoll.train.binding import source_hash, source_revision, versions

if TYPE_CHECKING:
    from atoll.runner.session import Session

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class RunResult:
    """The end of a run in this process.

    Attributes:
        folder: The run's folder.
        facts: What result.json holds.
    """

    folder: Path
    facts: dict[str, Any]

    @property
    def status(self) -> Literal["finished", "interrupted"]:
        return self.facts["status"]

    @property
    def step(self) -> int:
        return self.facts["steps"]


def running_facts(job: Job) -> dict[str, Any]:
    """Return what result.json says until the run ends; it stays so when the process is killed."""
    return {"status": "running", "steps": job.state.step, **_identities(job)}


def failed_facts(session: "Session", error: BaseException) -> dict[str, Any]:
    """Return what result.json says after an error."""
    job = session.job
    return {
        "status": "failed",
        "steps": job.state.step,
        "error": error.message if isinstance(error, AtollError) else repr(error),
        "hint": error.hint if isinstance(error, AtollError) else None,
        **session.totals.facts(),
        **_identities(job),
    }


def result_facts(
    session: "Session",
    judged: LossResult | None,
    *,
    wall_seconds: float,
    resumed_from: int | None,
) -> dict[str, Any]:
    """Return what result.json says about a run that ended well, or was stopped.

    Args:
        session: The run, its loader closed.
        judged: Loss of the whole held-out split, None where it was not scored.
        wall_seconds: From the start of this process's session to now.
        resumed_from: Updates of the checkpoint that this process went on from.
    """
    job, window = session.job, session.last_window
    weights = job.state.strategy.evaluation_weights(job.state.step)
    return {
        "status": "interrupted" if session.stop.requested else "finished",
        "stopped_by": session.stop.reason,
        "steps": job.state.step,
        "cursor": job.state.cursor,
        "resumed_from_step": resumed_from,
        **session.totals.facts(),
        "tokens_per_second": session.targets_per_second,
        "wall_seconds": wall_seconds,
        "train_loss_nats_per_token": None if window is None else window.loss_nats_per_token,
        "validation": None if judged is None else judged.facts(),
        "validation_loss_nats_per_token": None if judged is None else judged.nats_per_token,
        "validation_bits_per_byte": None if judged is None else judged.bits_per_byte,
        "best": session.judge.best,
        "pending_prefetches": job.loader.pending_prefetches,
        "strategy": _strategy_facts(session),
        "parameter_digest": parameter_digest(weights),
        "state_digests": job.state.digests(),
        "peak_memory_bytes": peak_memory_bytes(job.device),
        **_identities(job),
    }


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory this process has held: on the GPU, or on the host without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":  # Windows does not tell without another package
        return None
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def _strategy_facts(session: "Session") -> dict[str, Any]:
    """Return how the local models shared, what that would send, and how far apart they ended.

    Packed models send nothing: their traffic is what each would send as a rank, so it is predicted.
    """
    job = session.job
    found = strategy_summary(job.config.strategy)
    if found["models"] > 1:
        found["predicted_traffic_per_local_model"] = session.totals.traffic_facts()
    return found | consensus_figures(job.state)


def _identities(job: Job) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "total_steps": job.budget.total_steps,
        "num_epochs": job.budget.num_epochs,
        "parameters": job.budget.parameters,
        "device": str(job.device),
        "config_identity": config_identity(job.config),
        "cache_identity": job.cache.manifest.cache_identity,
        "loader_identity": job.loader.identity,
        "binding_identity": identity(job.binding),
        "source_hash": source_hash(),
        "source_revision": source_revision(),
        "versions": versions(),
    }
