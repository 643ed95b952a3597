"""What the benchmarks share: the small program of device calls, and the job of `make demo`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import figures
import host
import prism_core
import pytest

ROOT = Path(__file__).resolve().parent.parent
WORLD = 8192
#: The job of `make demo`.
DEMO = [
    *(sys.executable, str(ROOT / "examples/train_gpt.py"), "--mode=ddp", "--layers=8", "--hidden=1024"),
    *("--heads=16", "--seq=1024", "--batch=8", "--iters=4"),
]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled `program.c`."""
    return host.build_program(tmp_path_factory.mktemp("program"))


@dataclass(frozen=True)
class Job:
    """A collected job."""

    graph: Path
    command: list[str]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The graph of the demo's 8,192 ranks."""
    graph = tmp_path_factory.mktemp("demo") / "job.prism"
    summary = prism_core.collect(DEMO, WORLD, graph)
    assert summary["world_size"] == WORLD and len(summary["ranks_run"]) < 16
    return Job(graph, DEMO)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures that the benchmarks measured themselves."""
    if figures.LINES:
        terminalreporter.write_sep("-", "medians")
        for line in figures.LINES:
            terminalreporter.write_line(line)
