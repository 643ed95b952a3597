"""Clocks of ranks that ran at different times, from the collectives they have in common, through a whole collection."""

from __future__ import annotations

import importlib
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import prism_core
import pytest
from prism_core import _native
from prism_core.errors import ConfigError
from prism_core.repeated import SliceSpeeds
from prism_core.report import collect_text, part_text

PROGRAM = ["sh", "-c", f"{fakes.CONNECT}; sleep 0.05"]
WORLD = 4
CALLS = 200
BEGIN_PS = 20_000_000_000_000
#: How stored recordings call their ops.
TRAINING_BEGIN, COLLECTIVE, BF16 = 11, 2, 9
#: Clocks of ranks against that of rank 0: what it is ahead when they read zero (ns), and how much faster it goes (ppm).
INJECTED = {0: (0, 0.0), 1: (10_000_000_000, 200.0), 2: (-10_000_000_000, -200.0), 3: (0, 200.0)}

Rate = Callable[[int], float]


def gaps() -> list[int]:
    """Host time before each collective on the clock of rank 0, ps."""
    source = random.Random(7)
    return [source.randrange(5_000_000_000, 15_000_000_000) for _ in range(CALLS)]


def stored(rank: int, offset_ns: int, rate: Rate) -> bytes:
    """A rank that reduces with all others; `rate` says by call how much faster the clock of rank 0 goes, ppm."""
    begin = round((BEGIN_PS - offset_ns * 1000) / (1 + rate(0) / 1e6))
    own = [round(gap / (1 + rate(call) / 1e6)) for call, gap in enumerate(gaps())]
    body = {
        "rank": rank, "world_size": WORLD, "names": [""], "groups": [], "meta": {},
        "comms": [{"origin": "explicit", "members": list(range(WORLD))}],
        "ops": [
            [begin, 0, TRAINING_BEGIN, 0, 0, 0, 0, 0, 0, 0],
            *([gap, 0, COLLECTIVE, 0, BF16, 0, 0, 0, 1 << 20, 0] for gap in own),
        ],
    }  # fmt: skip
    text = json.dumps(body).encode()
    return b"prism-recording-1 %08x\n" % zlib.crc32(text) + text


def times_ps(recording: Any) -> list[int]:
    """Host time that had passed before each op."""
    ops = json.loads(recording.to_bytes().split(b"\n", 1)[1])["ops"]
    passed = [0]
    for op in ops:
        passed.append(passed[-1] + op[0])
    return passed[1:]


