"""One run while it goes on: what is written after each update, each epoch and at the end."""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from atoll.checkpoint.records import MANIFEST, step_folder
from atoll.checkpoint.retain import retain
from atoll.checkpoint.save import save_checkpoint
from atoll.evaluation.loss import LossResult
from atoll.files import write_json
from atoll.log import JsonLines
from atoll.runner.build import Job
from atoll.runner.changes import config_identity
from atoll.runner.figures import consensus_figures, window_figures
from atoll.runner.fit import checkpoint_epochs
from atoll.runner.folder import RunFolder
from atoll.runner.judge import Judge
from atoll.runner.progress import Pace, Progress, duration, rate
from atoll.runner.stop import StopRequest
from atoll.runner.trackers import Tracker
from atoll.strategy.base import Traffic
from atoll.train.binding import source_hash, source_revision
from atoll.train.loop import StepRecord, Window, train

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Totals:
    """What has been counted; survives in every checkpoint.

    Attributes:
        epochs_done: Virtual epochs that were evaluated and, where due, saved.
        training_targets: Targets of all updates.
        training_seconds: Time of all updates, without evaluations and checkpoints.
        traffic_payload_bytes: What all exchanges handed to the channel, as `Traffic` counts it.
        traffic_wire_bytes: What they must put on the wire for it.
        exchanges: How many there were.
    """

    epochs_done: int = 0
    training_targets: float = 0.0
    training_seconds: float = 0.0
    traffic_payload_bytes: int = 0
    traffic_wire_bytes: int = 0
    exchanges: int = 0

    def count(self, window: Window, traffic: Traffic) -> None:
        """Add the updates of a window and what their exchanges sent."""
        self.training_targets += window.targets
        self.training_seconds += window.seconds
        self.traffic_payload_bytes += traffic.payload_bytes
        self.traffic_wire_bytes += traffic.wire_bytes
        self.exchanges += traffic.exchanges

    def facts(self) -> dict[str, Any]:
        """Return what result.json says of any run."""
        return {
            "epochs_done": self.epochs_done,
            "training_targets": self.training_targets,
            "training_seconds": self.training_seconds,
        }

    def traffic_facts(self) -> dict[str, int]:
        """Return what was sent so far."""
        return {
            "payload_bytes": self.traffic_payload_bytes,
            "wire_bytes": self.traffic_wire_bytes,
            "exchanges": self.exchanges,
        }


