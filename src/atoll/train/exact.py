"""Switches of torch that decide whether equal inputs give equal bits."""

import os

import torch

from atoll.errors import UsageError

CUBLAS_WORKSPACE = ":4096:8"


def configure_torch(*, deterministic: bool, cpu_threads: int | None) -> None:
    """Set this process's threads and, where asked, its deterministic algorithms.

    Called once, before the first tensor on a GPU. It is the one place that sets an environment
    variable: cuBLAS reads CUBLAS_WORKSPACE_CONFIG when its handle is made, and torch offers no
    other way to tell it.

    Args:
        deterministic: Whether equal inputs must give equal bits.
        cpu_threads: Threads of CPU kernels; None leaves torch's choice. They decide how sums are
            cut into parts, so that the binding records them.

    Raises:
        UsageError: cuBLAS is already running without a workspace that makes it deterministic.
    """
    if cpu_threads is not None:
        torch.set_num_threads(cpu_threads)
    if deterministic:
        _fix_cublas_workspace()
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = False
    # Filling every new tensor with NaN only helps to find kernels that read what nothing wrote; it
    # decides no bit of a correct program and costs a pass over each allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def _fix_cublas_workspace() -> None:
    wanted = (CUBLAS_WORKSPACE, ":16:8")
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") in wanted:
        return
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        raise UsageError(
            "runtime.deterministic is true, and CUDA was used in this process before.",
            hint=f"set the environment variable CUBLAS_WORKSPACE_CONFIG={CUBLAS_WORKSPACE} before "
            "the process starts",
        )
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
