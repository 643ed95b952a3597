"""Perturbations reach sandbox ranks and virtual ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prism_core.perturb import Jitter, Perturbation, RankDeath, SlowLink, Straggler, to_toml

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def perturbed(folder: Path, *perturbations: Perturbation) -> list[object]:
    """The option for a file of perturbations."""
    path = folder / "perturb.toml"
    path.write_text(to_toml(perturbations))
    return ["--perturb", path]


@pytest.mark.parametrize(
    "perturbation",
    [
        Straggler(ranks=[5], factor=1.5, iterations=(1, 3)),
        Straggler(ranks=[40], factor=20.0, classes=["gemm"]),
        Straggler(ranks=[5], factor=4.0, names=["Memcpy*", "*ampere*", "*kernel*"]),
        Jitter(ranks="all", distribution="gamma", shape=2, scale=2000, mode="add", seed=3),
        SlowLink(nodes=[2], bandwidth_factor=0.2),
    ],
    ids=lambda perturbation: f"{perturbation.kind}-{perturbation.ranks or perturbation.nodes}",
)
def test_a_sandbox_rank_sees_what_the_replay_says(
    perturbation: Perturbation, jobs: Callable[..., Any], prism: Callable[..., Any], tmp_path: Path
) -> None:
    job = jobs(64, "--mode", "ddp")
    option = perturbed(tmp_path, perturbation)
    healthy = prism("replay", job.graph).document["iteration_time_ns"]
    replayed = prism("replay", job.graph, *option).document["iteration_time_ns"]
    assert replayed[-1] > healthy[-1] * 1.001
    arguments = ["--sandbox", "5", *option, "-o", tmp_path / "run", "--", *job.program]
    document = prism("emulate", job.graph, *arguments).document
    # The job as a whole: under jitter, ranks end their iterations at different times.
    assert document["iteration_time_ns"][-1] == pytest.approx(replayed[-1], rel=0.003)
    assert document["perturb"] == option[1].read_text()


@pytest.mark.parametrize("rank", [5, 40])
def test_a_dead_rank_ends_the_run_by_name(
    rank: int, jobs: Callable[..., Any], prism: Callable[..., Any], tmp_path: Path
) -> None:
    job = jobs(64, "--mode", "ddp")
    option = perturbed(tmp_path, RankDeath(rank=rank, iteration=1))
    assert f"waits for rank {rank}; dead: {rank}" in prism("replay", job.graph, *option).error["message"]
    arguments = ["--sandbox", "5,6", *option, "-o", tmp_path / "run", "--", *job.program]
    message = prism("emulate", job.graph, *arguments).error["message"]
    assert f"rank {rank} has died" in message and f"dead: {rank}" in message
