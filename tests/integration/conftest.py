"""Whole runs: the built engine and libraries, PyTorch, and `prism` as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prism_core.environment import SHIM_FOLDER, SHIM_NAMES, shim_problem

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "examples" / "train_gpt.py")
#: A model that takes the host little time; its figures still come from every part of the road.
SMALL = ["--layers=2", "--hidden=128", "--heads=4", "--seq=128", "--batch=2", "--vocab=1000", "--iters=3"]


@dataclass
class Outcome:
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on stdout; shows stderr if the command failed."""
        assert self.code == 0, self.err[-4000:]
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        """The error document of a command that failed."""
        assert self.code != 0
        assert "Traceback (most recent call last)" not in self.err.replace("[rank", "") or "[rank" in self.err
        return json.loads(self.out)["error"]


def run_prism(*arguments: object, timeout: float = 280) -> Outcome:
    """Runs one command of `prism` with --json."""
    words = [str(argument) for argument in arguments]
    command = [sys.executable, "-m", "prism_core.cli", words[0], "--json", *words[1:]]
    child = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT)
    return Outcome(child.returncode, child.stdout, child.stderr)


@pytest.fixture(scope="session")
def prism() -> Callable[..., Outcome]:
    """The command, where everything it needs is built."""
    problems = [problem for name in SHIM_NAMES if (problem := shim_problem(SHIM_FOLDER / name))]
    if problems:
        pytest.skip(problems[0])
    return run_prism


@pytest.fixture(scope="session")
def torch_program(prism: Callable[..., Outcome]) -> list[str]:
    """The start of a command line that runs the example."""
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this interpreter cannot import torch")
    return [sys.executable, TRAIN, *SMALL]


@dataclass
class Job:
    """A collected job."""

    graph: Path
    program: list[str]
    summary: dict[str, Any]


@pytest.fixture(scope="session")
def jobs(
    prism: Callable[..., Outcome], torch_program: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Job]:
    """Collects each job once, however many tests use it."""
    known: dict[tuple[str, ...], Job] = {}

    def collect(world_size: int, *options: str, ranks: str = "auto") -> Job:
        key = (str(world_size), ranks, *options)
        if key not in known:
            graph = tmp_path_factory.mktemp("job") / "job.prism"
            program = [*torch_program, *options]
            outcome = prism("collect", "--world-size", world_size, "--ranks", ranks, "-o", graph, "--", *program)
            known[key] = Job(graph, program, outcome.document)
        return known[key]

    return collect


@dataclass
class RealRun:
    """A job, emulated with every rank real."""

    job: Job
    summary: dict[str, Any]
    recorded: Path


@pytest.fixture(scope="session")
def real_run(
    jobs: Callable[..., Job], prism: Callable[..., Outcome], tmp_path_factory: pytest.TempPathFactory
) -> RealRun:
    """Four data-parallel ranks, and the graph that was recorded meanwhile."""
    job, folder = jobs(4, "--mode", "ddp"), tmp_path_factory.mktemp("real")
    recorded = folder / "recorded.prism"
    arguments = ["--sandbox", "0-3", "-o", folder / "run", "--record", recorded, "--", *job.program]
    return RealRun(job, prism("emulate", job.graph, *arguments).document, recorded)
