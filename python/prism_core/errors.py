"""Every error the package raises on purpose; all of them are [`PrismError`][prism_core.errors.PrismError]s."""

import signal
from typing import Any

from prism_core._native import (
    ConfigError,
    DeadlockError,
    GraphFormatError,
    MismatchError,
    PrismError,
    ShimError,
)

__all__ = [
    "ConfigError",
    "DeadlockError",
    "DeviceMemoryError",
    "GraphFormatError",
    "InterruptedRunError",
    "MismatchError",
    "PrismError",
    "RankFailedError",
    "RoleError",
    "SessionError",
    "ShimError",
    "TimekeepingError",
    "TorchMissingError",
    "UnknownValueError",
    "error_entry",
    "hint_for",
]


class SessionError(PrismError):
    """The engine stopped a run (deadlock, mismatch, refused request); the message is the engine's."""


class RoleError(PrismError):
    """Ranks taken for equals ran different programs, and no finer distinction of roles explains it."""


class TorchMissingError(PrismError):
    """The program needs PyTorch and PyTorch is not installed."""


class TimekeepingError(PrismError):
    """On a real device streams were released too late for the times to be what they claim."""


class UnknownValueError(PrismError):
    """In a strict run the program reads a value from the device that is not known; the message says which and where."""


class InterruptedRunError(PrismError):
    """The user ended a run; what was known by then is kept.

    Attributes:
        returncode: The exit code for it, as a shell would report it (128 + signal number).
    """

    def __init__(self, cause: BaseException) -> None:
        code = cause.code if isinstance(cause, SystemExit) else None
        self.returncode = code if isinstance(code, int) else 128 + signal.SIGINT
        super().__init__(f"interrupted by {signal.Signals(self.returncode - 128).name}")


class RankFailedError(PrismError):
    """A process of the training program died.

    Attributes:
        rank: The rank it played.
        returncode: Its exit code, as a shell would report it (128 + signal number for a signal).
        last_op: The last operation the engine saw of it, or an empty string.
    """

    def __init__(self, message: str, *, rank: int, returncode: int, last_op: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.returncode = returncode
        self.last_op = last_op


class DeviceMemoryError(RankFailedError):
    """A rank's program ran out of device memory: the message names rank, step and op, and has PyTorch's own text.

    Attributes:
        iteration: The iteration it was in, from 0.
    """

    def __init__(self, message: str, *, rank: int, returncode: int, last_op: str, iteration: int) -> None:
        super().__init__(message, rank=rank, returncode=returncode, last_op=last_op)
        self.iteration = iteration


#: What to do next, by kind of error, where the message does not say it.
_HINTS: dict[type[PrismError], str] = {
    DeadlockError: "`prism diagnose JOB.prism` with the same --slow and --perturb says who is to blame",
    MismatchError: "`prism diagnose JOB.prism` with the same --slow and --perturb says who is to blame",
    ShimError: "`prism doctor` says what is in place and what is not",
    TorchMissingError: "`python -m prism_core.slim` installs PyTorch without the NVIDIA packages",
}


def hint_for(error: Exception) -> str | None:
    """What to do about an error, if there is more to say than its message."""
    if isinstance(error, RankFailedError) and "out of memory" in str(error).lower():
        return (
            "a smaller micro batch, recomputing or more shards need less; `prism diagnose RUN` says how much is missing"
        )
    return next((hint for kind, hint in _HINTS.items() if isinstance(error, kind)), None)


def error_entry(error: Exception) -> dict[str, Any]:
    """The error as it appears in JSON documents."""
    entry: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    for name in ("rank", "returncode", "last_op", "iteration"):
        if hasattr(error, name):
            entry[name] = getattr(error, name)
    hint = hint_for(error)
    return entry | ({"hint": hint} if hint else {})
