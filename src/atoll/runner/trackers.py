"""Writers of metrics besides metrics.jsonl; each needs a package that atoll itself does not."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from atoll.errors import UnavailableError
from atoll.files import identity

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Tracker(Protocol):
    """Takes the numbers of a line of metrics.jsonl."""

    def write(self, numbers: Mapping[str, float], *, step: int) -> None:
        """Add the numbers measured at `step`."""
        ...

    def close(self) -> None:
        """Write out what is pending."""
        ...


def check_trackers(names: Sequence[str]) -> None:
    """Refuse, before anything runs, what is not installed.

    Raises:
        UnavailableError: A package is missing; the hint installs it.
    """
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UnavailableError(
                f"runtime.trackers names {name}, and the package {PACKAGES[name]} is not "
                "installed.",
                hint=f"pip install 'atoll[{name}]', or leave it out of runtime.trackers",
            )


def open_trackers(
    names: Sequence[str], *, folder: Path, config: Mapping[str, Any]
) -> list[Tracker]:
    """Open every tracker of `runtime.trackers`.

    Args:
        names: tensorboard, wandb.
        folder: The run's folder; files go below it.
        config: The whole recipe, for trackers that show it.
    """
    check_trackers(names)
    opened: list[Tracker] = []
    for name in names:
        match name:
            case "tensorboard":
                opened.append(TensorBoardTracker(folder / "tensorboard"))
            case "wandb":
                wandb = importlib.import_module("wandb")
                opened.append(WandbTracker(wandb, folder=folder, config=config))
    return opened


class TensorBoardTracker:
    """Writes event files that `tensorboard --logdir` reads."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, numbers: Mapping[str, float], *, step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Writes a Weights & Biases run; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, wandb: Any, *, folder: Path, config: Mapping[str, Any]) -> None:
        """Begin the run.

        Args:
            wandb: The module, or one that has its `init`.
            folder: Where it keeps its files; names the run, and a resumed run goes on in it.
            config: The whole recipe.
        """
        self._run = wandb.init(
            project="atoll",
            name=folder.name,
            id=identity(str(folder.resolve()))[:16],
            dir=str(folder),
            config=dict(config),
            resume="allow",
        )

    def write(self, numbers: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
