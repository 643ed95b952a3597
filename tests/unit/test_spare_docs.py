"""Every command of docs/concepts/spare.md runs, and so does the example."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from prism_core import synthetic

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/concepts/spare.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", " ")
COMMANDS = [line for line in BLOCKS.splitlines() if line.strip()]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_docs_runs(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    assert words[:2] == ["prism", "spare"]
    # As documented, but with few simulated trainings.
    if words[2] in ("plan", "simulate", "from", "published"):
        words += ["--seeds", "2"]
    if words[2] == "plan":
        words += ["--max-redundancy", "8"]
    synthetic.transformer_step(12, 2, 2, 4, 2, iterations=2).save(str(tmp_path / "JOB.prism"))
    rows = (f"{at * 37},{at * 7 % 40}\n" for at in range(1, 60))
    (tmp_path / "failures.csv").write_text("time_s,group\n" + "".join(rows))
    found = subprocess.run(
        [sys.executable, "-m", "prism_core.cli", *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env=os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout or "rows in" in found.stderr


def test_the_example_runs_and_is_short() -> None:
    example = ROOT / "examples/spare_frontier.py"
    assert len(example.read_text().splitlines()) < 60
    found = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=280)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("<- best") == 3
