"""The first slice, run again at the end of a collection."""

from __future__ import annotations

import importlib
import json
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fakes
import prism_core
import pytest
from prism_core.errors import ConfigError
from prism_core.repeated import SliceSpeeds
from prism_core.report import clock_rows, collect_text

PROGRAM = ["sh", "-c", f"{fakes.CONNECT}; sleep 0.1"]

#: A rank that is not half way before three have begun: it waits for them, and then twice as long again.
TOGETHER = """began=$(date +%s%N); touch "$0/$RANK"
while [ "$(ls "$0" | wc -l)" -lt 3 ]; do sleep 0.01; done
sleep $(( ($(date +%s%N) - began) / 500000000 + 1 ))"""


def entry(rank: int, drift_ppm: float) -> dict[str, Any]:
    return {
        "slice": f"rank {rank} again", "offset_ns": 0.0, "drift_ppm": drift_ppm, "ties": 9, "set_aside": 0,
        "rms_ns": 1.0, "error_ns": 1.0,
    }  # fmt: skip


def test_the_drift_is_shared_out_by_when_ranks_ran() -> None:
    speeds = SliceSpeeds(solve=lambda first, again, limit: json.dumps(entry(first, {0: 990.0, 5: 1010.0}[first])))
    for rank, start in ((0, 0), (5, 4), (6, 20), (7, 40), (8, 200)):
        speeds.ran(rank, start, start + 10)
    assert speeds.to_repeat() == [0, 5], "those that ran beside the first"
    speeds.ran(0, 100, 110, again=True)
    speeds.ran(5, 104, 114, again=True)
    assert speeds.settle({0: 0, 5: 5}, {0: 0, 5: 5}) == []
    assert [speeds.drift_ppm(rank) for rank in (0, 5)] == [0.0, 0.0], "the reference stays"
    # First slice: middles at 5 and 9; its repetition: 105 and 109.
    assert speeds.drift_ppm(6) == pytest.approx(1000 * (25 - 7) / 100)
    assert speeds.drift_ppm(7) == pytest.approx(1000 * (45 - 7) / 100)
    assert speeds.drift_ppm(8) == pytest.approx(1000), "no further than the repetition"
    document = speeds.document([0, 6])
    assert document["drift_ppm"] == 1000 and document["repeated"] == [0, 5] and list(document["by_rank"]) == ["0", "6"]
    assert any("brought by +180 to +180 ppm" in text for _, text in clock_rows(document))


def test_a_repetition_that_is_none_is_said_and_changes_nothing() -> None:
    def refuse(first: Any, again: Any, limit: int) -> str:
        raise ConfigError("rank 0 did something else when it was run again: op 3")

    speeds = SliceSpeeds(solve=refuse)
    assert speeds.to_repeat() == []
    speeds.ran(0, 0, 10)
    speeds.ran(1, 10, 20)
    assert speeds.to_repeat() == [], "nothing ran after two of them"
    speeds.ran(2, 20, 30)
    assert speeds.to_repeat() == [0, 1]
    speeds.ran(0, 30, 40, again=True)
    assert speeds.settle({0: 0}, {0: 0}) == [
        "the speed of the machine is not known: rank 0 did something else when it was run again: op 3"
    ]
    assert speeds.drift_ppm(1) == 0.0 and speeds.document([0, 1])["drift_ppm"] is None
    assert [text for _, text in clock_rows(speeds.document([1]))] == [
        "host time as measured: the repeated slice tells nothing"
    ]


@pytest.mark.parametrize("drifts", [[5000.0], [-199788.0, 77431.0], [900.0, 1100.0], [100.0, -50.0, 20.0, 0.0]])
def test_what_repeated_ranks_do_not_agree_on_is_noise(drifts: list[float]) -> None:
    speeds = SliceSpeeds(solve=lambda first, again, limit: json.dumps(entry(first, drifts[first])))
    for rank in range(len(drifts) + 1):
        speeds.ran(rank, 10 * rank, 10 * rank + 10)
    for rank in range(len(drifts)):
        speeds.ran(rank, 100, 110, again=True)
    ranks = {rank: rank for rank in range(len(drifts))}
    assert speeds.settle(ranks, ranks) == []
    document = speeds.document([len(drifts)])
    assert document["drift_ppm"] == pytest.approx(sum(drifts) / len(drifts))
    assert not document["applied"] and speeds.drift_ppm(len(drifts)) == 0.0
    assert "within the noise" in list(clock_rows(document))[-1][1]


@dataclass
class TimedRecording(fakes.FakeRecording):
    drifts: list[float] = field(default_factory=list)

    def at_speed(self, drift_ppm: float) -> TimedRecording:
        self.drifts.append(drift_ppm)
        return self


@pytest.fixture
def timed_engine(fake_engine: type[fakes.FakeSession], monkeypatch: pytest.MonkeyPatch) -> type[fakes.FakeSession]:
    original = fake_engine.recording

    def recording(self: fakes.FakeSession, rank: int) -> TimedRecording:
        found = original(self, rank)
        return TimedRecording(found.rank, found.program, found.info)

    monkeypatch.setattr(fake_engine, "recording", recording)
    engine = importlib.import_module("prism_core.collect")._native
    monkeypatch.setattr(engine, "influence_json", lambda *_: json.dumps(None), raising=False)

    def solve(first: Any, again: Any, limit: int) -> str:
        return json.dumps(entry(first.rank, -400.0 - first.rank / 4))

    stand_in = types.SimpleNamespace(repeated_clock_json=solve, shared_clocks_json=lambda *_: "[]")
    monkeypatch.setattr(importlib.import_module("prism_core.repeated"), "_native", stand_in)
    return fake_engine


def test_a_measured_collection_runs_its_first_slice_again(
    tmp_path: Path, timed_engine: type[fakes.FakeSession]
) -> None:
    how = {"ranks": "all", "host_time": "measured", "jobs": 1}
    summary = prism_core.collect(PROGRAM, 4, tmp_path / "job.prism", **how)
    assert [session.options["live"] for session in timed_engine.made] == [[0], [1], [2], [3], [0], [1]]
    clocks = summary["clocks"]
    assert clocks["repeated"] == [0, 1] and clocks["applied"] and clocks["drift_ppm"] == pytest.approx(-400.125)
    by_rank = clocks["by_rank"]
    assert by_rank["0"] == by_rank["1"] == 0.0 and -400 < by_rank["3"] < by_rank["2"] < 0
    assert summary["ranks_run"] == [0, 1, 2, 3] and summary["recordings"]["recordings"] == 4
    assert (tmp_path / "job.logs/again/rank-0.log").exists()
    assert "clock rank 0 again" in collect_text(summary)


def test_without_measured_times_nothing_runs_twice(tmp_path: Path, timed_engine: type[fakes.FakeSession]) -> None:
    summary = prism_core.collect(PROGRAM, 3, tmp_path / "job.prism", ranks="all", jobs=1)
    assert len(timed_engine.made) == 3 and "clocks" not in summary
    here = tmp_path / "here"
    here.mkdir()
    together = ["sh", "-c", f"{fakes.CONNECT}; {TOGETHER}", str(here)]
    summary = prism_core.collect(together, 3, tmp_path / "b.prism", ranks="all", jobs=3, host_time="measured")
    assert len(timed_engine.made) == 6 and summary["clocks"]["reason"] == "all ranks ran at once"
