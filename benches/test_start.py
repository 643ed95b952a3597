"""Programs under `prism`: what the preload adds to `import torch`, the first iteration (goal 6 s), whole runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prism_core
import pytest
from conftest import WORLD, Job
from figures import check_goal, report
from prism_core.environment import check_shims, loader_variables

FIRST_ITERATION_GOAL_S = 6.0
IMPORT = [sys.executable, "-c", "import torch; print(torch.__version__)"]

pytestmark = pytest.mark.skipif(
    subprocess.run(IMPORT, capture_output=True, check=False).returncode != 0, reason="this interpreter has no torch"
)


@dataclass(frozen=True)
class Cost:
    """Real time and CPU time of a process and its children."""

    wall_s: float
    cpu_s: float


def timed(command: list[str], environment: dict[str, str]) -> tuple[Cost, str]:
    """Runs a command to its end; its cost and what it printed."""
    start = time.monotonic()
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout as output:
        text = output.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return Cost(time.monotonic() - start, usage.ru_utime + usage.ru_stime), text


def test_import_of_torch(benchmark: Any) -> None:
    """Pairs of an import without and with the preloaded libraries and the audit library (no session)."""
    without = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "LD_AUDIT")}
    preloaded = {**without, **loader_variables(check_shims(), {})}
    assert timed(IMPORT, without)[1] == timed(IMPORT, preloaded)[1]
    pairs: list[tuple[Cost, Cost]] = []

    def pair() -> None:
        pairs.append((timed(IMPORT, without)[0], timed(IMPORT, preloaded)[0]))

    benchmark.pedantic(pair, rounds=5 if benchmark.enabled else 1)
    report(
        benchmark,
        cpu_s_without=[before.cpu_s for before, _ in pairs],
        cpu_s_with=[after.cpu_s for _, after in pairs],
        cpu_s_more=[after.cpu_s - before.cpu_s for before, after in pairs],
        s_more=[after.wall_s - before.wall_s for before, after in pairs],
    )


def tree_cpu_s(pid: int) -> float:
    """CPU time that a process and its children have used so far."""
    folder = Path(f"/proc/{pid}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = [child for task in folder.glob("task/*/children") for child in task.read_text().split()]
    return spent + sum(tree_cpu_s(int(child)) for child in children)


def first_iteration(job: Job, run: Path) -> Cost:
    """From the start of `prism emulate` to the end of the program's first iteration."""
    command = [sys.executable, "-m", "prism_core.cli", "emulate", str(job.graph), "--sandbox", "5", "-o", str(run)]
    start = time.monotonic()
    child = subprocess.Popen(
        [*command, "--", *job.command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert child.stderr is not None
    seen = None
    with child.stderr as lines:
        for line in lines:
            if seen is None and re.search(r"iter 0: [\d.]+ ms", line):
                seen = Cost(time.monotonic() - start, tree_cpu_s(child.pid))
    assert child.wait() == 0 and seen is not None
    return seen


def test_first_iteration(benchmark: Any, demo: Job, tmp_path: Path) -> None:
    """Start of the command to the end of iteration 0 of rank 5 of 8,192: goal 6 s.

    Hardly anything happens in parallel, so the CPU time of both processes is what it takes on an idle machine.
    """
    seen: list[Cost] = []
    benchmark.pedantic(
        lambda: seen.append(first_iteration(demo, tmp_path / "run")), rounds=3 if benchmark.enabled else 1
    )
    report(benchmark, s=[cost.wall_s for cost in seen], cpu_s=[cost.cpu_s for cost in seen])
    check_goal(benchmark, [cost.cpu_s for cost in seen], FIRST_ITERATION_GOAL_S)


@pytest.mark.parametrize("sandbox", [[0], [0, 5], [0, 5, 4096, 8191]], ids=len)
def test_emulate(benchmark: Any, demo: Job, tmp_path: Path, sandbox: list[int]) -> None:
    """A whole `prism emulate` of the demo by number of sandbox ranks: real time and CPU time, of all processes."""
    costs: list[Cost] = []
    replayed = prism_core.replay(demo.graph).iteration_time_ns

    def run() -> None:
        before, start = os.times(), time.monotonic()
        result = prism_core.emulate(demo.command, demo.graph, sandbox, tmp_path / "run", echo=False)
        after = os.times()
        costs.append(Cost(time.monotonic() - start, sum(after[:4]) - sum(before[:4])))
        assert [rank["rank"] for rank in result["ranks"]] == sandbox and result["world_size"] == WORLD
        assert result["iteration_time_ns"] == pytest.approx(replayed, rel=0.003)

    benchmark.pedantic(run)
    report(
        benchmark,
        s=[cost.wall_s for cost in costs],
        s_per_rank=[cost.wall_s / len(sandbox) for cost in costs],
        cpu_s_per_rank=[cost.cpu_s / len(sandbox) for cost in costs],
    )
