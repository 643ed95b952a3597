"""Hosts a real engine session and runs `program.c` in it as rank 0, with the libraries preloaded as `prism` does it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.environment import Placement, check_shims, rank_environment

HERE = Path(__file__).resolve().parent
PROFILE = _native.profile_toml("h100-sxm")
#: The program uses one communicator, whose members are told by its size: no rendezvous store is asked.
NO_STORE = ("127.0.0.1", 1)
WAIT_S = 20.0
#: What `set_up` of the program leaves: a launch, a synchronisation and an allocation.
SET_UP_KERNELS = 1


def build_program(folder: Path) -> Path:
    """Compiles the program."""
    program = folder / "program"
    libraries = [str(path) for path in check_shims()[:2]]
    flags = ["-std=gnu11", "-O2", "-Wall", "-Werror", "-Wl,--allow-shlib-undefined"]
    subprocess.run(["cc", *flags, str(HERE / "program.c"), "-o", str(program), *libraries], check=True)
    return program


@dataclass(frozen=True)
class Spent:
    """What one command took: real ns and CPU ns of the program's thread, and its virtual clock afterwards."""

    wall_ns: int
    cpu_ns: int
    virtual_ns: int


class Run:
    """The program, connected to a session."""

    def __init__(self, session: _native.Session, child: subprocess.Popen[str]) -> None:
        self.session = session
        self._child = child

    def command(self, name: str, count: int = 1) -> Spent:
        """Has the program do something `count` times."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(f"{name} {count}\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline().split()
        assert len(answer) == 3, f"the program ended: {self._child.wait(WAIT_S)}"
        return Spent(*map(int, answer))

    def status(self) -> dict[str, Any]:
        """Where rank 0 is."""
        document = json.loads(self.session.status_json())
        assert document["failed"] is None, document["failed"]
        rank: dict[str, Any] = document["ranks"]["0"]
        return rank

    def end(self) -> None:
        """Ends the program and waits until the engine has read its last record."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        code = self._child.wait(WAIT_S)
        assert code == 0, f"the program failed with exit code {code}"
        self.session.process_exited(0, code)
        await_true(lambda: self.status()["finished"])


def await_true(condition: Callable[[], bool]) -> None:
    """Waits for another thread or process."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


@contextmanager
def running(program: Path, world_size: int, graph: _native.Graph | None = None) -> Iterator[Run]:
    """Starts the program as rank 0: collecting without a graph, emulating with one."""
    options = {"mode": "emulate" if graph else "collect", "world_size": world_size, "live": [0], "profile": PROFILE}
    session = _native.Session(json.dumps(options), graph)
    with tempfile.TemporaryDirectory(prefix="prism-") as folder:
        placement = Placement(
            world_size=world_size,
            gpus_per_node=8,
            device="emulated",
            socket=session.listen(folder),
            store_host=NO_STORE[0],
            store_port=NO_STORE[1],
        )
        environment = rank_environment(0, placement, check_shims(), os.environ)
        pipe = subprocess.PIPE
        child = subprocess.Popen([program], env=environment, stdin=pipe, stdout=pipe, text=True)
        try:
            await_true(
                lambda: child.poll() is not None or json.loads(session.status_json())["ranks"]["0"]["records"] > 0
            )
            yield Run(session, child)
        finally:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()
            session.finish()
