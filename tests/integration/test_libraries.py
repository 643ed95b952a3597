"""Calls of NVIDIA's libraries that are recorded, not run, as a program meets them through PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAM = """
import os
import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
a = torch.eye(64, device="cuda")
factors = [
    *torch.linalg.qr(a), torch.linalg.cholesky(a), *torch.linalg.eigh(a), *torch.linalg.svd(a),
    torch.linalg.solve(a, a), torch.linalg.inv(a), torch.linalg.cholesky(a.expand(3, 64, 64).contiguous()),
]
print("shapes", [list(factor.shape) for factor in factors])
try:
    torch.linalg.ldl_factor(a)
except RuntimeError as error:
    print("refused", "sytrf" in str(error))

# An all-gather into a list of tensors, by one broadcast from every rank: each is taken to send what this one does.
dist.init_process_group("nccl")
pieces = [torch.full((2,), float(rank), device="cuda") for rank in range(4)]
pieces[dist.get_rank()] += 40
with dist._coalescing_manager(device=torch.device("cuda")):
    for rank, piece in enumerate(pieces):
        dist.broadcast(piece, src=rank)
print("gathered", [piece.tolist() for piece in pieces])
dist.destroy_process_group()
"""


def test_factorisations_and_grouped_broadcasts(
    torch_program: list[str], prism: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    summary = prism(
        "collect", "--world-size", 4, "--ranks", "2", "--verify", 0, "-o", tmp_path / "job.prism", "--",
        sys.executable, script,
    ).document  # fmt: skip
    log = (tmp_path / "job.logs/rank-2.log").read_text()
    sides = [[64, 64]] * 3 + [[64], [64, 64], [64, 64], [64], [64, 64]] + [[64, 64]] * 2 + [[3, 64, 64]]
    assert f"shapes {sides}" in log
    assert "refused True" in log and "prism: cusolverDnSsytrf_bufferSize is not supported" in log
    assert f"gathered {[[42.0, 42.0]] * 4}" in log
    assert any("cuSOLVER's status: every call succeeds" in line for line in str(summary).split("\n")), summary
