"""The folder of a run: its files, and whether a run may begin or go on in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.checkpoint.load import Listed, list_checkpoints
from atoll.errors import AtollError, UsageError
from atoll.files import read_json


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names of everything in a run's folder.

    Attributes:
        path: The folder itself, `runtime.output_dir`.
    """

    path: Path

    @property
    def resolved(self) -> Path:
        """The whole recipe; it loads by itself."""
        return self.path / "resolved.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def best(self) -> Path:
        return self.path / "best.json"

    @property
    def plot(self) -> Path:
        return self.path / "loss.svg"

    @property
    def weights(self) -> Path:
        """Final weights as a Hugging Face folder."""
        return self.path / "weights"

    @property
    def exported(self) -> bool:
        """Whether the final weights are there."""
        return (self.weights / "config.json").is_file()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def status(self) -> str | None:
        """What result.json says: running (or killed), finished, interrupted, failed; None: new."""
        if not self.resolved.exists() and not self.complete_checkpoints():
            return None
        return self.read_result().get("status", "running") if self.result.exists() else "running"

    def read_result(self) -> dict[str, Any]:
        """Return result.json, empty where there is none."""
        return read_json(self.result) if self.result.exists() else {}

    def recipe_file(self) -> Path:
        """Return the run's own recipe.

        Raises:
            UsageError: This is no run's folder.
        """
        if not self.resolved.is_file():
            raise UsageError(
                f"{self.path} is no run's folder: it has no {self.resolved.name}.",
                hint="name the runtime.output_dir of an earlier `atoll train`",
            )
        return self.resolved

    def complete_checkpoints(self) -> list[Listed]:
        """Return the checkpoints whose manifests can be read, ascending."""
        return [found for found in list_checkpoints(self.checkpoints) if found.manifest]


def refuse_second_start(folder: RunFolder) -> None:
    """Refuse to start a new run where one was started before.

    Raises:
        UsageError: One was; names the two ways on.
    """
    try:
        status = folder.status
    except AtollError:
        status = "damaged"
    if status is not None:
        found = "a run that is running or was killed" if status == "running" else f"a {status} run"
        raise UsageError(
            f"{folder.path} holds {found}; a new run needs a folder of its own.",
            hint=f"go on with it: --resume {folder.path}; or choose another folder: "
            "--set runtime.output_dir=...",
        )


def refuse_finished(folder: RunFolder, *, total_steps: int) -> None:
    """Refuse to resume a run that has made all its updates.

    Raises:
        UsageError: It is finished; names the setting that lengthens it.
    """
    result = folder.read_result()
    if result.get("status") == "finished" and result.get("steps", 0) >= total_steps:
        raise UsageError(
            f"{folder.path} is finished: all {total_steps} updates are made.",
            hint="raise training.tokens_per_parameters to train on, where lr_schedule allows it",
        )
