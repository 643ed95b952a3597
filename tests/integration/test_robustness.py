"""Runs that end in the middle, programs that start other programs, programs that differ from their graph."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture
def job(jobs: Callable[..., Any]) -> Any:
    return jobs(8, "--mode", "ddp")


#: Only a hang takes so long, however busy the machine is.
HANG_S = 200


class EndlessRun:
    """`prism emulate` of ranks 0 and 5 that would train for ever."""

    def __init__(self, job: Any, folder: Path) -> None:
        self.run = folder / "run"
        program = folder / "program.py"
        train, arguments = job.program[1], [*job.program[2:], "--iters=1000000"]
        program.write_text(
            f"import os, runpy, sys\nprint('pid', os.getpid(), flush=True)\nsys.argv = {[train, *arguments]!r}\n"
            f"runpy.run_path({train!r}, run_name='__main__')\n"
        )
        command = [sys.executable, "-m", "prism_core.cli", "emulate", "--json", job.graph, "--sandbox", "0,5"]
        self.launcher = subprocess.Popen(
            [*map(str, command), "-o", str(self.run), "--", sys.executable, str(program)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._await("both ranks train", lambda: all("iter 2" in self.log(rank) for rank in (0, 5)), HANG_S)
        self.pids = {rank: int(self.log(rank).split()[1]) for rank in (0, 5)}

    def log(self, rank: int) -> str:
        path = self.run / f"logs/rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    @staticmethod
    def _await(what: str, is_so: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.05)

    def await_end_of_ranks(self, seconds: float = HANG_S) -> None:
        self._await("the ranks are gone", lambda: not any(map(is_running, self.pids.values())), seconds)

    def finish(self) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """Exit code, error on stdout, and the summary that was kept."""
        out, _ = self.launcher.communicate(timeout=HANG_S)
        return self.launcher.returncode, json.loads(out)["error"], json.loads((self.run / "summary.json").read_text())


def is_running(pid: int) -> bool:
    """Is there such a process, and is it more than a zombie?"""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_keeps_what_it_has(number: signal.Signals, code: int, job: Any, tmp_path: Path) -> None:
    run = EndlessRun(job, tmp_path)
    run.launcher.send_signal(number)
    returncode, error, kept = run.finish()
    assert returncode == code
    assert error["kind"] == "InterruptedRunError" and number.name in error["message"]
    assert kept["error"] == error and all(len(rank["iteration_time_ns"]) >= 2 for rank in kept["ranks"])
    run.await_end_of_ranks(5)


def test_a_killed_rank_is_named_and_ends_the_others(job: Any, tmp_path: Path) -> None:
    run = EndlessRun(job, tmp_path)
    os.kill(run.pids[5], signal.SIGKILL)
    run.await_end_of_ranks()
    returncode, error, kept = run.finish()
    assert returncode == 137
    assert (error["kind"], error["rank"], error["returncode"]) == ("RankFailedError", 5, 137)
    assert error["last_op"] and kept["error"] == error
    assert all(len(rank["iteration_time_ns"]) >= 2 for rank in kept["ranks"])


def test_ranks_do_not_outlive_the_engine(job: Any, tmp_path: Path) -> None:
    run = EndlessRun(job, tmp_path)
    run.launcher.kill()
    run.launcher.communicate(timeout=HANG_S)
    run.await_end_of_ranks()


HELPERS = """
    import os, subprocess, sys
    train, arguments, when = {train!r}, {arguments!r}, {when!r}
    ask = "import torch; print('helper sees', torch.cuda.device_count(), torch.cuda.get_device_name(), flush=True)"
    if when == "before":
        subprocess.run([sys.executable, "-c", ask], check=True)
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    if when == "during":
        subprocess.run([sys.executable, "-c", ask], check=True)
        subprocess.run(["sh", "-c", "sleep 0.01; true"], check=True)
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=5, num_workers=2)
        assert [len(batch[0]) for batch in loader] == [5, 5, 5, 5]
    sys.argv = [train, *arguments]
    import runpy
    runpy.run_path(train, run_name="__main__")
