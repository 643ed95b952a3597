"""Device memory of real runs: what fits, by how much, and who ran out of it where."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

GREEDY = """
import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl")
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
for step in range(2):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    if step == 1:
        torch.empty(200 << 30, dtype=torch.uint8, device="cuda")
"""


def test_a_full_card_names_rank_step_op_and_line(
    prism: Callable[..., Any], torch_program: list[str], tmp_path: Path
) -> None:
    assert torch_program
    script = tmp_path / "greedy.py"
    script.write_text(GREEDY)
    error = prism(
        "collect", "--world-size", 8, "--ranks", "5", "--verify", 0, "-o", tmp_path / "job.prism",
        "--", sys.executable, script,
    ).error  # fmt: skip
    assert (error["kind"], error["rank"], error["iteration"]) == ("DeviceMemoryError", 5, 2)
    assert "rank 5 ran out of device memory in iteration 2 after " in error["message"]
    line = 1 + next(number for number, text in enumerate(GREEDY.splitlines()) if "200 << 30" in text)
    assert f"{script}:{line}: CUDA out of memory. Tried to allocate 200.00 GiB. GPU 0 has a total" in error["message"]


BESIDE_NCCL = """
import torch
import torch.distributed as dist

torch.cuda.set_device(0)
free = torch.cuda.mem_get_info()[0]
dist.init_process_group("nccl")
x = torch.ones(1 << 22, device="cuda")
dist.all_reduce(x)
left = torch.cuda.mem_get_info()[0]
print("BUFFERS", free - torch.cuda.memory_reserved() - left)
page = 2 << 20
most = left // page * page
torch.empty(most, dtype=torch.uint8, device="cuda")
torch.cuda.empty_cache()
try:
    torch.empty(most + page, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("OUT OF MEMORY")
"""


def test_buffers_of_nccl_are_no_free_memory(
    prism: Callable[..., Any], torch_program: list[str], tmp_path: Path
) -> None:
    assert torch_program
    script = tmp_path / "beside.py"
    script.write_text(BESIDE_NCCL)
    job = prism(
        "collect", "--world-size", 8, "--ranks", "5", "--verify", 0, "-o", tmp_path / "job.prism",
        "--", sys.executable, script,
    ).document  # fmt: skip
    (rank,) = job["ranks"]
    log = next(tmp_path.glob("job.logs/rank-5.log")).read_text()
    assert f"BUFFERS {rank['nccl_buffer_bytes']}\n" in log and rank["nccl_buffer_bytes"] > 0
    assert "\nOUT OF MEMORY\n" in log


def test_a_job_that_fits_says_by_how_much(jobs: Callable[..., Any], prism: Callable[..., Any], tmp_path: Path) -> None:
    job = jobs(8, "--mode", "ddp")
    collected = job.summary["memory"]
    assert collected["fits"] and [stage["stage"] for stage in collected["stages"]] == [0]
    ranks = {rank["rank"]: rank for rank in job.summary["ranks"]}
    worst = ranks[collected["worst_rank"]]["memory"]
    assert worst["total_bytes"] == max(rank["memory"]["total_bytes"] for rank in ranks.values())
    assert worst["free_bytes"] == worst["capacity_bytes"] - worst["total_bytes"] == collected["free_bytes"]
    run = prism("emulate", job.graph, "--sandbox", 3, "-o", tmp_path / "run", "--", *job.program).document
    assert run["memory_collected"] == collected
    (rank,) = run["ranks"]
    parts = {part["name"]: part for part in rank["memory"]["parts"]}
    assert parts["allocator"]["bytes"] == rank["peak_reserved_bytes"] and parts["allocator"]["basis"] == "recorded"
    assert parts["NCCL buffers"]["bytes"] == rank["nccl_buffer_bytes"] > 0
    assert parts["CUDA context and library images"]["basis"] == "assumed"
    assert rank["memory"]["workspace_bytes"] > 0, "PyTorch gives cuBLAS a workspace"
    assert sum(part["bytes"] for part in parts.values()) == rank["memory"]["total_bytes"]
