"""Replay of the demo's 8,192 ranks: opening the graph, one replay (goal 1 s), and rank-ops per second.

A replay is one thread, so its CPU time is what it takes on an idle machine; the goal is checked on that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import prism_core
import pytest
from conftest import WORLD, Job
from figures import check_goal, report
from prism_core.replay import open_graph

REPLAY_GOAL_S = 1.0
STRAGGLER = 4242


@pytest.fixture(scope="module")
def graph(demo: Job) -> prism_core.Graph:
    """The demo's graph, open."""
    return open_graph(demo.graph)


@dataclass
class Timed:
    """Real time and CPU time (of this process and of finished children), per call."""

    body: Callable[[], Any]
    s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def __call__(self) -> Any:
        """One call."""
        before, start = sum(os.times()[2:4]) + time.process_time(), time.perf_counter()
        result = self.body()
        self.s.append(time.perf_counter() - start)
        self.cpu_s.append(sum(os.times()[2:4]) + time.process_time() - before)
        return result


def repeat(benchmark: Any, rounds: int, body: Callable[[], Any]) -> tuple[Any, Timed]:
    """Times `rounds` calls (one while nothing is timed); the last result and the figures."""
    timed = Timed(body)
    return benchmark.pedantic(timed, rounds=rounds if benchmark.enabled else 1), timed


def test_open(benchmark: Any, demo: Job, graph: prism_core.Graph) -> None:
    """Maps the file and checks all of it."""
    opened, timed = repeat(benchmark, 20, lambda: open_graph(demo.graph))
    assert opened.world_size == WORLD and opened.num_ops == graph.num_ops
    assert opened.graph_bytes == demo.graph.stat().st_size
    report(benchmark, s=timed.s, cpu_s=timed.cpu_s, graph_bytes=[opened.graph_bytes])


def test_replay(benchmark: Any, graph: prism_core.Graph) -> None:
    """All ranks virtual and equal."""
    expected = prism_core.replay(graph)
    assert expected.ops_evaluated <= graph.num_ops and len(expected.iteration_time_ns) == 4
    plain = prism_core.replay(graph, symmetry=False)
    assert plain.ops_evaluated == graph.num_ops
    assert plain.iteration_time_ns == expected.iteration_time_ns, "symmetry changes nothing but the speed"
    result, timed = repeat(benchmark, 15, lambda: prism_core.replay(graph))
    assert result.iteration_time_ns == expected.iteration_time_ns
    report(benchmark, s=timed.s, cpu_s=timed.cpu_s, rank_ops=[result.ops])
    check_goal(benchmark, timed.cpu_s, REPLAY_GOAL_S)


def test_replay_command(benchmark: Any, demo: Job, graph: prism_core.Graph) -> None:
    """From the shell: interpreter, graph and replay."""
    command = [sys.executable, "-m", "prism_core.cli", "replay", "--json", str(demo.graph)]
    child, timed = repeat(benchmark, 5, lambda: subprocess.run(command, capture_output=True, text=True, check=False))
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout)["iteration_time_ns"] == prism_core.replay(graph).iteration_time_ns
    report(benchmark, s=timed.s, cpu_s=timed.cpu_s)
    check_goal(benchmark, timed.cpu_s, REPLAY_GOAL_S)


def test_straggler(benchmark: Any, graph: prism_core.Graph) -> None:
    """One rank differs from the others."""
    alone = prism_core.replay(graph).iteration_time_ns
    slowed, timed = repeat(benchmark, 5, lambda: prism_core.replay(graph, slow={STRAGGLER: 1.3}))
    assert slowed.iteration_time_ns[-1] > alone[-1] and 1 < slowed.rank_classes <= WORLD
    report(benchmark, s=timed.s, cpu_s=timed.cpu_s)


def test_every_rank_of_its_own(benchmark: Any, graph: prism_core.Graph) -> None:
    """No two ranks are equal: the engine's throughput per second of CPU."""
    slow = {rank: 1.0 + rank * 1e-6 for rank in range(WORLD)}
    result, timed = repeat(benchmark, 5, lambda: prism_core.replay(graph, slow=slow))
    assert result.ops_evaluated == graph.num_ops and result.rank_classes == WORLD
    rates = [result.ops_evaluated / spent / 1e6 for spent in timed.cpu_s]
    report(benchmark, s=timed.s, cpu_s=timed.cpu_s, mega_rank_ops_per_cpu_s=rates)
