"""Collect and emulate with a stand-in for the engine: what is run, written and reported."""

from __future__ import annotations

import json
from pathlib import Path

import fakes
import prism_core
import pytest
from prism_core.errors import ConfigError, RankFailedError, SessionError
from prism_core.page import gather, gather_run, render
from prism_core.report import collect_text, emulate_text, read_run
from prism_core.rules import Rules

PROGRAM = ["sh", "-c", fakes.CONNECT]


def test_collect_runs_a_few_ranks_and_assigns_all(tmp_path: Path, fake_engine: type[fakes.FakeSession]) -> None:
    fake_engine.program_of = staticmethod(lambda rank: "first" if rank == 0 else "ddp")
    summary = prism_core.collect(PROGRAM, 64, tmp_path / "job.prism", seed=3)
    # Rank 0 differs, so rank 1 is run too, to see whether it is alone.
    assert len(summary["ranks_run"]) == 6 and {0, 1, 32, 63} <= set(summary["ranks_run"])
    assert summary["ranks_inferred"] == 58
    assert len(summary["ranks_verified"]) == 2
    assert (summary["world_size"], summary["ops"], summary["graph_bytes"], summary["roles"]) == (64, 70, 700, 2)
    assert summary["wall_ns"] > 0 and summary["peak_rss_bytes"] > 0
    assignment = json.loads((tmp_path / "job.prism").read_text())
    assert [assignment[rank] for rank in (0, 1, 2, 62, 63)] == [0, 1, 32, 32, 63]
    assert (tmp_path / "job.logs/rank-32.log").exists()
    assert sorted(session.options["live"] for session in fake_engine.made) == [[rank] for rank in summary["ranks_run"]]
    text = collect_text(summary)
    assert "cudaFoo" in text and "64: 6 run, 58 inferred" in text


@pytest.mark.usefixtures("fake_engine")
def test_collect_of_all_ranks_and_of_a_list(tmp_path: Path) -> None:
    summary = prism_core.collect(PROGRAM, 4, tmp_path / "job.prism", ranks="all")
    assert (summary["ranks_run"], summary["ranks_inferred"], summary["ranks_verified"]) == ([0, 1, 2, 3], 0, [])
    summary = prism_core.collect(PROGRAM, 16, tmp_path / "job.prism", ranks="2,5", num_verified=0)
    assert summary["ranks_run"] == [2, 5]
    with pytest.raises(ConfigError, match="rank 16 is outside"):
        prism_core.collect(PROGRAM, 16, tmp_path / "job.prism", ranks="16")


@pytest.mark.usefixtures("fake_engine")
def test_collect_refuses_what_cannot_work_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        prism_core.collect(PROGRAM, 16, tmp_path / "no/job.prism")
    with pytest.raises(ConfigError, match="at least one rank"):
        prism_core.collect(PROGRAM, 0, tmp_path / "job.prism")
    with pytest.raises(ConfigError, match="asked for 8 ranks"):
        prism_core.collect(["torchrun", "--nproc-per-node", "8", "x.py"], 16, tmp_path / "job.prism")
    assert fakes.FakeSession.made == []


def test_exact_collect_plays_all_ranks_in_one_session(tmp_path: Path, fake_engine: type[fakes.FakeSession]) -> None:
    rules = Rules([])
    how = {"device": "host:h100-sxm", "ranks": "all", "exact": True, "rules": rules}
    summary = prism_core.collect(PROGRAM, 6, tmp_path / "job.prism", jobs=2, **how)
    assert summary["ranks_run"] == list(range(6)) and [rank["tiers"] for rank in summary["ranks"]] == [[]] * 6
    (session,) = fake_engine.made
    assert (session.options["live"], session.options["at_once"], session.values) == (list(range(6)), 2, rules)
    assert session.most_running == 2
    with pytest.raises(ConfigError, match="--exact needs --ranks all"):
        prism_core.collect(PROGRAM, 6, tmp_path / "job.prism", device="host:h100-sxm", exact=True)
    with pytest.raises(ConfigError, match="--device host"):
        prism_core.collect(PROGRAM, 6, tmp_path / "job.prism", ranks="all", exact=True)
    with pytest.raises(ConfigError, match="--device host"):
        prism_core.collect(PROGRAM, 6, tmp_path / "job.prism", rules=rules)


