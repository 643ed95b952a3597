"""Slices of a collection as tasks of a Ray cluster of two nodes on loopback (`make test-ray`)."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prism_core import synthetic

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("default")]
pytestmark += [pytest.mark.timeout(1200)]

#: A rank of the second slice says who its parent is, and waits to be killed, the first time.
PROGRAM = """
import os, time
from pathlib import Path
place, rank = Path(os.environ["PLACE"]), int(os.environ["RANK"])
(place / f"by-{rank}").write_text(os.environ.get("SAID_BY_USER", ""))
if rank == 3 and (place / "wait").exists() and not (place / "waits").exists():
    (place / "draft").write_text(f"{os.getppid()} {os.getpid()}")
    (place / "draft").rename(place / "waits")
    time.sleep(600)
import torch
import torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
weight = torch.nn.Parameter(torch.ones(64, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.sum().backward()
dist.all_reduce(weight.grad)
optimizer.step()
dist.destroy_process_group()
"""


SWEEP = """
[sweep]
graph = "job.prism"
[axes]
straggler = [1.0, 1.5, 2.0]
[replay]
slow = ["0={straggler}"]
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    # A busy machine takes its time. Ray reads this when it is imported.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.setenv("SAID_BY_USER", "hello")
    (tmp_path / "train.py").write_text(PROGRAM)
    return ["--world-size", 8, "--ranks", "0,1,2,3", "--verify", 0, "--", sys.executable, tmp_path / "train.py"]


def test_slices_on_two_nodes_give_the_graph_of_one_machine(
    cluster: str, job: list[Any], prism: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    remote = prism(
        "collect", "-o", tmp_path / "ray.prism", "--executor", "ray", "--slice", 2, *job, timeout=900
    ).document
    assert (tmp_path / "by-3").read_text() == "hello", "the program sees the environment of the one who asks"
    local = prism("collect", "-o", tmp_path / "local.prism", *job, timeout=900).document
    assert (tmp_path / "ray.prism").read_bytes() == (tmp_path / "local.prism").read_bytes()
    assert remote["ranks"] == local["ranks"] and remote["ranks_run"] == [0, 1, 2, 3]
    assert all((tmp_path / f"ray.logs/rank-{rank}.log").exists() for rank in range(4))


def test_a_sweep_on_two_nodes_ranks_as_one_machine_does(
    cluster: str, prism: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    synthetic.transformer_step(dp=2, tp=1, pp=2, microbatches=4, layers=2).save(str(tmp_path / "job.prism"))
    (tmp_path / "sweep.toml").write_text(SWEEP)
    remote = prism("sweep", tmp_path / "sweep.toml", "-o", tmp_path / "ray.jsonl", "--executor", "ray", timeout=900)
    local = prism("sweep", tmp_path / "sweep.toml", "-o", tmp_path / "local.jsonl")
    assert remote.document["failed"] == 0 and remote.document["finished"] == 3
    shown = [[(r["name"], r["iteration_time_ns"]) for r in found.document["results"]] for found in (remote, local)]
    assert shown[0] == shown[1] and len(shown[0]) == 3


def test_a_lost_worker_s_slice_runs_again(
    cluster: str, job: list[Any], prism: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    (tmp_path / "wait").touch()
    with ThreadPoolExecutor(1) as pool:
        arguments = ["collect", "-o", tmp_path / "ray.prism", "--executor", "ray", "--slice", 2, *job]
        running = pool.submit(lambda: prism(*arguments, timeout=900))
        deadline = time.monotonic() + 600
        while not (tmp_path / "waits").exists():
            assert time.monotonic() < deadline and not running.done(), running.result().err[-3000:]
            time.sleep(0.1)
        for pid in map(int, (tmp_path / "waits").read_text().split()):
            os.kill(pid, signal.SIGKILL)
        outcome = running.result()
    assert outcome.document["ranks_run"] == [0, 1, 2, 3]
    assert "the worker of ranks 2, 3 was lost: they run again" in outcome.err
