"""Costs of device and NCCL calls in a real session: the preloaded libraries, the ring, the engine that reads it.

`ns` and `cpu_ns` are what a call took in the program (real time, CPU time of its thread); `engine_cpu_ns` is what the
engine's process spent on it.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import host
import pytest
from conftest import WORLD
from figures import check_goal, report
from prism_core import _native

LAUNCH_GOAL_NS = 100
NCCL_GOAL_NS = 150
SYNC_GOAL_NS = 15_000
#: Calls in a burst fit into the ring, so that they do not wait for the engine.
BURST = 20_000
COSTS = tomllib.loads(host.PROFILE)["host"]


@pytest.fixture(scope="module")
def collecting(program: Path) -> Iterator[host.Run]:
    """Rank 0 of 8, its peers absent."""
    with host.running(program, 8) as run:
        yield run


@dataclass
class Series:
    """Figures per call of repeated commands."""

    ns: list[float] = field(default_factory=list)
    cpu_ns: list[float] = field(default_factory=list)
    engine_cpu_ns: list[float] = field(default_factory=list)

    def measure(self, run: host.Run, name: str, count: int, per_call: int = 1, drain: bool = True) -> None:
        """One command; the engine's share includes what it does until the program has waited for it."""
        engine = time.process_time_ns()
        spent = run.command(name, count)
        if drain:
            run.command("drain")
        engine = time.process_time_ns() - engine
        for series, total in ((self.ns, spent.wall_ns), (self.cpu_ns, spent.cpu_ns), (self.engine_cpu_ns, engine)):
            series.append(total / count / per_call)


def measure(benchmark: Any, run: host.Run, name: str, count: int, per_call: int = 1, rounds: int = 20) -> Series:
    """Times a command in bursts."""
    series = Series()
    run.command(name, count)
    run.command("drain")
    benchmark.pedantic(series.measure, args=(run, name, count, per_call), rounds=rounds if benchmark.enabled else 1)
    report(benchmark, ns=series.ns, cpu_ns=series.cpu_ns, engine_cpu_ns=series.engine_cpu_ns)
    return series


def records_of(run: host.Run, name: str, count: int) -> tuple[int, int]:
    """How many records a command sends, and by how much it moves the program's clock, in ns."""
    run.command("drain")
    before, clock = run.status()["records"], run.command("launch", 0).virtual_ns
    moved = run.command(name, count).virtual_ns - clock
    run.command("drain")  # is answered once the engine has taken in everything before it
    return run.status()["records"] - before - 1, moved


@pytest.mark.parametrize("name", ["launch", "launch_by_handle", "launch_with_arguments"])
def test_kernel_launch(benchmark: Any, collecting: host.Run, name: str) -> None:
    """With recording: goal 100 ns."""
    assert records_of(collecting, name, 1000) == (1000, 1000 * COSTS["kernel_launch_ns"])
    series = measure(benchmark, collecting, name, BURST)
    check_goal(benchmark, series.cpu_ns, LAUNCH_GOAL_NS)


def test_kernel_launches_without_a_pause(benchmark: Any, collecting: host.Run) -> None:
    """More than the ring holds: the slower of program and engine counts."""
    measure(benchmark, collecting, "launch", 25 * BURST, rounds=5)


@pytest.mark.parametrize(("name", "per_call"), [("all_reduce", 1), ("send_and_receive", 3)])
def test_nccl_call(benchmark: Any, collecting: host.Run, name: str, per_call: int) -> None:
    """Per record, without synchronisation: goal 150 ns."""
    records, _ = records_of(collecting, name, 1000)
    assert records == 1000 * per_call
    series = measure(benchmark, collecting, name, BURST, per_call)
    check_goal(benchmark, series.cpu_ns, NCCL_GOAL_NS)


@pytest.mark.parametrize(("name", "records"), [("launch_and_sync", 2), ("launch_and_query", 3)])
def test_round_trip(benchmark: Any, collecting: host.Run, name: str, records: int) -> None:
    """A question that only the engine can answer: goal 15 us.

    On a busy machine real time is mostly waiting for a CPU; the CPU time of both sides bounds what an idle one needs.
    """
    assert records_of(collecting, name, 100)[0] == records * 100
    series = measure(benchmark, collecting, name, 2000)
    both = map(sum, zip(series.cpu_ns, series.engine_cpu_ns, strict=True))
    check_goal(benchmark, list(map(min, series.ns, both)), SYNC_GOAL_NS)


#: Records of one iteration of the program: eight launches, two calls for events and one collective a layer, and five.
ITERATION_RECORDS = 24 * 11 + 5


@pytest.fixture(scope="module")
def recorded(program: Path) -> tuple[_native.Graph, list[int]]:
    """The program as all 8,192 ranks of a job, and the job's iteration times."""
    with host.running(program, WORLD) as run:
        before = run.status()["records"]
        run.command("begin")
        run.command("iterate", 200)  # ends with a synchronisation: the engine has seen everything
        assert run.status()["records"] - before == 1 + 200 * ITERATION_RECORDS
        run.end()
        recording = run.session.recording(0)
    graph = _native.assemble(WORLD, [recording], [0] * WORLD, "{}")
    calls = json.loads(graph.summary_json())["communication"]["all_reduce"]["calls"]
    assert calls == 200 * 24 * WORLD
    replayed = json.loads(_native.replay_json(graph, "{}"))["iteration_time_ns"]
    assert len(replayed) == 200
    return graph, replayed


def test_rank_0_of_8192(benchmark: Any, program: Path, recorded: tuple[_native.Graph, list[int]]) -> None:
    """A whole iteration of 24 collectives beside 8,191 virtual ranks; figures per record of rank 0."""
    graph, replayed = recorded
    rounds, iterations = (9, 20) if benchmark.enabled else (1, 1)
    with host.running(program, WORLD, graph) as run:
        run.command("begin")
        run.command("iterate", 5)
        series = Series()
        # An iteration ends with a synchronisation of its own; another would move the program's clock.
        args = (run, "iterate", iterations, ITERATION_RECORDS, False)
        benchmark.pedantic(series.measure, args=args, rounds=rounds)
        run.end()
        summary = json.loads(run.session.finish())
    count = 5 + rounds * iterations
    assert len(replayed) >= count and summary["iteration_time_ns"] == replayed[:count]
    # Rank 0 is not the last to finish the first iteration; from then on all ranks have one pace.
    own = summary["ranks"][0]["iteration_time_ns"]
    assert own[0] <= replayed[0] and own[1:] == replayed[1:count]
    report(benchmark, ns=series.ns, cpu_ns=series.cpu_ns, engine_cpu_ns=series.engine_cpu_ns)
