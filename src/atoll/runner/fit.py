"""Whether a run fits this machine, found out before it starts; and advice when it did not."""

import logging
import os
import shutil
from pathlib import Path

import torch

from atoll.config.budget import Budget
from atoll.config.model import parameter_count
from atoll.config.schema import RunConfig
from atoll.config.strategy import StrategyConfig
from atoll.config.training import TrainingConfig
from atoll.errors import AtollError, StorageError
from atoll.files import MIB
from atoll.model.cost import training_memory

logger = logging.getLogger(__name__)

WEIGHT_BYTES = 4
STATE_BYTES = 12
"""Bytes of a checkpoint for each parameter of each local model: FP32 weight and two moments."""
GIB = 1 << 30


def checkpoint_epochs(training: TrainingConfig, num_epochs: int) -> frozenset[int]:
    """Return the virtual epochs after which the policy keeps a checkpoint.

    The last epoch counts for `interval` too, so that a run can always be lengthened.
    """
    epochs = training.checkpoint_epochs
    match training.checkpoint_policy:
        case "none":
            return frozenset()
        case "final":
            return frozenset({num_epochs})
        case "interval":
            assert isinstance(epochs, int)
            return frozenset(range(epochs, num_epochs + 1, epochs)) | {num_epochs}
        case "explicit":
            assert isinstance(epochs, list)
            return frozenset(epoch for epoch in epochs if epoch <= num_epochs)


def check_disk(config: RunConfig, budget: Budget, folder: Path, *, done_epochs: int = 0) -> None:
    """Refuse a run whose checkpoints and weights do not fit the disk.

    Args:
        config: The recipe.
        budget: Its updates.
        folder: The run's folder, which exists.
        done_epochs: Virtual epochs whose checkpoints are there already.

    Raises:
        StorageError: They do not fit; says how much is needed and what is free.
    """
    planned = checkpoint_epochs(config.training, budget.num_epochs)
    coming = sum(epoch > done_epochs for epoch in planned)
    if config.training.checkpoint_keep is not None:
        # One more lies there while the new one is written and the oldest not yet removed.
        coming = min(coming, config.training.checkpoint_keep + 1)
    weights = budget.parameters * WEIGHT_BYTES
    needed = coming * checkpoint_bytes(config, budget.parameters) + weights
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"{folder} has {free / MIB:,.1f} MiB free; {coming} checkpoints and the final weights "
            f"need {needed / MIB:,.1f} MiB.",
            hint="set training.checkpoint_keep, keep fewer with training.checkpoint_policy, or "
            "choose another disk with runtime.output_dir",
        )


def checkpoint_bytes(config: RunConfig, parameters: int) -> int:
    """Return the bytes of one checkpoint's large tensors.

    Args:
        config: The recipe.
        parameters: P, of one model.
    """
    models = config.strategy.models * STATE_BYTES
    return parameters * (models + WEIGHT_BYTES * _kept_between(config.strategy))


def check_memory(config: RunConfig, device: torch.device, *, amp: torch.dtype | None) -> None:
    """Refuse local models whose state alone does not fit, and warn where activations may not.

    Besides the models themselves there is what the strategy keeps between them and, where there
    are several, the one that is judged.

    Raises:
        AtollError: The state does not fit.
    """
    free = free_memory(device)
    if free is None:
        return
    models = config.strategy.models
    needed = training_memory(
        config.model,
        micro_batch_size=_micro_rows(config)[0],
        num_models=models,
        narrow=amp is not None,
        device_type=device.type,
    )
    others = _kept_between(config.strategy) + (models > 1)
    between = WEIGHT_BYTES * parameter_count(config.model) * others
    state = needed.weights + needed.gradients + needed.moments + between
    whose = f" of {models} local models" if models > 1 else ""
    fewer = f"fewer local models (strategy.models is {models}), " if models > 1 else ""
    if state > free:
        raise AtollError(
            f"weights, gradients and moments{whose} take {state / GIB:.2f} GiB; {device} has "
            f"{free / GIB:.2f} GiB free.",
            hint=f"choose {fewer}a smaller model.width or model.layers, or another runtime.device",
        )
    if needed.total + between > free:
        logger.warning(
            "this may not fit: about %.2f GiB are needed, %s has %.2f GiB free; "
            "a smaller training.micro_batch_size needs less",
            (needed.total + between) / GIB,
            device,
            free / GIB,
        )


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that a run may still take on `device`; None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    limits = [_system_available(), _group_available()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def out_of_memory(error: BaseException, config: RunConfig, device: torch.device) -> AtollError:
    """Return the error that says what to do when memory ran out during an update.

    A microbatch has `training.micro_batch_size` sequences of each local model, all in one backward.
    """
    models = config.strategy.models
    micro, rows = _micro_rows(config)
    if micro > 1:
        half = next(size for size in range(micro // 2, 0, -1) if rows % size == 0)
        now = f"it is {micro}"
        if models > 1:
            now += f" for each of {models} local models, {micro * models} in one backward"
        hint = f"set training.micro_batch_size={half} ({now}); the update stays the same"
    else:
        fewer = f"fewer local models (strategy.models is {models}), or " if models > 1 else ""
        hint = f"choose {fewer}a smaller model.context_length, model.width or model.layers"
    return AtollError(f"memory ran out on {device}: {first_line(error)}", hint=hint)


def first_line(error: BaseException) -> str:
    """Return what an error says first, or its kind where it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _micro_rows(config: RunConfig) -> tuple[int, int]:
    """Return the sequences of one local model in one backward and in one update."""
    rows = config.training.batch_tokens // config.model.context_length // config.strategy.models
    return min(config.training.micro_batch_size, rows), rows


def _kept_between(strategy: StrategyConfig) -> int:
    """Return the models whose weights a strategy keeps: diloco its parent and its momentum."""
    return 1 + (strategy.outer_momentum > 0) if strategy.kind == "diloco" else 0


def _system_available() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _group_available() -> int | None:
    """Return what the control group leaves to this process, as in a container."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
