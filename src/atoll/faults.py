"""Named failpoints: places where a test may kill or fail this process, off unless armed.

A program calls `reach("cache.shard.before_rename")` at every place whose failure has to be
survivable. Nothing happens there unless the process was started with that name armed, so that a
crash test needs no sleep and hits the same instruction each time.
"""

import os
import signal
from dataclasses import dataclass
from typing import Literal

from atoll.errors import UsageError

Action = Literal["kill", "interrupt", "raise", "enospc"]


@dataclass(slots=True)
class _Armed:
    name: str
    hit: int
    action: Action
    count: int = 0


_armed: list[_Armed] = []


class InjectedFault(Exception):  # noqa: N818 - it is a fault, and no caller may treat it as an error
    """Raised by a failpoint armed with `raise`."""


def arm(specification: str) -> None:
    """Arm failpoints from text such as `cache.shard.before_rename:2=kill,other=raise`.

    Args:
        specification: Comma-separated `name[:hit]=action`; `hit` counts from 1 (default 1).
            Actions: kill (SIGKILL), interrupt (SIGINT), raise (InjectedFault), enospc (OSError).
    """
    for part in filter(None, specification.split(",")):
        place, separator, action = part.partition("=")
        name, _, hit = place.partition(":")
        known = ("kill", "interrupt", "raise", "enospc")
        if not separator or action not in known or not (hit or "1").isdigit():
            raise UsageError(
                f"failpoint {part!r} is not of the form name[:hit]=action.",
                hint=f"actions are {', '.join(known)}; for example checkpoint.manifest=kill",
            )
        _armed.append(_Armed(name, int(hit or 1), action))


def disarm() -> None:
    """Forget every armed failpoint."""
    _armed.clear()


def reach(name: str) -> None:
    """Do what was armed for `name` at this visit, or nothing."""
    for point in _armed:
        if point.name != name:
            continue
        point.count += 1
        if point.count == point.hit:
            _act(point.action, name)


def _act(action: Action, name: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "interrupt":
            signal.raise_signal(signal.SIGINT)
        case "raise":
            raise InjectedFault(name)
        case "enospc":
            import errno

            raise OSError(errno.ENOSPC, "No space left on device (injected)", name)
