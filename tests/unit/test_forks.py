"""Starting ranks by forking: what a forked program finds around itself, and what cannot be shared. No PyTorch here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prism_core import environment, forks
from prism_core.errors import SessionError

#: Prints what it finds; `marker` is imported by it, and says in which process.
PROBE = """
import os, sys
import marker
print(marker.PID == os.getpid(), sys.argv, sys.orig_argv[1:], repr(sys.path[0]), __name__, __package__)
print(os.environ["RANK"], os.environ.get("PRISM_FORKS"), os.environ.get("SET_BY_IMPORT"), os.environ.get("EARLY"))
print(sys.modules["__main__"].__dict__ is globals(), globals().get("__file__"), __spec__ and __spec__.name)
print(os.getpgid(0) == os.getpid(), sys.stdin.read() == "", file=sys.stderr)
"""
MARKER = """
import os
print("marker is imported", flush=True)
PID = os.getpid()
os.environ["SET_BY_IMPORT"] = "yes"
"""


class Bench:
    """A folder with programs, and a way to run ranks in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self, rank: int) -> dict[str, str]:
        placement = environment.Placement(
            world_size=64, gpus_per_node=8, device="emulated", socket=str(self.folder / f"s{rank}"),
            store_host="127.0.0.1", store_port=7 + rank,
        )  # fmt: skip
        base = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "LD_AUDIT")}
        found = environment.rank_environment(rank, placement, [], base)
        # No library is preloaded: as in a child of a program, the hook does not insist on it.
        return {name: value for name, value in found.items() if name != "LD_PRELOAD"} | {"PRISM_HOOKED": "1"}

    def start(self, starter: forks.ForkStarter | forks.NoFork, argv: list[str], rank: int) -> tuple[int, str]:
        """One rank to its end: exit code and output."""
        deadline = time.monotonic() + 120
        while not starter.may_start(lambda _: False):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process = starter.start(rank, argv, self.environment(rank))
        assert process.stdout is not None
        with process.stdout:
            text = process.stdout.read().decode()
        return process.wait(60.0), text

    def compare(self, *arguments: str, ranks: tuple[int, ...] = (9,)) -> forks.ForkStarter:
        """Runs ranks forked and anew: they must say the same, but for where the marker was imported."""
        argv = [sys.executable, *arguments]
        starter = forks.choose_starter(argv, num_ranks=9, wanted=None, device="emulated")
        assert isinstance(starter, forks.ForkStarter)
        with starter:
            self.start(starter, argv, 0)
            forked = [self.start(starter, argv, rank) for rank in ranks]
        for rank, (code, text) in zip(ranks, forked, strict=True):
            expected = self.start(forks.NoFork(), argv, rank)
            assert (code, text.replace("False", "True", 1)) == (expected[0], expected[1].replace("False", "True", 1))
        return starter


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    (tmp_path / "marker.py").write_text(MARKER)
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/inside.py").write_text(PROBE)
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("probe.py", "--flag", "x"), ("-u", "-W", "ignore", "probe.py"), ("-m", "package.inside", "-m", "y"),
        ("-c", PROBE, "z"), ("-O", "-Xdev", "probe.py"),
    ],
    ids=["script", "options", "module", "code", "more-options"],
)  # fmt: skip
def test_a_forked_program_finds_what_it_would_find(bench: Bench, arguments: tuple[str, ...]) -> None:
    starter = bench.compare(*arguments, ranks=(9, 63))
    assert starter.num_forked == 2 and starter.problem is None and starter.notes() == []


def test_imports_are_shared_and_what_they_print_is_not_lost(bench: Bench) -> None:
    argv = [sys.executable, "probe.py"]
    with forks.ForkStarter(forks.parse_python(argv)) as starter:  # type: ignore[arg-type]
        first = bench.start(starter, argv, 0)[1].splitlines()
        second = bench.start(starter, argv, 1)[1].splitlines()
    assert (first[0], second[0]) == ("marker is imported", "marker is imported")
    # What it writes to stderr may come before what it prints.
    assert any(line.startswith("True [") for line in first) and any(line.startswith("False [") for line in second)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3), ("sys.exit('why')", 1), ("raise ValueError('no')", 1), ("os._exit(5)", 5),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("import nothing_of_this_name", 1),
        ("import atexit; atexit.register(print, 'at the end'); print('out')", 0),
    ],
)  # fmt: skip
def test_it_ends_as_it_would_end(bench: Bench, ending: str, code: int) -> None:
    (bench.folder / "ends.py").write_text(f"import marker, os, sys\nif os.environ['RANK'] != '0':\n    {ending}\n")
    argv = [sys.executable, "ends.py"]
    with forks.ForkStarter(forks.parse_python(argv)) as starter:  # type: ignore[arg-type]
        bench.start(starter, argv, 0)
        forked = bench.start(starter, argv, 5)
        assert starter.num_forked == 1
    assert forked == bench.start(forks.NoFork(), argv, 5) and forked[0] == code


