"""From the program to the graph, to its replay, and back to the program as some ranks of the job."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

WORLD = 8192


def program_times_ms(log: Path) -> list[float]:
    """What the program itself printed."""
    return [float(time) for time in re.findall(r"iter \d+: ([\d.]+) ms", log.read_text())]


def program_peaks_mib(log: Path) -> list[float]:
    """What the program itself printed."""
    return [float(peak) for peak in re.findall(r"peak ([\d.]+) MiB", log.read_text())]


def test_a_job_of_8192_ranks_from_a_handful_of_processes(jobs: Callable[..., Any], prism: Callable[..., Any]) -> None:
    job = jobs(WORLD, "--mode", "ddp")
    assert job.summary["world_size"] == WORLD
    assert len(job.summary["ranks_run"]) == 5 and job.summary["ranks_inferred"] == WORLD - 5
    assert len(job.summary["ranks_verified"]) == 2
    assert job.summary["graph_bytes"] == job.graph.stat().st_size
    contents = prism("inspect", job.graph).document
    assert contents["world_size"] == WORLD and contents["ops"] == job.summary["ops"]
    assert WORLD in {family["size"] for family in contents["communicators"]}
    assert contents["communication"]["all_reduce"]["calls"] % WORLD == 0
    replayed = prism("replay", job.graph).document
    assert len(replayed["iteration_time_ns"]) == 3 and min(replayed["iteration_time_ns"]) > 0


def test_sandbox_ranks_see_the_job_s_time(jobs: Callable[..., Any], prism: Callable[..., Any], tmp_path: Path) -> None:
    job = jobs(WORLD, "--mode", "ddp")
    run = tmp_path / "run"
    first = prism("emulate", job.graph, "--sandbox", "0,5", "-o", run, "--", *job.program).document
    summary = (run / "summary.json").read_bytes()
    times = [program_times_ms(run / f"logs/rank-{rank}.log") for rank in (0, 5)]
    replayed = prism("replay", job.graph).document["iteration_time_ns"]
    for rank, printed in zip(first["ranks"], times, strict=True):
        emulated = [time / 1e6 for time in rank["iteration_time_ns"]]
        assert printed[-1] == pytest.approx(emulated[-1], rel=0.03), "the program's own timer shows the emulated time"
        assert emulated[-1] == pytest.approx(replayed[-1] / 1e6, rel=0.003)
        assert rank["peak_reserved_bytes"] >= rank["peak_allocated_bytes"] > 0
        peaks = program_peaks_mib(run / f"logs/rank-{rank['rank']}.log")
        assert max(peaks) == pytest.approx(rank["peak_allocated_bytes"] / 2**20, abs=0.01)
    prism("emulate", job.graph, "--sandbox", "0,5", "-o", run, "--", *job.program)
    assert (run / "summary.json").read_bytes() == summary, "two runs differ"
    assert [program_times_ms(run / f"logs/rank-{rank}.log") for rank in (0, 5)] == times


def test_a_far_straggler_is_felt(jobs: Callable[..., Any], prism: Callable[..., Any], tmp_path: Path) -> None:
    job = jobs(WORLD, "--mode", "ddp")
    alone = prism("replay", job.graph).document["iteration_time_ns"][-1]
    slowed = prism("replay", job.graph, "--slow", "4242=1.5").document
    assert slowed["iteration_time_ns"][-1] > alone * 1.02
    assert slowed["critical_rank"] == 4242
    arguments = ["--sandbox", "5", "--slow", "4242=1.5", "-o", tmp_path / "run", "--", *job.program]
    emulated = prism("emulate", job.graph, *arguments).document["ranks"][0]["iteration_time_ns"][-1]
    assert emulated == pytest.approx(slowed["iteration_time_ns"][-1], rel=0.003)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        # The vocabulary is no multiple of 16: the last shard is smaller, and roles have to be found.
        (16, ("--mode", "fsdp2")),
        (64, ("--mode", "hsdp")),
        (64, ("--mode", "hsdp", "--eager")),
        (64, ("--mode", "pipeline", "--layers", "4", "--stages", "4", "--microbatches", "4")),
    ],
    ids=["fsdp2", "hsdp", "hsdp-eager", "pipeline-layers"],
)
def test_every_kind_of_parallelism(
    world: int, options: tuple[str, ...], jobs: Callable[..., Any], prism: Callable[..., Any], tmp_path: Path
) -> None:
    job = jobs(world, *options)
    replayed = prism("replay", job.graph).document["iteration_time_ns"]
    assert len(replayed) == 3 and min(replayed) > 0
    arguments = ["--sandbox", "5", "-o", tmp_path / "run", "--", *job.program]
    document = prism("emulate", job.graph, *arguments).document
    rank = document["ranks"][0]
    # Of the job exactly; a rank that is not the last to end has its own beginnings and ends until all are in step.
    assert document["iteration_time_ns"][-1] == pytest.approx(replayed[-1], rel=0.003)
    assert rank["iteration_time_ns"][-1] == pytest.approx(replayed[-1], rel=0.01)


def test_a_few_ranks_give_the_graph_of_all_ranks(jobs: Callable[..., Any], prism: Callable[..., Any]) -> None:
    few, everyone = jobs(8, "--mode", "ddp"), jobs(8, "--mode", "ddp", ranks="all")
    assert (len(few.summary["ranks_run"]), len(everyone.summary["ranks_run"])) == (5, 8)
    assert few.summary["ops"] == everyone.summary["ops"]
    times = [prism("replay", job.graph).document["iteration_time_ns"] for job in (few, everyone)]
    assert times[0] == times[1]


def test_hybrid_agrees_with_all_ranks_real(real_run: Any, prism: Callable[..., Any], tmp_path: Path) -> None:
    job, real = real_run.job, real_run.summary
    hybrid = prism("emulate", job.graph, "--sandbox", "0,3", "-o", tmp_path / "hybrid", "--", *job.program).document
    real_ranks = {rank["rank"]: rank for rank in real["ranks"]}
    for rank in hybrid["ranks"]:
        other = real_ranks[rank["rank"]]
        assert rank["iteration_time_ns"] == pytest.approx(other["iteration_time_ns"], rel=0.003)
        for peak in ("peak_allocated_bytes", "peak_reserved_bytes"):
            assert rank[peak] == other[peak]