@pytest.fixture
def collected(fake_engine: type[fakes.FakeSession], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Collects a job whose ranks have clocks of their own, with measured host time; summary and joined recordings."""
    joined: list[Any] = []
    engine = importlib.import_module("prism_core.collect")._native
    monkeypatch.setattr(engine, "Recording", _native.Recording)
    monkeypatch.setattr(engine, "influence_json", lambda *_: "null", raising=False)

    def assemble(world_size: int, recordings: list[Any], assignment: list[int], meta: str) -> Any:
        joined.extend(recordings)
        return _native.assemble(world_size, recordings, assignment, meta)

    monkeypatch.setattr(engine, "assemble", assemble)
    fake = fake_engine.recording

    def collect(rate_of: Callable[[int], Rate], *, ends: bool = False, **options: Any) -> tuple[Any, list[Any]]:
        def recording(self: fakes.FakeSession, rank: int) -> Any:
            data = stored(rank, INJECTED[rank][0], rate_of(rank))
            made = _native.Recording.from_bytes(data, fake(self, rank).info_json())
            if not ends:
                return made
            return made.with_ends([(op, time // 1000) for op, time in enumerate(times_ps(made)) if op])

        monkeypatch.setattr(fake_engine, "recording", recording)
        how = {"ranks": "all", "host_time": "measured", "jobs": 1, **options}
        return prism_core.collect(PROGRAM, WORLD, tmp_path / "job.prism", **how), joined

    return collect


def assert_recovered(slices: list[dict[str, Any]]) -> None:
    last_ns = (BEGIN_PS + sum(gaps())) / 1e3
    assert [entry["rank"] for entry in slices] == list(INJECTED)
    for entry in slices:
        offset_ns, drift_ppm = INJECTED[entry["rank"]]
        own = (last_ns - offset_ns) / (1 + drift_ppm / 1e6)
        assert entry["drift_ppm"] == pytest.approx(drift_ppm, abs=1e-3)
        assert entry["offset_ns"] == pytest.approx(offset_ns, abs=1000)
        assert own + entry["offset_ns"] + own * entry["drift_ppm"] / 1e6 == pytest.approx(last_ns, abs=1000)


def test_clocks_are_recovered_from_host_time_between_shared_collectives(collected: Any) -> None:
    summary, joined = collected(lambda rank: lambda _: INJECTED[rank][1])
    shared = summary["clocks"]["shared"]
    assert_recovered(shared["slices"])
    assert shared["seen"] == ["starts"] and shared["ties"] == WORLD * CALLS and shared["residual_ns"] < 1
    assert shared["applied"] == [1, 2, 3] and summary["clocks"]["by_rank"]["2"] == pytest.approx(-200, abs=1e-3)
    for recording in joined:
        times = times_ps(recording)
        assert times[-1] - times[0] == pytest.approx(sum(gaps()), abs=1e6), "within 1 us on the clock of rank 0"
    assert "800 of 4 ranks by host time between shared collectives" in collect_text(summary)
    assert "3 ranks brought by them" in collect_text(summary)


def test_clocks_are_recovered_from_ends_of_shared_collectives(collected: Any) -> None:
    summary, _ = collected(lambda rank: lambda _: INJECTED[rank][1], ends=True)
    shared = summary["clocks"]["shared"]
    assert_recovered(shared["slices"])
    assert shared["seen"] == ["ends"] and shared["ties"] == WORLD * CALLS and shared["residual_ns"] < 1
    assert shared["applied"] == [], "the graph's own clocks take care of it"
    graph = _native.Graph.open(summary["graph"])
    own = {entry["slice"]: entry for entry in json.loads(graph.meta["clocks"])["slices"]}
    assert own["1"]["offset_ns"] == pytest.approx(10e9, abs=1000)


def test_a_speed_that_changes_on_the_way_is_noise(collected: Any) -> None:
    summary, _ = collected(lambda rank: lambda call: 0.0 if rank == 0 else 5000.0 if call < CALLS / 2 else -4000.0)
    shared = summary["clocks"]["shared"]
    assert shared["applied"] == [] and shared["error_ppm"] == pytest.approx(4500, rel=0.1)
    assert set(summary["clocks"]["by_rank"].values()) == {0.0} and shared["residual_ns"] > 1000


def test_a_part_says_that_it_repeats_nothing(collected: Any) -> None:
    summary, _ = collected(lambda rank: lambda _: 0.0, part=(0, 2))
    assert summary["clocks"]["reason"].startswith("a part of the ranks runs once")
    assert "a part of the ranks runs once" in part_text(summary)


def test_ranks_that_wait_for_each_other_repeat_nothing(collected: Any) -> None:
    summary, _ = collected(lambda rank: lambda _: 0.0, exact=True, device="host:h100-sxm")
    assert summary["clocks"]["reason"] == "ranks waited for each other" and summary["clocks"]["repeated"] == []
    assert "host time as measured: ranks waited for each other" in collect_text(summary)


def test_without_common_collectives_there_are_no_ties() -> None:
    speeds = SliceSpeeds(share=lambda recordings, limit: "[]")
    assert speeds.tie({0: 0, 1: 1}) == []
    assert speeds.document([0, 1])["shared"]["ties"] == 0

    def refuse(recordings: Any, limit: int) -> str:
        raise ConfigError("the ends of the collectives of rank 1 are damaged")

    said = SliceSpeeds(share=refuse).tie({0: 0, 1: 1})
    assert said == [
        "the collectives that ranks share tell no clocks: the ends of the collectives of rank 1 are damaged"
    ]
