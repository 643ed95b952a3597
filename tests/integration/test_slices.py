"""A few ranks stand for all of them, or it is said why they do not."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def script(folder: Path, text: str) -> list[str]:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, str(path)]


def test_a_few_ranks_give_the_graph_of_all_ranks_op_for_op(jobs: Callable[..., Any], prism: Callable[..., Any]) -> None:
    few, everyone = jobs(8, "--mode", "ddp"), jobs(8, "--mode", "ddp", ranks="all")
    compared = prism("inspect", few.graph, "--against", everyone.graph).document
    assert compared["equal"] and compared["first"] == [] and compared["ops"][0] == few.summary["ops"]
    assert "ranks_run" in compared["meta"], "how it came about is not the same"
    contents = prism("inspect", few.graph).document
    assert sum(role["ranks"] for role in contents["roles"]) == 8
    peaks = {rank["rank"]: rank["peak_allocated_bytes"] for rank in few.summary["ranks"]}
    assert contents["roles"][0]["peak_allocated_bytes"] == max(peaks.values())
    assert {use["tier"] for use in contents["tiers"]} >= {"T0"}


def test_a_run_of_all_ranks_gives_the_same_graph(real_run: Any, prism: Callable[..., Any], tmp_path: Path) -> None:
    job, recorded = real_run.job, real_run.recorded
    flags = ["--ignore", "host", "--ignore", "memory"]
    assert prism("inspect", job.graph, "--against", recorded, *flags).document["equal"]
    times = [prism("replay", graph).document["iteration_time_ns"][-1] for graph in (job.graph, recorded)]
    assert times[0] == pytest.approx(times[1], rel=0.003)
    few = ["--sandbox", "0,3", "-o", tmp_path / "run", "--record", tmp_path / "few.prism", "--", *job.program]
    error = prism("emulate", job.graph, *few).error
    assert error["kind"] == "ConfigError"
    assert "only 2 of 4 run: name them all (--sandbox 0-3), or use `prism collect`" in error["message"]


GROUPS = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    weight = torch.nn.Parameter(torch.ones(1024, device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.1)
    for iteration in range(3):
        # Other neighbours in every iteration: pairs, fours, all.
        size = 2 << iteration
        group = None
        for first in range(0, world, size):
            made = dist.new_group(list(range(first, first + size)))
            group = made if first <= rank < first + size else group
        weight.grad = torch.ones_like(weight)
        dist.all_reduce(weight.grad, group=group)
        optimizer.step()
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
    dist.destroy_process_group()
"""


def test_groups_that_change_between_iterations(prism: Callable[..., Any], torch_program: Any, tmp_path: Path) -> None:
    graph, program = tmp_path / "job.prism", script(tmp_path, GROUPS)
    collect = ["collect", "--world-size", 8, "--ranks", "0,5", "--verify", 1, "-o", graph, "--"]
    summary = prism(*collect, *program).document
    assert [rank["iterations"] for rank in summary["ranks"]] == [3, 3, 3]
    families = {(entry["size"], entry["count"]): entry for entry in prism("inspect", graph).document["communicators"]}
    assert set(families) == {(2, 4), (4, 2), (8, 1)}
    assert all(entry["calls"] == {"all_reduce": 8} for entry in families.values())
    assert len(prism("replay", graph).document["iteration_time_ns"]) == 3


DISAGREE = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    weight = torch.nn.Parameter(torch.ones(1024, device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.1)
    # A flag that only one rank was started with.
    gradient = torch.ones(1000 if rank == 4 else 1024, device="cuda")
    dist.all_reduce(gradient)
    optimizer.step()
    dist.destroy_process_group()
"""


def test_ranks_that_disagree_on_an_op_are_named(prism: Callable[..., Any], torch_program: Any, tmp_path: Path) -> None:
    program = script(tmp_path, DISAGREE)
    collect = ["collect", "--world-size", 100, "--ranks", "4,5", "--verify", 0, "-o", tmp_path / "job.prism", "--"]
    error = prism(*collect, *program).error
    assert error["kind"] == "ConfigError", error
    assert "the recordings do not fit together" in error["message"] and "rank 4" in error["message"], error
    assert "1000" in error["message"] and "1024" in error["message"], error


def test_a_layout_that_does_not_divide_the_world(
    torch_program: list[str], prism: Callable[..., Any], tmp_path: Path
) -> None:
    program = [*torch_program, "--mode", "pipeline", "--stages", "3"]
    collect = ["collect", "--world-size", 8, "--ranks", "4", "--verify", 0, "-o", tmp_path / "job.prism", "--"]
    error = prism(*collect, *program).error
    assert error["kind"] == "RankFailedError" and error["rank"] == 4
    assert "--stages 3 must divide 8 ranks" in error["message"], "the program's own words"


MEASURED = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    weight = torch.nn.Parameter(torch.ones(1024, device="cuda"))
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(3):
        weight.grad = weight.detach() * 2
        dist.all_reduce(weight.grad)
        optimizer.step()
    dist.destroy_process_group()
"""


def test_measured_host_time_tells_no_roles_apart_and_has_an_error_bar(
    torch_program: Any, prism: Callable[..., Any], tmp_path: Path
) -> None:
    graph, program = tmp_path / "job.prism", script(tmp_path, MEASURED)
    collect = ["collect", "--world-size", 100, "--ranks", "3,5", "--verify", 1, "--host-time", "measured", "-o", graph]
    summary = prism(*collect, "--", *program).document
    assert (summary["roles"], summary["ranks_inferred"], len(summary["ranks_verified"])) == (1, 97, 1)
    influence = summary["influence"]
    assert sorted(entry["rank"] for entry in influence["left_out"]) == summary["ranks_run"]
    assert influence["alone"] == 0 and influence["total_ns"] > 0
    assert influence["error_ppm"] > 0 and influence["largest_ppm"] > 0, influence
