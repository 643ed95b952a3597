"""Starts ranks as processes, watches them, and ends all of them when one fails."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from prism_core.catching import program_problem
from prism_core.environment import (
    ENV_UNUSED_NCCL,
    EXIT_NO_PRELOAD,
    EXIT_NOT_CAUGHT,
    EXIT_UNKNOWN_VALUE,
    Placement,
    check_shims,
    rank_environment,
)
from prism_core.errors import (
    DeadlockError,
    DeviceMemoryError,
    MismatchError,
    PrismError,
    RankFailedError,
    SessionError,
    ShimError,
    TorchMissingError,
    UnknownValueError,
)

logger = logging.getLogger(__name__)

POLL_S = 0.02
STATUS_EVERY_S = 0.25
#: How long the other ranks may take to notice a failure by themselves before they are ended.
GRACE_S = 5.0
TERMINATE_S = 2.0

_NO_TORCH = re.compile(
    r"No module named 'torch'"
    r"|lib(?:cu|nccl|nv)\w*\.so\S*(?:: cannot open shared object file| not found in the system path)"
)
#: How the engine's texts begin, by kind.
_VERDICTS: tuple[tuple[type[PrismError], re.Pattern[str]], ...] = (
    (DeadlockError, re.compile(r"^(?:rank \d+: )?deadlock\b")),
    (MismatchError, re.compile(r"^(?:rank \d+: )?(?:collective|message) \d+ of communicator\b")),
)
#: What a process says before it ends with EXIT_NOT_CAUGHT (shim/callers).
_NOT_CAUGHT = re.compile(r"^prism: (.*(?:not emulated|namespace of its own).*)$", re.MULTILINE)
#: What a process says before it ends with EXIT_UNKNOWN_VALUE (shim/cuda/src/values/reads.rs).
_UNKNOWN_VALUE = re.compile(r"^prism: (the host reads .*|cannot use the rules .*)$", re.MULTILINE)
#: PyTorch's text when the emulated card is full.
_OUT_OF_MEMORY = re.compile(r"^.*?OutOfMemoryError: (CUDA out of memory\. .*)$", re.MULTILINE)
#: The last line of a traceback.
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?[\w.]+(?:Error|Exception): .*$", re.MULTILINE)
#: A line of a traceback.
_FRAME = re.compile(r'^.*?File "([^"]+)", line (\d+), in ', re.MULTILINE)
HOW_TO_INSTALL_TORCH = "install it with `python -m prism_core.slim`"


class SessionLike(Protocol):
    """The part of a session the launcher needs."""

    def process_exited(self, rank: int, returncode: int) -> None:
        """Tells the engine that a rank's process is over."""
        ...

    def status_json(self) -> str:
        """State of the session and of each rank."""
        ...


@dataclass(slots=True)
class RankStatus:
    """What the engine knows of a rank."""

    connected: bool = False
    finished: bool = False
    records: int = 0
    iterations: int = 0
    training_for_ns: int | None = None
    last_op: str = ""
    ended_before_failure: bool = False


@dataclass(slots=True)
class GroupResult:
    """How a group of ranks ended.

    Attributes:
        returncodes: Exit code per rank that ran to its end, as a shell reports it.
        wall_ns: How long the process of each of them ran.
        start_ns: When the process of each rank was started (`time.monotonic_ns`).
        failed_rank: The first rank that ended with another code than 0.
        session_failure: The engine's text, if it stopped the run.
        uncatchable: Why nothing can be preloaded into the program itself, if that is so.
    """

    returncodes: dict[int, int] = field(default_factory=dict)
    wall_ns: dict[int, int] = field(default_factory=dict)
    start_ns: dict[int, int] = field(default_factory=dict)
    failed_rank: int | None = None
    session_failure: str | None = None
    uncatchable: str | None = None


def session_status(session: SessionLike) -> tuple[str | None, dict[int, RankStatus]]:
    """The session's failure text, if any, and the state of its ranks."""
    document: dict[str, Any] = json.loads(session.status_json())
    ranks = {int(rank): RankStatus(**_known(state)) for rank, state in document["ranks"].items()}
    return document["failed"], ranks


def _known(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in RankStatus.__slots__ if state.get(name) is not None}


def log_path(folder: Path, rank: int) -> Path:
    """Where the output of a rank goes."""
    return folder / f"rank-{rank}.log"


