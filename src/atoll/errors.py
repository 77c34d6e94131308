"""Every error that atoll raises on purpose, and the exit code that the command line gives it.

AtollError                  exit 1: a run, a check or a contract failed
├── CacheError              a token cache is damaged or does not fit what is asked of it
├── CheckpointError         a checkpoint is damaged, incomplete or does not verify
├── NonFiniteError          a loss or a gradient stopped being a number
├── StorageError            the disk is full, read-only or otherwise refuses
├── InterruptedRunError     a signal stopped the work at a clean point (exit 130)
└── UserError               exit 2: what was asked cannot be done; the message says what can
    ├── ConfigError         a recipe or a `--set` is wrong; holds every fault found
    ├── DataError           an input document or source is unusable
    ├── UsageError          arguments that contradict each other or name nothing
    ├── LockedError         another live process works in the same folder
    ├── StateMismatchError  a saved state does not belong to this run; lists the differences
    └── UnavailableError    a package or device that was asked for by name is missing
"""

from collections.abc import Sequence
from typing import ClassVar


class AtollError(Exception):
    """What was found and what is required; `hint` says what to do about it."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CacheError(AtollError):
    """A token cache is damaged, incomplete or does not fit what is asked of it."""


class CheckpointError(AtollError):
    """A checkpoint is damaged, incomplete or does not verify."""


class NonFiniteError(AtollError):
    """A loss or a gradient stopped being a finite number."""


class StorageError(AtollError):
    """The file system refused: full, read-only, or not writable by this user."""


class InterruptedRunError(AtollError):
    """A signal stopped the work at a clean point; the same command goes on from there."""

    exit_code = 130


class UserError(AtollError):
    """The user's mistake: the message names what was found, the hint a remedy."""

    exit_code = 2


class ConfigError(UserError):
    """One or more settings are wrong; `faults` lists each as one line."""

    def __init__(self, faults: Sequence[str], *, hint: str | None = None) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults), hint=hint)


class DataError(UserError):
    """An input document, source or tokenizer cannot be used as it is."""


class UsageError(UserError):
    """Arguments that contradict each other or name something that does not exist."""


class LockedError(UserError):
    """Another live process holds the folder."""


class StateMismatchError(UserError):
    """A saved state does not belong to this run; nothing has been changed."""


class UnavailableError(UserError):
    """Something asked for by name is not available here; the hint says how to get it."""
