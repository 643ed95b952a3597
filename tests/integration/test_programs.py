"""Training programs of others, as their users start them: they need the extra `programs` (`make programs`)."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAMS = ROOT / "tests" / "programs"


@pytest.fixture(scope="module")
def program(torch_program: list[str]) -> Callable[..., list[str]]:
    """The command line of one of the programs, where what it imports is installed."""

    def command(script: str, package: str | None, *options: str) -> list[str]:
        if package is not None and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: `make programs`")
        return [sys.executable, str(PROGRAMS / script), *options]

    return command


def peaks(log: Path) -> list[int]:
    """Peaks of the allocator that the program printed."""
    return [int(peak) for peak in re.findall(r"peak (\d+)", log.read_text())]


@pytest.mark.parametrize(
    ("world", "ranks", "sandbox", "options"),
    [
        (8, "0,4", 4, ["--tp", "2", "--pp", "2"]),
        (1024, "0,517", 517, ["--tp", "2", "--ep", "4", "--experts", "8", "--capacity", "1.25"]),
        (1024, "0,5,1023", 1023, ["--tp", "8", "--cp", "2", "--pp", "2", "--vpp", "2", "--distributed-optimizer"]),
    ],
    ids=["dense-1f1b", "moe", "everything"],
)
def test_megatron_core(
    world: int,
    ranks: str,
    sandbox: int,
    options: list[str],
    program: Callable[..., list[str]],
    prism: Callable[..., Any],
    tmp_path: Path,
) -> None:
    command = program("megatron_gpt.py", "megatron", *options)
    graph, run = tmp_path / "job.prism", tmp_path / "run"
    arguments = ["--world-size", world, "--ranks", ranks, "--verify", 0, "--fork-server", "-o", graph, "--", *command]
    summary = prism("collect", *arguments).document
    for rank in summary["ranks"]:
        log = graph.with_suffix(".logs") / f"rank-{rank['rank']}.log"
        assert rank["iterations"] == 3 and "done after 3 iterations" in log.read_text()
        assert max(peaks(log)) == rank["peak_allocated_bytes"]
    emulated = prism("emulate", graph, "--sandbox", sandbox, "-o", run, "--", *command).document["ranks"][0]
    assert peaks(run / f"logs/rank-{sandbox}.log") == peaks(graph.with_suffix(".logs") / f"rank-{sandbox}.log")
    assert len(emulated["iteration_time_ns"]) == 3


def test_a_rank_without_its_flags_is_an_error(
    program: Callable[..., list[str]], prism: Callable[..., Any], tmp_path: Path
) -> None:
    command = program("megatron_gpt.py", "megatron", "--tp", "2")
    error = prism(
        "collect", "--world-size", 8, "--ranks", "5", "--verify", 0, "-o", tmp_path / "job.prism", "--", *command
    ).error
    assert error["kind"] == "RankFailedError"
    log = (tmp_path / "job.logs/rank-5.log").read_text()
    assert "from rank 0 is not known: rank 0 did not run, and no rank in its place did: add it" in log


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_accelerate(mode: str, program: Callable[..., list[str]], prism: Callable[..., Any], tmp_path: Path) -> None:
    command = program("accelerate_train.py", "accelerate", "--mode", mode)
    graph, run = tmp_path / "job.prism", tmp_path / "run"
    summary = prism("collect", "--world-size", 8, "--ranks", "0,3", "--verify", 0, "-o", graph, "--", *command).document
    assert [rank["iterations"] for rank in summary["ranks"]] == [3, 3]
    rank = prism("emulate", graph, "--sandbox", 3, "-o", run, "--", *command).document["ranks"][0]
    assert len(rank["iteration_time_ns"]) == 3
    assert max(peaks(run / "logs/rank-3.log")) == rank["peak_allocated_bytes"]


def test_cuda_graphs(program: Callable[..., list[str]], prism: Callable[..., Any], tmp_path: Path) -> None:
    graph = tmp_path / "job.prism"
    command = program("graphs.py", None)
    summary = prism("collect", "--world-size", 8, "--ranks", "3", "--verify", 0, "-o", graph, "--", *command).document
    log = (tmp_path / "job.logs/rank-3.log").read_text()
    times = {
        kind: tuple(map(float, pair)) for kind, *pair in re.findall(r"^(\w+) ([\d.]+) ms, host ([\d.]+) ms", log, re.M)
    }
    (eager, eager_host), (replayed, replayed_host) = times["eager"], times["graph"]
    assert replayed == pytest.approx(eager, rel=0.1), "the same kernels and collectives"
    assert replayed_host < eager_host / 10, "one launch instead of hundreds of calls"
    # Two warm-up steps, ten eager ones, ten launches: the end of an iteration is part of the graph.
    assert summary["ranks"][0]["iterations"] == 22
