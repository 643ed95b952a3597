"""Hybrid emulation of megatron-core, 1F1B, gives what a run of all ranks gives; `benches/fidelity.py` has more."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from prism_core.perturb import Straggler, to_toml

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]


def test_hybrid_megatron_agrees_with_all_ranks_real(
    torch_program: list[str], prism: Callable[..., Any], tmp_path: Path
) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron is not installed: `make programs`")
    graph, file = tmp_path / "job.prism", tmp_path / "perturb.toml"
    options = "--tp=2 --pp=2 --hidden=256 --heads=8 --seq=128 --vocab=1024 --iters=3"
    command = [sys.executable, str(ROOT / "tests/programs/megatron_gpt.py"), *options.split()]
    prism("collect", "--world-size", 4, "--ranks", "all", "-o", graph, "--", *command)
    # Outside the sandbox: the sandbox rank has to wait for it.
    file.write_text(to_toml([Straggler(ranks=[2], factor=30.0)]))

    def emulate(sandbox: str, *how: object) -> dict[str, Any]:
        return prism("emulate", graph, "--sandbox", sandbox, *how, "-o", tmp_path / "run", "--", *command).document

    hybrid, real = (emulate(sandbox, "--perturb", file) for sandbox in ("1", "0-3"))
    healthy = prism("replay", graph).document["iteration_time_ns"]
    assert hybrid["iteration_time_ns"] == real["iteration_time_ns"]
    assert hybrid["iteration_time_ns"][-1] > 1.2 * healthy[-1], "the straggler is felt"
    truth = {rank["rank"]: rank for rank in real["ranks"]}
    same = ("iteration_time_ns", "nccl_digest", "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
    for name in (*same, "nccl_buffer_bytes"):
        assert hybrid["ranks"][0][name] == truth[1][name], name
    assert truth[1]["nccl_digest"] != truth[3]["nccl_digest"], "two stages call NCCL in different orders"
