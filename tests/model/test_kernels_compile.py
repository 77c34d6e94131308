"""Every kernel compiles for real GPUs, which takes none of them: the interpreter accepts more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_kernels.py")
KERNELS = {
    "atoll_adamw",
    "atoll_add_norm",
    "atoll_add_norm_backward",
    "atoll_cross_entropy",
    "atoll_embedding_runs",
    "atoll_embedding_seams",
    "atoll_rotary",
    "atoll_swiglu",
    "atoll_swiglu_backward",
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_for_a_gpu(capability, tmp_path):
    pytest.importorskip("triton", reason="needs triton, which a CUDA build of torch brings")
    # A process of its own: here triton interprets kernels instead of compiling them.
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, PROGRAM, str(capability)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == KERNELS
