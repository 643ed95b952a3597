"""Slices as tasks of a cluster, with a stand-in for Ray."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import prism_core
import pytest
from prism_core import executors
from prism_core.errors import ConfigError, RankFailedError, SessionError

PROGRAM = ["sh", "-c", f'{fakes.CONNECT}; test ! -e "$PLACE/die-$RANK"']


class FakeRay:
    """Runs tasks when they are waited for; workers of some are lost."""

    def __init__(self, losses: dict[tuple[int, ...], int]) -> None:
        self.losses = losses
        self.ran: list[tuple[int, ...]] = []
        self.said: list[dict[bytes, bytes]] = []
        ray_error = type("RayError", (Exception,), {})
        self.exceptions = types.SimpleNamespace(RayError=ray_error, RayTaskError=type("RayTaskError", (ray_error,), {}))

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, **options: Any) -> Callable[..., Any]:
        assert options == {"num_cpus": 1, "max_retries": 0}
        return lambda body: types.SimpleNamespace(remote=lambda *arguments: _Task(body, arguments))

    def wait(self, pending: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return pending[-1:], pending[:-1]  # not in the order of asking

    def get(self, task: _Task) -> Any:
        ranks = task.arguments[1]
        if self.losses.get(ranks, 0) > 0:
            self.losses[ranks] -= 1
            raise self.exceptions.RayError("node died")
        self.ran.append(ranks)
        self.said.append(task.arguments[2])
        return task.body(*task.arguments)


class _Task:
    def __init__(self, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.body, self.arguments = body, arguments


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    made = FakeRay({})
    monkeypatch.setattr(executors, "_import_ray", lambda: made)
    return made


def collect(place: Path, **options: Any) -> dict[str, Any]:
    return prism_core.collect(PROGRAM, 6, place / "job.prism", ranks="all", fork_server=False, **options)


@pytest.mark.usefixtures("fake_engine")
def test_slices_give_the_same_as_one_machine(tmp_path: Path, ray: FakeRay) -> None:
    remote = collect(tmp_path, executor="ray", slice_size=2)
    graph = (tmp_path / "job.prism").read_text()
    assert sorted(ray.ran) == [(0, 1), (2, 3), (4, 5)] and remote["ranks_run"] == list(range(6))
    assert (tmp_path / "job.logs/rank-5.log").exists() and not (tmp_path / "job.prism.parts").exists()
    local = collect(tmp_path)
    assert (tmp_path / "job.prism").read_text() == graph and local["ranks"] == remote["ranks"]
    collect(tmp_path, executor="ray")
    assert sorted(ray.ran[3:]) == [(0, 1, 2, 3), (4, 5)]


@pytest.mark.usefixtures("fake_engine")
def test_slices_elsewhere_say_that_they_repeat_nothing(
    tmp_path: Path, ray: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = importlib.import_module("prism_core.collect")._native
    monkeypatch.setattr(engine, "influence_json", lambda *_: "null", raising=False)
    stand_in = types.SimpleNamespace(shared_clocks_json=lambda *_: "[]")
    monkeypatch.setattr(importlib.import_module("prism_core.repeated"), "_native", stand_in)
    clocks = collect(tmp_path, executor="ray", slice_size=2, host_time="measured")["clocks"]
    assert clocks["reason"] == "slices ran on other machines" and clocks["repeated"] == []
    assert sorted(ray.ran) == [(0, 1), (2, 3), (4, 5)] and clocks["shared"]["ties"] == 0


@pytest.mark.usefixtures("fake_engine")
def test_a_slice_that_loses_its_worker_runs_again(
    tmp_path: Path, ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    ray.losses = {(2, 3): 2}
    assert collect(tmp_path, executor="ray", slice_size=2)["ranks_run"] == list(range(6))
    assert caplog.text.count("the worker of ranks 2, 3 was lost: they run again") == 2
    ray.losses = {(2, 3): 9}
    with pytest.raises(SessionError, match="the worker of ranks 2, 3 was lost 4 times: node died"):
        collect(tmp_path, executor="ray", slice_size=2)


@pytest.mark.usefixtures("fake_engine")
def test_a_rank_that_dies_elsewhere_is_named_and_others_are_kept(tmp_path: Path, ray: FakeRay) -> None:
    (tmp_path / "die-3").touch()
    with pytest.raises(RankFailedError, match="rank 3 ended with exit code 1") as caught:
        collect(tmp_path, executor="ray", slice_size=2, jobs=1)
    assert (caught.value.rank, caught.value.returncode) == (3, 1)
    (tmp_path / "die-3").unlink()
    before = [rank for ranks in ray.ran for rank in ranks if rank != 3]
    assert collect(tmp_path, executor="ray", slice_size=2)["ranks_resumed"] == sorted(before)


def test_ray_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'slurm': it must be one of local, ray"):
        collect(tmp_path, executor="slurm")
    real = importlib.import_module

    def absent(name: str, *more: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(executors.importlib, "import_module", absent)
    with pytest.raises(ConfigError, match=r"needs Ray: install the extra, `pip install 'prism_core\[ray\]'`"):
        collect(tmp_path, executor="ray")
