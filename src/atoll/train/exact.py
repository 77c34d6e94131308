"""Switches of torch that decide whether equal inputs give equal bits."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from atoll.errors import UsageError

CUBLAS_WORKSPACE = ":4096:8"


@contextmanager
def torch_switches(
    *, deterministic: bool, cpu_threads: int | None, compiled: bool = True
) -> Iterator[None]:
    """Set this process's threads and, where asked, its deterministic algorithms, for a while.

    Entered before the first tensor on a GPU. It is the one place that sets an environment
    variable: cuBLAS reads CUBLAS_WORKSPACE_CONFIG when its handle is made, and torch offers no
    other way to tell it. That variable stays set; everything else is put back.

    Args:
        deterministic: Whether equal inputs must give equal bits.
        cpu_threads: Threads of CPU kernels; None leaves torch's choice. They decide how sums are
            cut into parts, so that the binding records them.
        compiled: Whether anything will be compiled; without it the compiler, which takes seconds
            to import, is not told.

    Raises:
        UsageError: cuBLAS is already running without a workspace that makes it deterministic.
    """
    before = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
    )
    if deterministic:
        _fix_cublas_workspace()
    # Filling every new tensor with NaN only helps to find kernels that read what nothing wrote; it
    # decides no bit of a correct program and costs a pass over each allocation.
    _set(compiled, cpu_threads or before[0], deterministic, deterministic, False, False)
    try:
        yield
    finally:
        _set(compiled, *before)


def _set(
    compiled: bool,
    threads: int,
    deterministic: bool,
    cudnn_deterministic: bool,
    benchmark: bool,
    fill: bool,
) -> None:
    torch.set_num_threads(threads)
    if deterministic != torch.are_deterministic_algorithms_enabled():
        if compiled:
            torch.use_deterministic_algorithms(deterministic)
        else:
            torch.set_deterministic_debug_mode("error" if deterministic else "default")
    torch.backends.cudnn.deterministic = cudnn_deterministic
    torch.backends.cudnn.benchmark = benchmark
    torch.utils.deterministic.fill_uninitialized_memory = fill  # pyright: ignore[reportAttributeAccessIssue]


def _fix_cublas_workspace() -> None:
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (CUBLAS_WORKSPACE, ":16:8"):
        return
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        raise UsageError(
            "runtime.deterministic is true, and CUDA was used in this process before.",
            hint=f"set the environment variable CUBLAS_WORKSPACE_CONFIG={CUBLAS_WORKSPACE} before "
            "the process starts",
        )
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