def test_collect_says_that_a_program_never_called_nccl(tmp_path: Path, fake_engine: type[fakes.FakeSession]) -> None:
    fake_engine.comms = []
    with pytest.raises(SessionError, match="never made a NCCL communicator"):
        prism_core.collect(PROGRAM, 16, tmp_path / "job.prism")
    assert prism_core.collect(PROGRAM, 1, tmp_path / "job.prism")["ranks_run"] == [0]


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> fakes.FakeGraph:
    import importlib

    graph = fakes.FakeGraph(
        64, meta={"device": "emulated:h100-sxm", "profile": "[node]\ngpus = 4\n[device]\nmemory_bytes = 85899345920\n"}
    )
    monkeypatch.setattr(importlib.import_module("prism_core.emulate"), "open_graph", lambda path: graph)
    return graph


def test_emulate_writes_the_same_bytes_twice(
    tmp_path: Path, graph: fakes.FakeGraph, fake_engine: type[fakes.FakeSession]
) -> None:
    program = ["sh", "-c", f"{fakes.CONNECT}; echo local $LOCAL_RANK"]
    written = []
    for _ in range(2):
        document = prism_core.emulate(program, "job.prism", [5, 0], tmp_path / "run", slow={42: 1.5}, echo=False)
        written.append((tmp_path / "run/summary.json").read_bytes())
    assert written[0] == written[1]
    summary, timing = read_run(tmp_path / "run")
    assert summary["sandbox"] == [0, 5] and summary["slow"] == {"42": 1.5} and summary["error"] is None
    assert "wall_ns" in timing and "wall_ns" not in summary
    assert document["iteration_time_ns"] == [2_000_000, 1_000_000]
    options = fake_engine.made[-1].options
    assert (options["mode"], options["live"], options["world_size"]) == ("emulate", [0, 5], 64)
    assert options["profile"] == graph.meta["profile"], "the device is the graph's own"
    assert (tmp_path / "run/logs/rank-5.log").read_text() == "local 1\n"
    text = emulate_text(document)
    assert "2.000 ms, 1.000 ms" in text and "modelled" in text and "75.0 %" in text
    assert (tmp_path / "run/report.html").read_text() == render(gather(tmp_path / "run"))


@pytest.mark.usefixtures("fake_engine", "graph")
def test_a_run_that_dies_keeps_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        prism_core.emulate(["sh", "-c", f"{fakes.CONNECT}; exit 42"], "job.prism", [5], tmp_path / "run", echo=False)
    assert caught.value.returncode == 42
    summary, _ = read_run(tmp_path / "run")
    assert summary["error"]["kind"] == "RankFailedError"
    assert (summary["error"]["rank"], summary["error"]["returncode"]) == (5, 42)
    assert summary["error"]["last_op"] == "all_reduce of 4 bf16"
    assert summary["ranks"][0]["rank"] == 5
    assert "exit code 42" in (tmp_path / "run/report.html").read_text()


@pytest.mark.usefixtures("fake_engine", "graph")
def test_emulate_refuses_what_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank 64 is outside the job: it has 64 ranks"):
        prism_core.emulate(PROGRAM, "job.prism", [64], tmp_path / "run")
    with pytest.raises(ConfigError, match=r"asked for 8 ranks, but job.prism is a graph of 64"):
        prism_core.emulate(["torchrun", "--nproc-per-node", "8", "x.py"], "job.prism", [0], tmp_path / "run")
    with pytest.raises(ConfigError, match="outside"):
        prism_core.emulate(PROGRAM, "job.prism", [0], tmp_path / "run", slow={64: 2.0})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        prism_core.emulate(PROGRAM, "job.prism", [0], tmp_path / "mine")
    assert (tmp_path / "mine/thesis.txt").exists()


def test_a_report_escapes_what_it_shows() -> None:
    summary = {
        "world_size": 2, "command": "<script>", "iteration_time_ns": [], "ranks": [], "ranks_materialised": 2,
        "device_time": {"by_provenance": {}, "by_class": {}}, "notes": ["a < b"], "store": [],
        "error": {"message": "<em>"},
    }  # fmt: skip
    page = render(gather_run(Path("<run>"), summary, {"overhead": None, "wall_ns": 1}))
    assert page.count("<script>") == 1 and "&lt;script&gt;" in page
    assert "<em>" not in page and "<run>" not in page and "a &lt; b" in page


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a run folder: cannot read summary.json"):
        read_run(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        read_run(tmp_path)
