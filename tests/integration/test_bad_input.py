"""What goes wrong is said, by name, with an exit code, and without a traceback of ours."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture
def job(jobs: Callable[..., Any]) -> Any:
    return jobs(8, "--mode", "ddp")


def script(folder: Path, text: str) -> list[str]:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, str(path)]


def test_a_sandbox_rank_outside_the_job(job: Any, prism: Callable[..., Any], tmp_path: Path) -> None:
    error = prism("emulate", job.graph, "--sandbox", "8", "-o", tmp_path / "run", "--", *job.program).error
    assert error["kind"] == "ConfigError" and "rank 8 is outside the job: it has 8 ranks" in error["message"]
    assert not (tmp_path / "run").exists()


def test_a_graph_of_another_world_size(job: Any, prism: Callable[..., Any], tmp_path: Path) -> None:
    program = ["env", "WORLD_SIZE=16", *job.program]
    error = prism("emulate", job.graph, "--sandbox", "5", "-o", tmp_path / "run", "--", *program).error
    assert error["kind"] in ("SessionError", "RankFailedError")
    assert "16" in error["message"] or "world" in error["message"]
    torchrun = ["torchrun", "--nnodes", "2", "--nproc-per-node", "8", "train.py"]
    error = prism("emulate", job.graph, "--sandbox", "5", "-o", tmp_path / "run", "--", *torchrun).error
    assert error["kind"] == "ConfigError" and "asked for 16 ranks" in error["message"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign", "empty"])
def test_a_damaged_graph(damage: str, job: Any, prism: Callable[..., Any], tmp_path: Path) -> None:
    data = bytearray(job.graph.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) // 2] ^= 0x10
    elif damage == "foreign":
        data = bytearray(b"PK\x03\x04" * 100)
    else:
        data = bytearray()
    path = tmp_path / "bad.prism"
    path.write_bytes(data)
    for verb in ("inspect", "replay"):
        assert prism(verb, path).error["kind"] == "GraphFormatError"


def test_a_graph_that_is_not_there(prism: Callable[..., Any], tmp_path: Path) -> None:
    assert "no.prism" in prism("replay", tmp_path / "no.prism").error["message"]


def test_a_program_that_never_calls_nccl(prism: Callable[..., Any], tmp_path: Path) -> None:
    program = script(tmp_path, "import torch; torch.ones(4, device='cuda').sum(); torch.cuda.synchronize()")
    collect = ["collect", "--world-size", 8, "--ranks", "5", "-o", tmp_path / "job.prism", "--"]
    error = prism(*collect, *program).error
    assert "never made a NCCL communicator" in error["message"]
    program = script(tmp_path, "print('I only print')")
    error = prism(*collect, *program).error
    assert "without one CUDA or NCCL call" in error["message"]
    assert not (tmp_path / "job.prism").exists()


def test_a_program_that_dies_in_its_second_iteration(job: Any, prism: Callable[..., Any], tmp_path: Path) -> None:
    train, arguments = job.program[1], job.program[2:]
    program = script(
        tmp_path,
        f"""
        import os, runpy, sys, torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook
        steps = 0
        def die(optimizer, args, kwargs):
            global steps
            steps += 1
            if steps == 2:
                torch.cuda.synchronize()
                os._exit(41)
        register_optimizer_step_pre_hook(die)
        sys.argv = [{train!r}, *{arguments!r}]
        runpy.run_path({train!r}, run_name="__main__")
        """,
    )
    outcome = prism("emulate", job.graph, "--sandbox", "5", "-o", tmp_path / "run", "--", *program)
    assert outcome.code == 41
    error = outcome.error
    assert (error["kind"], error["rank"], error["returncode"]) == ("RankFailedError", 5, 41)
    assert error["last_op"]
    kept = json.loads((tmp_path / "run/summary.json").read_text())
    assert kept["error"] == error
    assert len(kept["ranks"][0]["iteration_time_ns"]) == 1
    assert "iter 0" in (tmp_path / "run/logs/rank-5.log").read_text()


def test_an_unsupported_call_is_named(job: Any, prism: Callable[..., Any], tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import ctypes, torch
        torch.ones(4, device="cuda")
        cudart = ctypes.CDLL(None)
        print("returned", cudart.cudaGraphicsMapResources(0, None, None))
        """,
    )
    run = tmp_path / "run"
    prism("emulate", job.graph, "--sandbox", "5", "-o", run, "--", *program)
    seen = (run / "logs/rank-5.log").read_text() + (run / "summary.json").read_text()
    assert "cudaGraphicsMapResources" in seen


def test_an_interpreter_without_pytorch(job: Any, prism: Callable[..., Any], tmp_path: Path) -> None:
    program = [sys.executable, "-S", *job.program[1:]]  # no site-packages
    if os.environ.get("PYTHONPATH"):
        pytest.skip("PYTHONPATH may lead to PyTorch")
    error = prism("emulate", job.graph, "--sandbox", "5", "-o", tmp_path / "run", "--", *program).error
    assert error["kind"] == "TorchMissingError" and "python -m prism_core.slim" in error["message"]


def test_doctor_finds_the_preload_in_place(prism: Callable[..., Any]) -> None:
    document = prism("doctor").document
    assert document["ok"] and document["preload_in_place"]
