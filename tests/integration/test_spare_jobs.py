"""Fault tolerance of collected jobs: their groups, their reduction, and jobs that have no groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import prism_core
import pytest
from prism_core import spare
from prism_core._native import Graph
from prism_core.errors import ConfigError
from prism_core.replay import open_graph

pytestmark = [pytest.mark.torch, pytest.mark.slow]

FAILURE = "[spare]\nredundancy = 3\n[[group_failure]]\niteration = 2\ngroups = [5]\n"


def reductions_alone(graph: Graph) -> Graph:
    """The all-reduces of the last iteration between all ranks, and nothing else."""
    lines = graph.to_text().splitlines()
    ends = [at for at, line in enumerate(lines) if line.endswith("iteration_end")]
    calls = [line.strip().split(" ", 2)[2] for line in lines[ends[-2] : ends[-1]] if " AllReduce c0 " in line]
    meta = "".join(line + "\n" for line in lines if line.startswith('meta "profile"'))
    body = "".join(f"  +0 s0 {call}\n" for call in calls)
    last = graph.world_size - 1
    return Graph.from_text(
        f'prism-graph 1\nworld {graph.world_size}\n{meta}comm 0-{last}\ntemplate "all"\n{body}  +0 s0 iteration_end\n'
        f"rank 0-{last} template 0 comms 0\n"
    )


def test_replicas_are_groups_and_their_reduction_is_what_it_takes_alone(jobs: Callable[..., Any]) -> None:
    graph = open_graph(jobs(8, "--mode", "ddp").graph)
    facts = spare.read_job(graph)
    assert [list(group) for group in facts.groups] == [[rank] for rank in range(8)]
    assert facts.entry_ns + facts.rest_ns == facts.step_ns == prism_core.replay(graph).iteration_time_ns[-1]
    alone = prism_core.replay(reductions_alone(graph)).iteration_time_ns[0]
    # The program makes its calls one after the other, some 12 us apart; alone they follow each other at once.
    assert alone <= facts.reduction_ns <= alone + 30_000


def test_a_collected_job_goes_on_after_a_group_has_died(jobs: Callable[..., Any]) -> None:
    found = prism_core.replay(jobs(8, "--mode", "ddp").graph, perturb=FAILURE).group_failures
    assert [row["live"] for row in found["iterations"]] == [8, 8, 7, 7, 7]
    assert [row["stacks"] for row in found["iterations"]] == [1, 1, 2, 2, 2]
    # Another reduction than among 8 ranks, and in the iteration of the failure it overlaps with nothing.
    for row in found["iterations"][3:]:
        assert row["time_ns"] == pytest.approx(row["closed_form_ns"], rel=0.1)


def test_shards_inside_a_node_make_the_node_a_group(jobs: Callable[..., Any]) -> None:
    facts = spare.read_job(jobs(64, "--mode", "hsdp").graph)
    assert [list(group) for group in facts.groups] == [list(range(8 * node, 8 * node + 8)) for node in range(8)]
    assert facts.gathers == 0


def test_fully_sharded_jobs_are_refused(jobs: Callable[..., Any]) -> None:
    job = jobs(16, "--mode", "fsdp2")
    with pytest.raises(ConfigError, match="with fully sharded parameters none does"):
        spare.plan_job(job.graph, checkpoint_s=5.0, restart_s=600.0, system_mtbf_s=300.0, steps=100, seeds=2)
    with pytest.raises(ConfigError, match="with fully sharded parameters none does"):
        prism_core.replay(job.graph, perturb=FAILURE)
