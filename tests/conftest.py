"""Options and fixtures that every room's tests share."""

import importlib.util
import logging
import os

import pytest

from atoll import faults

# Several test processes share the machine; one thread each is faster than all of them at once.
# It must be set before torch is imported, and the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# cuBLAS reads this when CUDA starts, so that a deterministic test may follow one that is not.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

# Without a GPU, triton's kernels run under its interpreter. It has to be told before anything, be
# it torch's compiler, imports triton: even triton's own functions are made for one or the other.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="Write the golden files in tests/golden anew instead of comparing with them.",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where hand-written kernels run here: a GPU, or the CPU under triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, which the kernels are written in")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """Disarm failpoints, and detach log handlers that write to a test's captured stream."""
    yield
    faults.disarm()
    logger = logging.getLogger("atoll")
    logger.handlers.clear()
    logger.propagate = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
