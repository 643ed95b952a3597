"""Ranks that are forked give what ranks that are started anew give, to the byte; and are what they should be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
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


SWITCHES = ("--fork-server", "--no-fork-server")


@dataclass
class Collected:
    """The job, collected with and without forks."""

    command: list[Any]
    graphs: list[Path]
    summaries: list[dict[str, Any]]


@pytest.fixture(scope="module")
def job(prism: Callable[..., Any], torch_program: list[str], tmp_path_factory: pytest.TempPathFactory) -> Collected:
    folder = tmp_path_factory.mktemp("forks")
    (folder / "train.py").write_text(PROGRAM)
    made = Collected([sys.executable, folder / "train.py", "--flag"], [], [])
    for switch in SWITCHES:
        made.graphs.append(folder / f"job{switch}.prism")
        where = ["--world-size", 16, "--ranks", "0,1", "--verify", 0, "-o", made.graphs[-1]]
        made.summaries.append(prism("collect", *where, switch, "--", *made.command).document)
    return made


def test_a_graph_from_forked_ranks_is_the_same(job: Collected) -> None:
    forked, others = (graph.read_bytes() for graph in job.graphs)
    assert forked == others
    for name in ("ranks_run", "roles", "ranks", "store", "notes", "ops"):
        assert job.summaries[0][name] == job.summaries[1][name], name
    assert job.summaries[0]["notes"] == []
    logs = [Path(summary["logs"]) / "rank-1.log" for summary in job.summaries]
    assert ["imported by another" in log.read_text() for log in logs] == [True, False]


def test_forked_sandbox_ranks_are_the_same(job: Collected, prism: Callable[..., Any], tmp_path: Path) -> None:
    """Summary and output of every rank, to the byte; a process that a rank forks cannot use the device, as ever."""
    summaries, outputs = [], []
    for switch in SWITCHES:
        run = tmp_path / switch
        prism("emulate", job.graphs[0], "--sandbox", "0,1", switch, "-o", run, "--", *job.command)
        summaries.append((run / "summary.json").read_bytes())
        outputs.append([(run / f"logs/rank-{rank}.log").read_text() for rank in (0, 1)])
    assert summaries[0] == summaries[1]
    assert ["imported by another" in output[1] for output in outputs] == [True, False]
    said = [[line for text in output for line in text.splitlines() if "imported" not in line] for output in outputs]
    assert said[0] == said[1] and "child 7 True" in said[0]