class Process(Protocol):
    """The part of `subprocess.Popen` that is needed of a rank's process, which leads a process group of its own."""

    pid: int
    stdout: IO[bytes] | None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, once it is over."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its exit code; `subprocess.TimeoutExpired` if it takes longer."""
        ...


class Starter(Protocol):
    """Makes the processes of ranks."""

    def may_start(self, is_connected: Callable[[int], bool]) -> bool:
        """Tells whether one can be made now; asks whether a rank has used the device yet."""
        ...

    def start(self, rank: int, argv: Sequence[str], environment: dict[str, str]) -> Process:
        """Makes one."""
        ...


class ExecStarter:
    """Starts every rank anew."""

    def may_start(self, is_connected: Callable[[int], bool]) -> bool:
        """At any time."""
        return True

    def start(self, rank: int, argv: Sequence[str], environment: dict[str, str]) -> Process:
        """Runs the command."""
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class _RankProcess:
    """One running rank and the thread that copies its output."""

    def __init__(self, rank: int, start: Callable[[], Process], log: Path, *, echo: bool) -> None:
        self.rank = rank
        self.start_ns = time.monotonic_ns()
        self._process = start()
        prefix = f"[rank {rank}] " if echo else None
        self._copier = threading.Thread(target=_copy_output, args=(self._process.stdout, log, prefix), daemon=True)
        self._copier.start()

    def poll(self) -> int | None:
        """The exit code once the process is over."""
        code = self._process.poll()
        if code is None:
            return None
        self._copier.join(timeout=TERMINATE_S)  # a grandchild may keep the pipe open
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Signals the process and its children."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def end(self, deadline: float) -> None:
        """Ends the process and its children, by force if the process is still there at the deadline."""
        try:
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.debug("rank %d does not end on SIGTERM", self.rank)
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._copier.join(timeout=TERMINATE_S)


def _end_all(processes: Iterable[_RankProcess]) -> None:
    """Ends all processes, gently first and all at once: one that is left alone would fail for want of its peers."""
    ending = list(processes)
    for process in ending:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_S
    for process in ending:
        process.end(deadline)