@dataclass(slots=True)
class Session:
    """A run between its start (or resumption) and its end in this process.

    Attributes:
        job: What trains.
        folder: Where everything is written.
        stop: Whether to stop after the current update.
        progress: Where people look.
        metrics: metrics.jsonl.
        trackers: Other writers of the same numbers.
        judge: Scores and remembers the best.
        totals: Counts over all processes of the run.
    """

    job: Job
    folder: RunFolder
    stop: StopRequest
    progress: Progress
    metrics: JsonLines
    trackers: list[Tracker]
    judge: Judge
    totals: Totals
    last_window: Window | None = None
    _windows: list[tuple[float, float]] = field(default_factory=list)
    _traffic: Traffic = field(default_factory=Traffic)

    def train(self) -> None:
        """Make the updates that are left, with everything that is due between them."""
        state, budget = self.job.state, self.job.budget
        self._finish_epoch()  # one that a stop kept from being evaluated
        for record in train(
            state, self.job.loader, self.job.plan, should_stop=lambda: self.stop.requested
        ):
            self._traffic += record.traffic
            self.progress.tick(record.step, budget.total_steps)
            if record.window is not None:
                self._log(record, record.window)
            self._finish_epoch()
            if self.stop.requested and record.window is not None:
                break  # asked for while the epoch was judged: every update so far has been read
        if self.stop.requested and self.job.config.training.checkpoint_policy != "none":
            self.save()

    def save(self) -> None:
        """Keep a checkpoint of the state at rest, unless there is one of this step."""
        state, training = self.job.state, self.job.config.training
        if (step_folder(self.folder.checkpoints, state.step) / MANIFEST).exists():
            return
        started = time.perf_counter()
        save_checkpoint(
            self.folder.checkpoints,
            state.snapshot(),
            step=state.step,
            binding=self.job.binding,
            run=self.checkpoint_facts(),
        )
        if training.checkpoint_keep is not None:
            retain(self.folder.checkpoints, keep=training.checkpoint_keep)
        self.record(
            "checkpoint", {"seconds": round(time.perf_counter() - started, 3)}, tracked=False
        )

    def checkpoint_facts(self) -> dict[str, Any]:
        """Return what a checkpoint's manifest says about the run."""
        job = self.job
        return {
            "config": job.config.model_dump(mode="json"),
            "config_identity": config_identity(job.config),
            "cache_identity": job.cache.manifest.cache_identity,
            "loader_identity": job.loader.identity,
            "tokenizer_sha256": job.tokenizer.sha256,
            "source_hash": source_hash(),
            "source_revision": source_revision(),
            "totals": asdict(self.totals),
            "best": self.judge.best,
        }

    def record(self, event: str, numbers: Mapping[str, Any], *, tracked: bool = True) -> None:
        """Write one line of metrics.jsonl, and its numbers to the trackers."""
        step = self.job.state.step
        self.metrics.write({"event": event, "step": step, **numbers})
        plain = {
            f"{event}/{name}": float(value)
            for name, value in numbers.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for tracker in self.trackers if tracked else ():
            tracker.write(plain, step=step)

    @property
    def targets_per_second(self) -> float | None:
        """Rate of this process's updates, without the first window, where there are more.

        The first one holds what happens once: compilation, the first reads, warm-up of caches.
        """
        windows = self._windows[1:] or self._windows
        seconds = sum(seconds for _, seconds in windows)
        return sum(targets for targets, _ in windows) / seconds if seconds else None

    def _log(self, record: StepRecord, window: Window) -> None:
        self.last_window = window
        self._windows.append((window.targets, window.seconds))
        self.totals.count(window, self._traffic)
        consensus = consensus_figures(self.job.state)
        self.record(
            "train",
            {
                "loss_nats_per_token": window.loss_nats_per_token,
                **window_figures(window),
                **consensus,
                "lr": record.lr,
                "cursor": record.cursor,
                "training_targets": self.totals.training_targets,
                "targets_per_second": window.targets_per_second,
                "updates": len(window.scalars),
                "seconds": window.seconds,
                "traffic_payload_bytes": self._traffic.payload_bytes,
                "traffic_wire_bytes": self._traffic.wire_bytes,
            },
        )
        self._traffic = Traffic()
        self.progress.pace(self._pace(record.step, window, consensus))

    def _pace(self, step: int, window: Window, consensus: Mapping[str, float]) -> Pace:
        left = None
        if len(self._windows) > 1 and self.targets_per_second:
            updates = self.job.budget.total_steps - step
            left = updates * self.job.budget.batch_tokens / self.targets_per_second
            if len(self._windows) == 2:
                logger.info(
                    "%s targets; about %s for the %d updates that are left",
                    rate(self.targets_per_second),
                    duration(left),
                    updates,
                )
        return Pace(
            step,
            self.job.budget.total_steps,
            window.loss_nats_per_token,
            window.targets_per_second,
            left,
            models=self.job.config.strategy.models,
            consensus_distance=consensus.get("consensus_distance"),
        )

    def _finish_epoch(self) -> None:
        """Evaluate, sample and save, where a virtual epoch has ended and that was not done yet."""
        ends = self.job.budget.epoch_ends
        epoch = self.totals.epochs_done + 1
        if self.stop.requested or epoch > len(ends) or self.job.state.step < ends[epoch - 1]:
            return
        found = self.judge.epoch(epoch)
        if self.stop.requested:
            return
        self.totals.epochs_done = epoch
        if found is not None:
            self._record_evaluation(epoch, found)
        sample = self.judge.sample()
        if sample is not None:
            self.record("sample", {"epoch": epoch, "text": sample}, tracked=False)
            self.progress.note(f"sample: {sample!r}")
        due = checkpoint_epochs(self.job.config.training, len(ends))
        if epoch in due:
            self.save()

    def _record_evaluation(self, epoch: int, found: LossResult) -> None:
        self.record("evaluation", {"epoch": epoch, **found.facts()})
        assert self.judge.best is not None
        if self.judge.best["epoch"] == epoch:
            write_json(self.folder.best, self.judge.best)
        self.progress.note(
            f"epoch {epoch}/{self.job.budget.num_epochs}: held-out loss "
            f"{found.nats_per_token:.4f} nats per token, {found.bits_per_byte:.4f} bits per byte"
        )
