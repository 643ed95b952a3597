"""Ranks that are forked from one process which has imported what the program imports (emulated device).

The first rank is started as usual and says what it imports (`prism_core.torch.imports`). A process is started that
imports the same (`prism_core._forkserver`); all further ranks are forks of it. Modules that cannot be shared, because
they look at the rank, use the device or start threads while they are imported, are left to the ranks. Where forking is
impossible, ranks are started as usual, and a note says why.
"""

from __future__ import annotations

import array
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from prism_core.environment import RANK_VARIABLES
from prism_core.errors import SessionError
from prism_core.launch import ExecStarter, Process

logger = logging.getLogger(__name__)

#: From this many ranks on it pays to fork them.
AUTOMATIC_FROM = 4
#: How many modules may turn out to be unfit for sharing, one after the other.
MAX_EXCLUDED = 8
#: A rank that has used the device for this long and has not said what it imports will not do so before it ends.
PATIENCE_S = 30.0
#: How long a process with all imports may take to fork.
FORK_TIMEOUT_S = 60.0
MAX_MESSAGE_BYTES = 1 << 16

#: Tells the preloaded library to get ready for forked ranks.
ENV_FORKS = "PRISM_FORKS"

_PACKAGE = Path(__file__).resolve().parent
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?$")
#: Options of the interpreter by their letter: those without and those with a value.
_FLAGS, _VALUED = set("bBdOPqRsuv"), set("WX")


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """A command line that starts a Python program.

    Attributes:
        interpreter: Its path or name, and its options.
        kind: `script`, `module` or `code`.
        target: Path, module or text.
        arguments: What follows.
    """

    interpreter: list[str]
    kind: str
    target: str
    arguments: list[str]


def parse_python(argv: Sequence[str]) -> PythonCommand | str:
    """Takes a command line apart, or says why its ranks cannot be forked."""
    if not argv or not _PYTHON.match(Path(argv[0]).name) or shutil.which(argv[0]) is None:
        return f"{argv[0] if argv else 'nothing'} is not a Python interpreter"
    words = list(argv[1:])
    interpreter = [argv[0]]
    while words and words[0].startswith("-") and len(words[0]) > 1:
        word = words.pop(0)
        letter = word[1]
        if letter in "mc":
            target = word[2:] or (words.pop(0) if words else "")
            return PythonCommand(interpreter, "module" if letter == "m" else "code", target, words)
        interpreter.append(word)
        if letter in _VALUED:
            interpreter += [words.pop(0)] if len(word) == 2 and words else []
        elif not set(word[1:]) <= _FLAGS:
            return f"the interpreter's option {word} is not supported"
    if not words or not Path(words[0]).is_file() or zipfile.is_zipfile(words[0]) or words[0].endswith(".pyc"):
        return "the program is not a Python script"
    return PythonCommand(interpreter, "script", words[0], words[1:])


