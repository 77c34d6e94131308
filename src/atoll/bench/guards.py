"""What surrounds measured updates, so that they fail as a run does and never slow down unseen."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from atoll.config.schema import RunConfig
from atoll.runner.fit import is_out_of_memory, out_of_memory


@contextmanager
def memory_named(config: RunConfig, device: torch.device) -> Iterator[None]:
    """Say what to do where memory runs out, as a run does."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise out_of_memory(error, config, device) from error
        raise


@contextmanager
def no_silent_fallback(*, compiled: bool) -> Iterator[None]:
    """Let a compiler that gives up say so, instead of going on with uncompiled code."""
    if not compiled:
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
