"""Ranks that are forked give what ranks that are started anew give, to the byte; and are what they should be."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

#: Says what a rank finds around itself, and trains a little.
PROGRAM = """
import os, sys
print("imported by", os.getpid() if "torch" not in sys.modules else "another", file=sys.stderr)
import torch
import torch.distributed as dist

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    assert not torch.cuda._is_in_bad_fork()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "PRISM_RANK", "PRISM_FORKS", "PRISM_HOOKED")
    print({name: os.environ.get(name) for name in names if name != "MASTER_PORT"}, dist.get_rank())
    print(sys.argv, sys.path[0], __name__, __spec__ is None, sys.modules["__main__"].__dict__ is globals())
    child = os.fork()
    if child == 0:
        os._exit(7 if torch.cuda._is_in_bad_fork() else 8)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.getpgid(0) == os.getpid())
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "train.py"
    path.write_text(PROGRAM)
    return path


def without_place(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if not line.startswith("imported by")]


def test_forked_ranks_are_like_others(
    prism: Callable[..., Any], torch_program: list[str], program: Path, tmp_path: Path
) -> None:
    """Collection and emulation, with and without a fork server: graph, summary and every rank's output."""
    summaries: list[dict[str, Any]] = []
    for switch in ("--fork-server", "--no-fork-server"):
        folder = tmp_path / switch
        folder.mkdir()
        graph = folder / "job.prism"
        command = [sys.executable, program, "--flag"]
        collected = prism(
            "collect", "--world-size", 16, "--ranks", "0,1,2", "--verify", 0, switch, "-o", graph, "--", *command
        ).document
        run = folder / "run"
        prism("emulate", graph, "--sandbox", "0,1", switch, "-o", run, "--", *command)
        summaries.append(
            collected | {"bytes": graph.read_bytes(), "run": json.loads((run / "summary.json").read_text())}
        )
    forked, others = summaries
    assert forked["bytes"] == others["bytes"]
    assert forked["run"] == others["run"] and forked["run"]["notes"] == []
    for name in ("ranks_run", "roles", "ranks", "store", "notes", "ops"):
        assert forked[name] == others[name], name
    logs = [
        [without_place(tmp_path / switch / "run/logs" / f"rank-{rank}.log") for rank in range(2)]
        for switch in ("--fork-server", "--no-fork-server")
    ]
    assert logs[0] == logs[1] and "child 7 True" in logs[0][1]
    said = (tmp_path / "--fork-server/run/logs/rank-1.log").read_text()
    assert "imported by another" in said, "rank 1 was not forked"
    assert "imported by another" not in (tmp_path / "--no-fork-server/run/logs/rank-1.log").read_text()