@pytest.mark.parametrize(
    "text",
    [
        "import os\nRANK = os.environ.get('LOCAL_RANK')", "import os\nRANK = os.environ['RANK']",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3,), daemon=True).start()",
        "import os, sys\nif 'RANK' not in os.environ: raise RuntimeError('no rank')",
        "import sys, os\nKNOWN = dict(os.environ)['RANK']",
    ],
    ids=["get", "read", "thread", "in", "dict"],
)  # fmt: skip
def test_a_module_that_cannot_be_shared_is_left_to_the_ranks(bench: Bench, text: str) -> None:
    (bench.folder / "own.py").write_text(f"{text}\nimport os\nOWNER = os.getpid()\n")
    (bench.folder / "uses.py").write_text("import own, os\nassert own.OWNER == os.getpid()\n" + PROBE)
    starter = bench.compare("uses.py")
    assert starter.num_forked == 1 and starter.problem is None


def test_what_the_program_sets_before_an_import_is_set_for_the_import(bench: Bench) -> None:
    (bench.folder / "reads.py").write_text("import os\nEARLY = os.environ['EARLY'], os.environ.get('LATE')\n")
    (bench.folder / "sets.py").write_text(
        "import os, sys\nassert 'EARLY' not in os.environ, 'not there before the program sets it'\n"
        "os.environ['EARLY'] = '1'\nimport reads\nassert reads.EARLY == ('1', None), reads.EARLY\n"
        "os.environ['LATE'] = os.environ['RANK']\nimport late\nassert late.LATE == os.environ['RANK']\n" + PROBE
    )
    (bench.folder / "late.py").write_text("import os\nLATE = os.environ['LATE']\n")
    starter = bench.compare("sets.py", ranks=(3, 4))
    assert starter.num_forked == 2


def test_another_module_of_the_same_name_is_not_shared(bench: Bench) -> None:
    (bench.folder / "hidden").mkdir()
    (bench.folder / "hidden/twin.py").write_text("NAME = 'hidden'\n")
    (bench.folder / "twin.py").write_text("NAME = 'open'\n")
    (bench.folder / "twins.py").write_text(
        "import sys\nsys.path.insert(0, 'hidden')\nimport twin\nassert twin.NAME == 'hidden', twin.NAME\n" + PROBE
    )
    assert bench.compare("twins.py").num_forked == 1


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["env", "python", "x.py"], "env is not a Python interpreter"), (["torchrun", "x.py"], "torchrun is not"),
        ([sys.executable, "-i", "probe.py"], "option -i is not supported"), ([sys.executable, "-E", "probe.py"], "-E"),
        ([sys.executable, "none.py"], "not a Python script"), ([sys.executable, "package"], "not a Python script"),
        ([sys.executable], "not a Python script"), ([sys.executable, "-"], "not a Python script"),
    ],
)  # fmt: skip
def test_other_command_lines_are_started_as_usual(bench: Bench, argv: list[str], why: str) -> None:
    starter = forks.choose_starter(argv, num_ranks=9, wanted=None, device="emulated")
    assert isinstance(starter, forks.NoFork) and why in str(starter.problem)
    assert starter.notes() == [f"ranks were not forked: {starter.problem}"]


def test_when_ranks_are_forked() -> None:
    def chosen(num_ranks: int, wanted: bool | None, device: str) -> tuple[type, str | None]:
        starter = forks.choose_starter([sys.executable, "-c", ""], num_ranks=num_ranks, wanted=wanted, device=device)
        starter.close()
        return type(starter), starter.problem

    assert chosen(3, None, "emulated") == (forks.NoFork, None)
    assert chosen(4, None, "emulated") == (forks.ForkStarter, None)
    assert chosen(2, True, "emulated") == (forks.ForkStarter, None)
    assert chosen(64, False, "emulated") == (forks.NoFork, None)
    assert chosen(64, None, "host") == (forks.NoFork, None)
    assert chosen(64, True, "real") == (forks.NoFork, "only ranks on the emulated device can be forked")


def test_a_first_rank_that_says_nothing_holds_up_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "PATIENCE_S", 0.05)
    argv = [sys.executable, "-c", "import os, time; os.environ['RANK'] == '0' and time.sleep(60)"]
    with forks.ForkStarter(forks.parse_python(argv)) as starter:  # type: ignore[arg-type]
        first = starter.start(0, argv, bench.environment(0))
        connected: Callable[[int], bool] = lambda _: True  # noqa: E731
        assert not starter.may_start(connected)
        time.sleep(0.1)
        assert starter.may_start(connected) and "did not say what it had imported" in str(starter.problem)
        assert isinstance(first, subprocess.Popen)
        os.killpg(first.pid, signal.SIGKILL)
        with first:
            first.wait()


def test_a_server_that_dies_is_said(bench: Bench) -> None:
    (bench.folder / "waits.py").write_text("import marker, os, time\nos.environ['RANK'] == '0' or time.sleep(60)\n")
    argv = [sys.executable, "waits.py"]
    with forks.ForkStarter(forks.parse_python(argv)) as starter:  # type: ignore[arg-type]
        bench.start(starter, argv, 0)
        while not starter.may_start(lambda _: False):
            time.sleep(0.01)
        process = starter.start(1, argv, bench.environment(1))
        (server,) = starter._servers
        server._process.kill()
        with pytest.raises(SessionError, match=r"that ranks are forked from has ended \(code -9\)"):
            process.wait(30.0)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()