class _Noted:
    """What is common to ways of starting ranks: why they are not forked, if they are not."""

    problem: str | None = None
    num_forked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what was started for the starting of ranks."""

    def notes(self) -> list[str]:
        """What the user should know."""
        return [] if self.problem is None else [f"ranks were not forked: {self.problem}"]


class ForkedProcess:
    """A rank that a server has forked: the part of `subprocess.Popen` that the launcher needs."""

    def __init__(self, server: _Server, pid: int, stdout: IO[bytes]) -> None:
        self._server = server
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, once it is over."""
        return self._server.ended(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its exit code.

        Raises:
            subprocess.TimeoutExpired: It takes longer.
        """
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.01)
        return code


class _Server:
    """A process that ranks are forked from.

    Args:
        command: The program.
        plan: Path of the plan.
        environment: What all ranks find in their environment.
        output: Where its own output goes.
    """

    def __init__(self, command: PythonCommand, plan: Path, environment: dict[str, str], output: Path) -> None:
        self._environment = environment
        self._codes: dict[int, int] = {}
        self._started: list[int] = []
        self._num_running = 0
        #: Has it done what it was told last?
        self.is_ready = False
        #: What it could not import, and why.
        self.unfit: tuple[str, str] | None = None
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = theirs.fileno()
        program = [*command.interpreter, str(_PACKAGE / "_forkserver.py"), str(plan), str(number)]
        with output.open("wb") as file, theirs:
            self._process = subprocess.Popen(
                program, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, pass_fds=[number],
                start_new_session=True,
            )  # fmt: skip

    def look(self) -> None:
        """Takes in what it has said.

        Raises:
            SessionError: It is gone.
        """
        self._receive(0.0)

    def _receive(self, timeout: float) -> None:
        self._channel.settimeout(timeout)
        while True:
            try:
                data = self._channel.recv(MAX_MESSAGE_BYTES)
            except (BlockingIOError, TimeoutError):
                return
            except OSError:
                data = b""
            if not data:
                if self.unfit is not None and not self._num_running:
                    return
                raise SessionError(f"the process that ranks are forked from has ended (code {self._process.wait()})")
            self._channel.settimeout(0.0)
            self._hear(json.loads(data))

    def _hear(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.is_ready = True
        elif "unfit" in message:
            self.unfit = (message["module"], message["unfit"])
        elif "started" in message:
            self._started.append(message["started"])
            self._num_running += 1
        elif "ended" in message:
            self._codes[message["ended"]] = message["code"]
            self._num_running -= 1

    def learn(self, plan: Path) -> None:
        """Has it import more."""
        self.is_ready = False
        self._channel.settimeout(FORK_TIMEOUT_S)
        self._channel.send(json.dumps({"plan": str(plan)}).encode())

    def fork(self, environment: dict[str, str]) -> ForkedProcess:
        """Makes a rank.

        Raises:
            SessionError: It takes too long, or the server is gone.
        """
        own = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        reader, writer = os.pipe()
        stdout = os.fdopen(reader, "rb")
        try:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer]))]
            self._channel.settimeout(FORK_TIMEOUT_S)
            self._channel.sendmsg([json.dumps({"environment": own}).encode()], ancillary)
        except OSError as error:
            stdout.close()
            raise SessionError(f"the process that ranks are forked from does not take orders: {error}") from error
        finally:
            os.close(writer)
        deadline = time.monotonic() + FORK_TIMEOUT_S
        while not self._started:
            if time.monotonic() > deadline:
                raise SessionError("the process that ranks are forked from does not answer")
            self._receive(0.1)
        return ForkedProcess(self, self._started.pop(), stdout)

    def ended(self, pid: int) -> int | None:
        """The exit code of a forked rank that is over."""
        if pid not in self._codes:
            self.look()
        return self._codes.get(pid)

    def close(self) -> None:
        """Ends it. Its ranks must have ended."""
        self._channel.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkStarter(_Noted):
    """Starts the first rank anew and forks the others. Use it as a context: its processes end with it.

    Args:
        command: The program.
    """

    def __init__(self, command: PythonCommand) -> None:
        self._command = command
        self._exec = ExecStarter()
        self._folder = tempfile.TemporaryDirectory(prefix="prism-forks-")
        self._list = Path(self._folder.name) / "imports.json"
        self._seen: os.stat_result | None = None
        self._first: int | None = None
        self._process: Process | None = None
        self._environment: dict[str, str] = {}
        self._servers: list[_Server] = []
        self._server: _Server | None = None
        self._excluded: dict[str, str] = {}
        self._connected_since: float | None = None

    def close(self) -> None:
        """Ends the processes that ranks were forked from."""
        for server in self._servers:
            server.close()
        self._folder.cleanup()

    def may_start(self, is_connected: Callable[[int], bool]) -> bool:
        """Tells whether a rank can be started now: not while imports are still to be learned or made."""
        if self.problem is not None or self._first is None:
            return True
        if self._server is None:
            self._await_list(is_connected)
            return self.problem is not None
        try:
            return self._is_server_ready(self._server)
        except SessionError as error:
            self._give_up(str(error))
            return True

    def _await_list(self, is_connected: Callable[[int], bool]) -> None:
        is_over = self._process is not None and self._process.poll() is not None
        if self._is_list_new():
            self._serve()
        elif is_over:
            self._give_up("the first rank ended and did not say what it had imported")
        elif self._connected_since is None:
            assert self._first is not None
            self._connected_since = time.monotonic() if is_connected(self._first) else None
        elif time.monotonic() - self._connected_since > PATIENCE_S:
            self._give_up("the first rank used the device and did not say what it had imported")

    def _is_list_new(self) -> bool:
        """Tells whether the first rank has written what was not read yet."""
        try:
            found = self._list.stat()
        except FileNotFoundError:
            return False
        is_new = self._seen is None or found.st_ino != self._seen.st_ino
        self._seen = found
        return is_new

    def _is_server_ready(self, server: _Server) -> bool:
        server.look()
        if server.unfit is not None:
            self._exclude(*server.unfit)
        elif server.is_ready and self._is_list_new():
            server.learn(self._plan())
        return self.problem is not None or (server.unfit is None and server.is_ready)

    def _exclude(self, module: str, reason: str) -> None:
        """Leaves a module to the ranks; if that is hopeless, all of them."""
        logger.debug("not shared by ranks: %s", reason)
        if module in ("", "torch") or module in self._excluded or len(self._excluded) >= MAX_EXCLUDED:
            self._give_up(reason)
            return
        self._excluded[module] = reason
        self._serve()

    def _give_up(self, reason: str) -> None:
        self.problem = reason
        self._server = None
        logger.info("ranks are started one by one: %s", reason)

    def _plan(self) -> Path:
        """Writes what a server is to do, by what the first rank said last."""
        found = json.loads(self._list.read_text(encoding="utf-8"))
        document = {
            **found,
            **asdict(self._command),
            "command": [*self._command.interpreter[:1], *self._original()],
            "excluded": sorted(self._excluded),
            "rank_variables": list(RANK_VARIABLES),
            "hook": str(_PACKAGE / "torch" / "hook.py"),
            "output": str(self._output()),
        }
        path = Path(self._folder.name) / "plan.json"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(document), encoding="utf-8")
        draft.replace(path)
        return path

    def _original(self) -> list[str]:
        command = self._command
        option = {"script": [], "module": ["-m"], "code": ["-c"]}[command.kind]
        return [*command.interpreter[1:], *option, command.target, *command.arguments]

    def _output(self) -> Path:
        return Path(self._folder.name) / f"output-{len(self._excluded)}"

    def _serve(self) -> None:
        base = {name: value for name, value in self._environment.items() if name not in RANK_VARIABLES}
        base |= {ENV_FORKS: "1", "TORCHINDUCTOR_CACHE_DIR": str(Path(self._folder.name) / "inductor")}
        self._server = _Server(self._command, self._plan(), base, self._output())
        self._servers.append(self._server)

    def start(self, rank: int, argv: Sequence[str], environment: dict[str, str]) -> Process:
        """Starts the first rank, or one that cannot be forked, as usual; forks any other."""
        if self.problem is not None:
            return self._exec.start(rank, argv, environment)
        if self._first is None or self._server is None:
            self._first, self._environment = rank, environment
            asked = {"PRISM_IMPORTS": str(self._list), "PRISM_RANK_VARIABLES": ",".join(RANK_VARIABLES)}
            self._process = self._exec.start(rank, argv, environment | asked)
            return self._process
        process = self._server.fork(environment)
        self.num_forked += 1
        return process


class NoFork(_Noted, ExecStarter):
    """Starts every rank anew, if forking was wanted for a reason."""

    def __init__(self, problem: str | None = None) -> None:
        self.problem = problem


def choose_starter(argv: Sequence[str], *, num_ranks: int, wanted: bool | None, device: str) -> ForkStarter | NoFork:
    """Forks ranks if there are more than a few, or if it is asked for.

    Args:
        argv: Program and arguments.
        num_ranks: How many ranks will run at least.
        wanted: What the user says.
        device: Kind of the device: only the emulated one can be used after a fork.
    """
    if wanted is False or (wanted is None and num_ranks < AUTOMATIC_FROM):
        return NoFork()
    if device != "emulated":
        return NoFork("only ranks on the emulated device can be forked" if wanted else None)
    command = parse_python(argv)
    if isinstance(command, str):
        return NoFork(command)
    return ForkStarter(command)