def _copy_output(pipe: IO[bytes], log: Path, prefix: str | None) -> None:
    with pipe, log.open("wb") as file:
        for line in iter(pipe.readline, b""):
            file.write(line)
            file.flush()
            if prefix is not None:
                sys.stderr.write(prefix + line.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank runs: the engine's side of it, and its place in the job."""

    session: SessionLike
    placement: Placement


class RankGroup:
    """Runs one command as several ranks.

    Args:
        seat_of: Gives a rank its session and place, when it is started.
        argv: Program and arguments, the same for all ranks.
        logs: Folder for the ranks' output.
        jobs: How many processes may run at a time; 0 = all of them.
        on_exit: Told of every rank that ended.
        num_waiting: How many of the running ranks only wait for others; these do not count as running at a time.
        echo: Also copy the output to stderr, each line with its rank.
        device: Kind of the device; says which libraries are preloaded.
        may_start: Asked before a rank is started; no means later.
        starter: Makes the processes.
    """

    def __init__(
        self,
        seat_of: Callable[[int], Seat],
        argv: Sequence[str],
        logs: Path,
        *,
        jobs: int = 0,
        on_exit: Callable[[int], None] = lambda rank: None,
        num_waiting: Callable[[], int] = lambda: 0,
        echo: bool = False,
        device: str = "emulated",
        may_start: Callable[[int], bool] = lambda _: True,
        starter: Starter | None = None,
    ) -> None:
        self._may_start = may_start
        self._starter = starter or ExecStarter()
        self._seat_of = seat_of
        self._on_exit = on_exit
        self._num_waiting = num_waiting
        self._queue: deque[int] = deque()
        self._seats: dict[int, Seat] = {}
        self._argv = list(argv)
        self._logs = logs
        self._jobs = jobs
        self._echo = echo
        self._running: dict[int, _RankProcess] = {}
        self._shims = check_shims(device=device)
        self._signals = _Signals()
        if os.environ.get(ENV_UNUSED_NCCL):
            logger.warning("%s: taken to be unused: %s", ENV_UNUSED_NCCL, os.environ[ENV_UNUSED_NCCL])
        #: How far the group got, also when `run` was interrupted.
        self.result = GroupResult(uncatchable=program_problem(self._argv[0]) if self._argv else None)
        if self.result.uncatchable is not None:
            logger.warning("%s; only dynamically linked programs that it starts are emulated", self.result.uncatchable)

    def run(self, ranks: Sequence[int]) -> GroupResult:
        """Runs the ranks to their end, or until one fails or the engine stops the run."""
        self._logs.mkdir(parents=True, exist_ok=True)
        result = self.result
        self._queue.extend(ranks)
        with self._signals.caught():
            try:
                self._watch(self._queue, result)
                if result.failed_rank is not None or result.session_failure is not None:
                    self._await_others(result)
            finally:
                with self._signals.held():
                    _end_all(self._running.values())
                    self._running.clear()
        return result

    def add(self, rank: int) -> None:
        """Runs one more rank, while `run` goes on; may be called by any thread."""
        self._queue.append(rank)

    def _watch(self, waiting: deque[int], result: GroupResult) -> None:
        next_status = time.monotonic() + STATUS_EVERY_S
        while waiting or self._running:
            while waiting and self._has_room() and self._is_startable(waiting[0]):
                with self._signals.held():
                    self._start(waiting.popleft())
            self._reap(result)
            if result.failed_rank is None and time.monotonic() >= next_status:
                result.session_failure = self._verdict()
                next_status = time.monotonic() + STATUS_EVERY_S
            if result.failed_rank is not None or result.session_failure is not None:
                return
            time.sleep(POLL_S)

    def _has_room(self) -> bool:
        return self._jobs <= 0 or len(self._running) - self._num_waiting() < self._jobs

    def _is_startable(self, rank: int) -> bool:
        # The second asks for a turn, which the rank then has.
        return self._starter.may_start(self._is_connected) and self._may_start(rank)

    def _is_connected(self, rank: int) -> bool:
        """Tells whether a rank has used the device, or is over."""
        if rank not in self._running:
            return True
        _, status = session_status(self._seats[rank].session)
        return rank in status and status[rank].connected

    def _start(self, rank: int) -> None:
        self._seats[rank] = seat = self._seat_of(rank)
        environment = rank_environment(rank, seat.placement, self._shims, os.environ)
        try:
            start = functools.partial(self._starter.start, rank, self._argv, environment)
            process = _RankProcess(rank, start, log_path(self._logs, rank), echo=self._echo)
        except OSError as error:
            raise RankFailedError(
                f"cannot start `{self._argv[0]}`: {error.strerror}", rank=rank, returncode=127, last_op=""
            ) from error
        self._running[rank] = process
        self.result.start_ns[rank] = process.start_ns

    def _reap(self, result: GroupResult) -> None:
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[rank]
            result.returncodes[rank] = code
            result.wall_ns[rank] = time.monotonic_ns() - process.start_ns
            if code != 0 and result.session_failure is None:
                # The engine stopped it, if it has a reason.
                result.session_failure = session_status(self._seats[rank].session)[0]
            self._seats[rank].session.process_exited(rank, code)
            self._on_exit(rank)
            if code != 0 and result.failed_rank is None:
                result.failed_rank = rank

    def _verdict(self) -> str | None:
        """Why the engine stopped one of the running ranks, if it did."""
        for rank in self._running:
            failed = session_status(self._seats[rank].session)[0]
            if failed is not None:
                return failed
        return None

    def _await_others(self, result: GroupResult) -> None:
        """Lets the other ranks report the failure in their own words."""
        deadline = time.monotonic() + GRACE_S
        while self._running and time.monotonic() < deadline:
            self._reap(result)
            time.sleep(POLL_S)


class _Signals:
    """Turns SIGINT and SIGTERM into exceptions, but not while one is being started: it would stay behind."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: int | None = None

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._is_held:
            self._waiting = number
        else:
            self._raise(number)

    @staticmethod
    def _raise(number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While the ranks run. An ignored SIGINT stays ignored."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGTERM]
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            numbers.append(signal.SIGINT)
        previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Puts signals off until the end of the block."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            number, self._waiting = self._waiting, None
            if number is not None:
                self._raise(number)


def await_engine(session: SessionLike, ranks: Iterable[int]) -> None:
    """Waits until the engine has taken in all that the ended processes sent."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        _, status = session_status(session)
        if all(state.finished or not state.connected for state in map(status.get, ranks) if state is not None):
            return
        time.sleep(POLL_S)
    logger.warning("the engine still reads records of processes that have ended")


def failure_of(result: GroupResult, session: SessionLike, logs: Path) -> PrismError | None:
    """Why the run is not complete, or `None`: a dead rank, the engine's verdict, or a rank that never connected."""
    failed, status = session_status(session)
    culprit = _first_dead(result, status)
    if culprit is not None:
        return _rank_failure(culprit, result, status, logs)
    if result.session_failure is not None:
        return session_error(result.session_failure)
    if result.failed_rank is not None:
        return _rank_failure(result.failed_rank, result, status, logs)
    if failed is not None:
        return session_error(failed)
    for rank in sorted(status):
        if rank in result.returncodes and not status[rank].connected:
            return SessionError(
                f"rank {rank} ended without one CUDA or NCCL call under the preload: "
                + (
                    result.uncatchable
                    or "is this the training program, and does `prism doctor` say the preload is in place?"
                )
            )
    return None


def _first_dead(result: GroupResult, status: dict[int, RankStatus]) -> int | None:
    """The rank that died while the session was well: a verdict of the engine after that only follows from it.

    A rank with NCCL calls that were not caught comes first: what the engine says of such a run means nothing.
    """
    dead = [rank for rank, code in sorted(result.returncodes.items()) if code != 0]
    uncaught = [rank for rank in dead if result.returncodes[rank] == EXIT_NOT_CAUGHT and rank in status]
    if uncaught:
        return uncaught[0]
    dead = [rank for rank in dead if rank in status and status[rank].ended_before_failure]
    return dead[0] if dead else None


def session_error(text: str) -> PrismError:
    """The exception for the engine's verdict."""
    for kind, pattern in _VERDICTS:
        if pattern.search(text):
            return kind(text)
    return SessionError(text)


def _rank_failure(rank: int, result: GroupResult, ranks: dict[int, RankStatus], logs: Path) -> PrismError:
    status, code = ranks.get(rank, RankStatus()), result.returncodes[rank]
    path = log_path(logs, rank)
    if code == EXIT_NOT_CAUGHT and (reasons := _NOT_CAUGHT.findall(_read_tail(path))):
        return ShimError(f"rank {rank}: {reasons[-1]} (output: {path})")
    if code == EXIT_UNKNOWN_VALUE and (reasons := _UNKNOWN_VALUE.findall(_read_tail(path))):
        return UnknownValueError(f"rank {rank}: {reasons[-1]} (output: {path})")
    if code == EXIT_NO_PRELOAD and not status.connected:
        return ShimError(f"rank {rank} ran without the preloaded libraries: ask `prism doctor` ({path})")
    if _NO_TORCH.search(_read_tail(path)) and not status.connected:
        return TorchMissingError(f"rank {rank} cannot import PyTorch: {HOW_TO_INSTALL_TORCH} ({path})")
    full = list(_OUT_OF_MEMORY.finditer(_read_tail(path)))
    # A program may have caught it and died of something else.
    if full and _ERROR.search(full[-1].string, full[-1].end()) is None:
        return _out_of_memory(rank, code, status, full[-1], path)
    where = "before its first op"
    if status.last_op:
        where = f"after {status.iterations} iterations, last op: {status.last_op}"
    message = f"rank {rank} ended with exit code {code} {where} (output: {path}){_last_words(path)}"
    if result.uncatchable is not None and not status.connected:
        message += f"; {result.uncatchable}"
    if "CUDA out of memory" in _read_tail(path):
        message += "; it ran out of memory on its device"
    return RankFailedError(message, rank=rank, returncode=code, last_op=status.last_op)


def _out_of_memory(rank: int, code: int, status: RankStatus, full: re.Match[str], path: Path) -> DeviceMemoryError:
    """Names the step, the op before, and the program's line; the rest is PyTorch's."""
    frames = [f"{file}:{line}" for file, line in _FRAME.findall(full.string[: full.start()])]
    own = [frame for frame in frames if "-packages" not in frame and not frame.startswith("<")]
    at = f", at {(own or frames)[-1]}" if frames else ""
    after = f" after {status.last_op}" if status.last_op else ""
    return DeviceMemoryError(
        f"rank {rank} ran out of device memory in iteration {status.iterations}{after}{at}: {full[1]} (output: {path})",
        rank=rank, returncode=code, last_op=status.last_op, iteration=status.iterations,
    )  # fmt: skip


def _last_words(path: Path) -> str:
    """The last line a program printed: usually why it ended."""
    lines = [line.strip() for line in _read_tail(path).splitlines() if line.strip()]
    return f"; it said: {lines[-1][:300]}" if lines else ""


def _read_tail(path: Path, num_bytes: int = 16 * 1024) -> str:
    try:
        return path.read_bytes()[-num_bytes:].decode(errors="replace")
    except OSError:
        return ""
