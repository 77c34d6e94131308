"""Whole runs in a process of their own, to be killed."""

import multiprocessing
import os

from atoll import faults
from atoll.config.schema import RunConfig
from atoll.runner import run


def run_in_a_process(config: RunConfig, *, fault: str, resume: bool = False) -> int | None:
    """Run in a fresh process with a failpoint armed; return its exit code."""
    context = multiprocessing.get_context("forkserver")
    preload = ["atoll.runner", "tokenizers", "matplotlib.figure", "matplotlib.backends.backend_svg"]
    context.set_forkserver_preload(preload)
    process = context.Process(target=_child, args=(config, fault, resume))
    process.start()
    process.join()
    return process.exitcode


def _child(config: RunConfig, fault: str, resume: bool) -> None:
    faults.arm(fault)
    result = run(config, resume=config.runtime.output_dir if resume else None)
    os._exit(0 if result.status == "finished" else 130)