"""


@pytest.mark.parametrize("when", ["before", "during"])
def test_other_processes_of_a_rank_change_nothing(
    when: str, job: Any, prism: Callable[..., Any], tmp_path: Path
) -> None:
    def collect(name: str) -> tuple[int, int, str]:
        path = tmp_path / f"{name}.py"
        text = HELPERS.format(train=job.program[1], arguments=job.program[2:], when=name)
        path.write_text(textwrap.dedent(text))
        graph = tmp_path / f"{name}.prism"
        options = ["--world-size", 8, "--ranks", "5", "--verify", 0, "-o", graph]
        summary = prism("collect", *options, "--", sys.executable, path).document
        times = prism("replay", graph).document["iteration_time_ns"]
        return summary["ops"], times, graph.with_suffix(".logs").joinpath("rank-5.log").read_text()

    ops, times, log = collect(when)
    assert re.search(r"^helper sees 8 NVIDIA H100", log, re.MULTILINE)
    assert "prism:" not in log
    if when == "before":
        plain = collect("never")
        assert (ops, times) == plain[:2]


@pytest.mark.parametrize("wrapper", ["bash", "timeout", "env", "torchrun"])
def test_wrappers_around_the_program(wrapper: str, job: Any, prism: Callable[..., Any], tmp_path: Path) -> None:
    command = {
        "bash": ["bash", "-c", f"true; {shlex.join(job.program)}"],
        "timeout": ["timeout", "100", *job.program],
        "env": ["env", "SOME=thing", *job.program],
        "torchrun": ["torchrun", "--nproc-per-node=8", *job.program[1:]],
    }[wrapper]
    run = tmp_path / "run"
    rank = prism("emulate", job.graph, "--sandbox", "5", "-o", run, "--", *command).document["ranks"][0]
    assert rank["iteration_time_ns"][-1] == pytest.approx(
        prism("replay", job.graph).document["iteration_time_ns"][-1], rel=0.003
    )
    log = (run / "logs/rank-5.log").read_text()
    assert log.count("iter ") == 3 and "prism" not in log


@pytest.mark.parametrize("iters", [1, 2, 6])
def test_a_program_that_iterates_more_or_less_than_its_graph(
    iters: int, job: Any, prism: Callable[..., Any], tmp_path: Path
) -> None:
    program, sandbox = [*job.program, f"--iters={iters}"], "0,5" if iters > 3 else "5"
    document = prism("emulate", job.graph, "--sandbox", sandbox, "-o", tmp_path / "run", "--", *program).document
    replayed = prism("replay", job.graph).document["iteration_time_ns"]
    # A rank counts an iteration from its own begin to its own end, the job from the last rank's to the last rank's.
    assert document["iteration_time_ns"][:3] == pytest.approx(replayed[:iters], rel=1e-5)
    for rank in document["ranks"]:
        times = rank["iteration_time_ns"]
        assert len(times) == iters
        assert times[2:] == pytest.approx([replayed[-1]] * max(iters - 2, 0), rel=0.003)


def test_a_graph_that_lacks_the_second_kind_of_iteration_says_so(
    torch_program: list[str], prism: Callable[..., Any], tmp_path: Path
) -> None:
    graph, program = tmp_path / "job.prism", [*torch_program, "--mode", "ddp"]
    collect = ["collect", "--world-size", 8, "--ranks", "5", "--verify", 0, "-o", graph, "--", *program, "--iters=1"]
    prism(*collect).document  # noqa: B018 - DDP regroups its gradients once, in the second iteration
    error = prism("emulate", graph, "--sandbox", "5", "-o", tmp_path / "run", "--", *program).error
    assert error["kind"] == "DeadlockError"
    assert "the graph has 1 iteration" in error["message"] and "collect more iterations" in error["message"]


def test_a_device_that_is_not_known(job: Any, prism: Callable[..., Any], tmp_path: Path) -> None:
    options = ["--world-size", 8, "--device", "emulated:h900", "-o", tmp_path / "job.prism"]
    error = prism("collect", *options, "--", *job.program).error
    assert error["kind"] == "ConfigError" and "h900" in error["message"] and "h100-sxm" in error["message"]
