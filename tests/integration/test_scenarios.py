"""The examples, run as a user runs them: each has a right answer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

EXAMPLES = ROOT / "examples"


def output(script: str) -> list[str]:
    """What an example prints."""
    command = [sys.executable, str(EXAMPLES / script)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout.splitlines()


def test_every_example_is_short() -> None:
    """Programs that are run under `prism` are not meant: they are as long as a training program is."""
    for script in sorted(EXAMPLES.glob("*.py")):
        assert script.name == "train_gpt.py" or len(script.read_text().splitlines()) <= 60, script.name


def test_thermal_throttling_shows_only_at_full_load(prism: Callable[..., Any]) -> None:
    trial, nobody, whole, culprit, work = output("thermal_throttling.py")
    assert trial == "trial run, 64 ranks: 0.674 s a step, 0.674 s with warm air at node 4"
    assert "no rank holds up the others" in nobody
    assert whole == "whole job, 8,192 ranks: 2.413 s a step, 2.652 s with warm air at node 512"
    assert "ranks 4096-4103 hold up the others" in culprit
    assert work.endswith("gemm")


def test_bad_parts_are_named(prism: Callable[..., Any]) -> None:
    lines = output("bad_parts.py")
    answers = {line.split(":")[0]: lines[at + 1] for at, line in enumerate(lines) if line[0] == "a"}
    assert "rank 5000 holds up the others" in answers["a GPU 30 % slower (rank 5000)"]
    assert "rank 4242 holds up the others" in answers["a network card at half speed (rank 4242)"]
    assert "time in messages" in answers["a link that flaps (rank 100)"]
    assert "  communicator 1288 joins ranks [100, 1124]" in lines, "either end of a link may be named"
    assert "rank 777 is dead" in answers["a rank that dies in iteration 2 (rank 777)"]
    assert next(line for line in lines if "rank 777)" in line).endswith("stands still; look at [777]")


def test_a_rank_that_dies_and_what_spare_makes_of_it(prism: Callable[..., Any]) -> None:
    lines = output("rank_dies.py")
    assert lines[0].endswith("look at [777]")
    steps = [line.split(": ")[1] for line in lines if line.startswith("  iteration ")]
    times = [float(step.split(" s, ")[0]) for step in steps]
    assert times[0] == times[1] and times[2] > 2.0 + times[1], "the failure is noticed after two seconds"
    assert 1.5 * times[0] < times[4] < 2.0 * times[0], "two entries are computed, gradients are summed once"
    assert [step.split(", ")[2] for step in steps] == ["train", "train", "reorder", "continue", "train"]
    assert "leaves no host for type 97" in lines[-1], "with r = 2 groups 96 and 97 are the only hosts of a type"


@pytest.mark.torch
@pytest.mark.slow
def test_a_hang_that_one_rank_in_thousands_makes(
    torch_program: list[str], prism: Callable[..., Any], tmp_path: Path
) -> None:
    graph = tmp_path / "desync.prism"
    command = [sys.executable, str(EXAMPLES / "desync.py")]
    ranks = ["--world-size", 8192, "--ranks", "0,4097,8191", "--verify", 0, "--fork-server"]
    assert prism("collect", *ranks, "-o", graph, "--", *command).document["roles"] == 2
    hang = prism("diagnose", graph).document["hang"]
    assert (hang["kind"], hang["culprits"]) == ("cycle", [4097])
    assert [root["call"] for root in hang["roots"]] == ["AllReduce", "AllReduce"]


@pytest.mark.torch
@pytest.mark.slow
def test_skewed_routing_makes_the_rank_of_the_popular_expert_run_out_of_memory(
    torch_program: list[str], prism: Callable[..., Any], tmp_path: Path
) -> None:
    """With two experts the popular one gets four fifths of the tokens; a capacity of 1.2 is the remedy."""
    moe, graph = EXAMPLES / "moe", tmp_path / "moe.prism"
    program = [sys.executable, str(moe / "train.py"), "--experts", "2", "--layers", "2", "--tokens", "393216"]
    collect = ["collect", "--world-size", 8192, "--ranks", "4096,4097", "--verify", 0, "-o", graph, "--rules"]
    error = prism(*collect, moe / "skewed.toml", "--", *program).error
    assert error["kind"] == "DeviceMemoryError"
    rank = error["rank"]
    assert "torch.OutOfMemoryError: CUDA out of memory" in (tmp_path / f"moe.logs/rank-{rank}.log").read_text()
    other = (tmp_path / f"moe.logs/rank-{4096 + 4097 - rank}.log").read_text()
    assert "OutOfMemoryError" not in other
    ranks = prism(*collect, moe / "skewed.toml", "--fresh", "--", *program, "--capacity", "1.2").document["ranks"]
    peaks = {entry["rank"]: entry["peak_allocated_bytes"] for entry in ranks}
    assert peaks[rank] == max(peaks.values()), "the same expert is the popular one"
