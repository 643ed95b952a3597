"""How long it took until ranks trained."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path

import fakes
import prism_core
import pytest
from prism_core.bootstrap import Bootstrap
from prism_core.launch import GroupResult, RankStatus
from prism_core.report import collect_text, emulate_text

PROGRAM = ["sh", "-c", fakes.CONNECT]
SECOND_NS = 10**9


def test_the_job_has_begun_with_its_last_rank() -> None:
    now = time.monotonic_ns()
    bootstrap = Bootstrap(now - 10 * SECOND_NS)
    result = GroupResult(start_ns={0: now - 9 * SECOND_NS, 3: now - 6 * SECOND_NS})
    bootstrap.look({0: RankStatus(training_for_ns=5 * SECOND_NS)}, result)
    bootstrap.look({0: RankStatus(training_for_ns=1), 3: RankStatus(training_for_ns=SECOND_NS)}, result)
    figures = bootstrap.figures()
    assert figures["rank_ns"]["0"] == pytest.approx(4 * SECOND_NS, abs=SECOND_NS), "the first look counts"
    assert figures["rank_ns"]["3"] == pytest.approx(5 * SECOND_NS, abs=SECOND_NS)
    assert figures["job_ns"] == pytest.approx(9 * SECOND_NS, abs=SECOND_NS)


def test_a_rank_that_never_trains_leaves_the_job_without_a_figure() -> None:
    bootstrap = Bootstrap(0)
    assert bootstrap.figures() == {"job_ns": None, "rank_ns": {}}
    result = GroupResult(start_ns={0: 5, 1: 5})
    bootstrap.look({0: RankStatus(training_for_ns=0), 1: RankStatus(), 2: RankStatus(training_for_ns=7)}, result)
    figures = bootstrap.figures()
    assert figures["job_ns"] is None and figures["rank_ns"]["1"] is None and list(figures["rank_ns"]) == ["0", "1"]


@pytest.fixture
def training_engine(fake_engine: type[fakes.FakeSession], monkeypatch: pytest.MonkeyPatch) -> type[fakes.FakeSession]:
    original = fake_engine.status_json

    def status_json(self: fakes.FakeSession) -> str:
        document = json.loads(original(self))
        for state in document["ranks"].values():
            state["training_for_ns"] = 0
        return json.dumps(document)

    monkeypatch.setattr(fake_engine, "status_json", status_json)
    return fake_engine


@pytest.mark.usefixtures("training_engine")
def test_collect_says_when_ranks_trained(tmp_path: Path) -> None:
    summary = prism_core.collect(PROGRAM, 4, tmp_path / "job.prism", ranks="all")
    figures = summary["bootstrap"]
    assert list(figures["rank_ns"]) == ["0", "1", "2", "3"]
    assert max(figures["rank_ns"].values()) <= figures["job_ns"] <= summary["wall_ns"]
    assert "bootstrap" in collect_text(summary)


@pytest.mark.usefixtures("training_engine")
def test_emulate_says_when_sandbox_ranks_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = "[node]\ngpus = 4\n[device]\nmemory_bytes = 85899345920\n"
    graph = fakes.FakeGraph(64, meta={"device": "emulated:h100-sxm", "profile": profile})
    monkeypatch.setattr(importlib.import_module("prism_core.emulate"), "open_graph", lambda path: graph)
    document = prism_core.emulate(PROGRAM, "job.prism", [5, 0], tmp_path / "run")
    assert list(document["bootstrap"]["rank_ns"]) == ["0", "5"]
    assert document["bootstrap"]["job_ns"] <= document["wall_ns"]
    assert "bootstrap" not in json.loads((tmp_path / "run/summary.json").read_text()), "it varies from run to run"
    assert "until all ranks that ran trained" in emulate_text(document)
