"""What values cost per operator, in CPU time: without them, listed and not run, and run on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from figures import report

PROGRAM = """
import json, time, torch
d = {"device": "cuda"}
large, small = torch.zeros(2048, 2048, **d), torch.ones(4, **d)
scores = torch.tensor([[(31 * t + 7 * e) % 101 for e in range(8)] for t in range(4096)], dtype=torch.float32, **d)
many = [torch.zeros(512, 1024, **d) for _ in range(200)]
cases = {
    "listed, large": (lambda: large.add_(1), 2000),
    "listed, run": (lambda: small.add_(1), 2000),
    "not listed": (lambda: torch.nn.functional.gelu(large), 2000),
    "mm": (lambda: torch.mm(large, large), 1000),
    "foreach of 200": (lambda: torch._foreach_add_(many, 1.0), 100),
    "top-k 4096 x 8": (lambda: torch.topk(scores, 2), 50),
}
for name, (body, count) in cases.items():
    body()
    best = 1 << 60
    for _ in range(5):
        start = time.process_time_ns()
        for _ in range(count):
            body()
        best = min(best, time.process_time_ns() - start)
    print("COST", json.dumps([name, best / count]))
# Of numbers that are known the answer is right; without values it is not.
print("SUM", (small * 0 + 3).sum().item())
"""


@pytest.mark.parametrize("values", ["on", "off"])
def test_operators(benchmark: Any, values: str, tmp_path: Path) -> None:
    """One program with values and without."""
    pytest.importorskip("torch")
    program, graph = tmp_path / "program.py", tmp_path / "job.prism"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "prism_core.cli", "collect", "--world-size", "1", "-o", str(graph), "--"]

    def run() -> str:
        environment = os.environ | {"PRISM_VALUES": values}
        subprocess.run([*command, sys.executable, str(program)], check=True, capture_output=True, env=environment)
        return (tmp_path / "job.logs/rank-0.log").read_text()

    log = benchmark.pedantic(run, rounds=1)
    costs = dict(json.loads(line[5:]) for line in log.splitlines() if line.startswith("COST "))
    assert len(costs) == 6
    if values == "on":
        assert "SUM 12.0" in log
    report(benchmark, **{name.replace(" ", "_"): [cost / 1e3] for name, cost in costs.items()})
