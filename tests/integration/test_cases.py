"""Problems people reported, by the id of the case, with whole programs."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prism_core
import pytest
from conftest import ROOT, SMALL, TRAIN

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_fake_01_any_rank_can_be_played(prism: Callable[..., Any], torch_program: list[str], tmp_path: Path) -> None:
    """240 ranks with TP 8, CP 2, PP 15, EP 16: the last stage is as easy to look at as rank 0."""
    program = [torch_program[0], str(ROOT / "tests/programs/mesh.py")]
    job = tmp_path / "job.prism"
    outcome = prism("collect", "--world-size", 240, "--ranks", "8,239", "--verify", 0, "-o", job, "--", *program)
    assert {8, 239} <= set(outcome.document["ranks_run"])
    logs = Path(outcome.document["logs"])
    told = {rank: (logs / f"rank-{rank}.log").read_text() for rank in (8, 239)}
    assert "rank 8: {'tp': 0, 'cp': 1, 'pp': 0}, expert 8, layers 0-4" in told[8]
    assert "rank 239: {'tp': 7, 'cp': 1, 'pp': 14}, expert 15, layers 57-60" in told[239]
    families = {(each["size"], each["stride"]): each["count"] for each in prism_core.inspect(job)["communicators"]}
    # Groups partition the world.
    assert {(8, 1): 30, (2, 8): 120, (15, 16): 16, (16, 1): 15}.items() <= families.items()
    refused = prism("emulate", job, "--sandbox", "240", "-o", tmp_path / "run", "--", *program)
    assert "rank 240 is outside the job: it has 240 ranks" in refused.error["message"]


def test_a_sweep_ranks_as_runs_of_all_ranks_do(
    prism: Callable[..., Any], torch_program: list[str], tmp_path: Path
) -> None:
    """Kendall's tau against hybrid runs in which every rank is real."""
    small = [word for word in SMALL if not word.startswith(("--batch", "--iters"))]
    command = [sys.executable, TRAIN, *small, "--iters=2", "--mode=ddp", "--batch={batch}"]
    plan = {
        "sweep": {"command": command, "keep_graphs": str(tmp_path)},
        "axes": {"batch": [4, 1]},
        "collect": {"world_size": 2, "ranks": "all"},
    }
    found = prism_core.sweep(plan, tmp_path / "kept.jsonl")
    assert found["failed"] == 0, found["results"]
    assert all(record["peak_bytes"] and record["fits"] for record in found["results"])
    full = {}
    for record in found["results"]:
        batch, job = record["values"]["batch"], tmp_path / f"{record['key']}.prism"
        program = [word.format(batch=batch) for word in command]
        run = prism("emulate", job, "--sandbox", "0,1", "-o", tmp_path / f"run-{batch}", "--", *program)
        full[batch] = run.document["iteration_time_ns"][-1]
    order = [record["values"]["batch"] for record in found["results"]]
    pairs = list(itertools.combinations(order, 2))
    tau = sum(1 if full[faster] < full[slower] else -1 for faster, slower in pairs) / len(pairs)
    assert tau == 1, (json.dumps(full), order)
