"""Slices, finished ranks on disk, and collections that go on where they were cut short."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import prism_core
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prism_core import slicing
from prism_core.errors import ConfigError, RankFailedError, SessionError
from prism_core.parts import OP_BYTES, KeptRecording, Part, PartFolder, RecordingShelf
from prism_core.report import part_text

#: Connects, says that it ran, and dies where a file says so.
PROGRAM = ["sh", "-c", f'{fakes.CONNECT}; echo $RANK >> "$PLACE/ran"; test ! -e "$PLACE/die-$RANK"']


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLACE", str(tmp_path))
    return tmp_path


def ran(place: Path) -> list[int]:
    """Ranks that ran since the last look, in the order of their ends."""
    path = place / "ran"
    lines = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return [int(line) for line in lines]


def collect(place: Path, **options: Any) -> dict[str, Any]:
    options = {"ranks": "all", "jobs": 1, "fork_server": False} | options
    return prism_core.collect(PROGRAM, 6, place / "job.prism", **options)


@pytest.mark.usefixtures("fake_engine")
def test_any_slice_size_and_order_gives_the_same_graph(place: Path) -> None:
    graphs = set()
    for size, order in [(1, "ascending"), (1, "descending"), (2, "random"), (6, "ascending")]:
        summary = collect(place, slice_size=size, slice_order=order, seed=1)
        graphs.add((place / "job.prism").read_text())
        order_run = ran(place)
        assert sorted(order_run) == summary["ranks_run"] == list(range(6))
        if size == 1:
            assert order_run == slicing.in_order(range(6), order, 1)
        assert not (place / "job.prism.parts").exists(), "of a complete collection nothing is left"
    assert len(graphs) == 1
    with pytest.raises(ConfigError, match="ascending, descending, random"):
        collect(place, slice_order="odd")


@pytest.mark.usefixtures("fake_engine")
def test_a_rank_that_dies_is_named_and_the_others_are_not_run_again(place: Path) -> None:
    (place / "die-3").touch()
    with pytest.raises(RankFailedError, match="rank 3 ended with exit code 1"):
        collect(place)
    assert ran(place) == [0, 1, 2, 3]
    (place / "die-3").unlink()
    summary = collect(place)
    assert ran(place) == [3, 4, 5]
    assert summary["ranks_run"] == list(range(6)) and summary["ranks_resumed"] == [0, 1, 2]
    assert summary["recordings"]["disk_bytes"] > 0 and summary["seed"] == 0


@pytest.mark.usefixtures("fake_engine")
def test_another_collection_is_refused_and_forgotten_on_request(place: Path) -> None:
    (place / "die-3").touch()
    with pytest.raises(RankFailedError):
        collect(place)
    for options, name in [({"device": "emulated:a100-sxm"}, "device"), ({"host_time": "measured"}, "host time")]:
        with pytest.raises(ConfigError, match=f"another collection: .*{name} .* differs; start over with --fresh"):
            collect(place, **options)
    (place / "die-3").unlink()
    ran(place)
    assert collect(place, fresh=True)["ranks_resumed"] == []
    assert ran(place) == list(range(6))


@pytest.mark.usefixtures("fake_engine")
def test_a_damaged_part_is_run_again(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    (place / "die-3").touch()
    with pytest.raises(RankFailedError):
        collect(place)
    part = place / "job.prism.parts/rank-000001.part"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    (place / "die-3").unlink()
    ran(place)
    assert collect(place)["ranks_resumed"] == [0, 2]
    assert ran(place) == [1, 3, 4, 5]
    assert "rank-000001.part is run again: its checksum differs" in caplog.text


@pytest.mark.usefixtures("fake_engine")
def test_a_full_disk_is_said_and_finished_ranks_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync
    calls = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 4:  # the key, two ranks, and then
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SessionError, match=r"recording of rank 2 .*No space left on device: make room"):
        collect(place)
    assert sorted(path.name for path in (place / "job.prism.parts").iterdir()) == [
        "collection.json", "rank-000000.part", "rank-000001.part",
    ]  # fmt: skip
    assert collect(place)["ranks_resumed"] == [0, 1]


@pytest.mark.usefixtures("fake_engine")
def test_shares_of_the_ranks_are_assembled(place: Path) -> None:
    for index in (0, 1):
        summary = collect(place, part=(index, 2))
        assert summary["ranks_run"] == [index, index + 2, index + 4] == ran(place)
        assert summary["part"] == f"{index + 1}/2" and "kept in" in part_text(summary)
        assert not (place / "job.prism").exists()
    assert collect(place)["ranks_resumed"] == list(range(6)) and ran(place) == []
    with pytest.raises(ConfigError, match="--part needs --ranks all"):
        collect(place, part=(0, 2), ranks="auto")
    assert slicing.parse_part("3/16") == (2, 16)
    for bad in ("0/2", "3/2", "x", "1/", "-1/2"):
        with pytest.raises(ConfigError, match="write I/N"):
            slicing.parse_part(bad)


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
import fakes, importlib, types
from prism_core.config import CollectConfig
collect, launch = (importlib.import_module(f"prism_core.{name}") for name in ("collect", "launch"))
engine = types.SimpleNamespace(Session=fakes.FakeSession, Recording=fakes.FakeRecording, build_info=dict)
collect._native, launch.check_shims = engine, lambda **_: []
command = ["sh", "-c", fakes.CONNECT + '; test $RANK -lt 2 || sleep 30']
from pathlib import Path
collect.collect(CollectConfig(command=command, world_size=6, output=Path(sys.argv[2]), ranks="all", jobs=1))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_is_finished_survives_an_interruption(place: Path, number: int) -> None:
    output = place / "job.prism"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(Path(fakes.__file__).parent), str(output)], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (place / "job.prism.parts/rank-000001.part").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(number)
    assert child.wait() != 0
    folder = PartFolder(place / "job.prism.parts", json.loads((place / "job.prism.parts/collection.json").read_text()))
    assert folder.ranks() == [0, 1]
    part = folder.read(1)
    assert part is not None and json.loads(part.info)["iterations"] == 2


def shelf(folder: Path, memory_bytes: int) -> RecordingShelf:
    return RecordingShelf(PartFolder(folder, {"a": "1"}), fakes.FakeRecording.from_bytes, memory_bytes)


def test_recordings_beyond_the_limit_are_read_from_disk(tmp_path: Path) -> None:
    kept = shelf(tmp_path / "parts", memory_bytes=2 * 7 * OP_BYTES)
    recordings = [fakes.FakeRecording(rank, f"program {rank % 2}", {"rank": rank}) for rank in range(5)]

    def part_of(recording: fakes.FakeRecording) -> Callable[[], Part]:
        return lambda: Part(recording.rank, 1, False, recording.info_json(), {}, [], recording.to_bytes())

    handles = [kept.put(recording, part_of(recording)) for recording in recordings]
    assert [handle.recording() for handle in handles] == recordings
    assert handles[0].digest() == handles[2].digest() and handles[0].difference(handles[1]) == "op 3 differs"
    figures = kept.figures()
    assert figures["recordings"] == 5 and figures["memory_bytes"] == 2 * 7 * OP_BYTES and figures["read_again"] >= 5
    assert figures["disk_bytes"] == sum(path.stat().st_size for path in (tmp_path / "parts").glob("rank-*.part"))
    (tmp_path / "parts/rank-000002.part").unlink()
    with pytest.raises(SessionError, match="recording of rank 2 is gone"):
        handles[2].recording()


def test_ranks_are_as_far_apart_as_programs_or_peaks_of_memory(tmp_path: Path) -> None:
    kept = RecordingShelf(None, fakes.FakeRecording.from_bytes)

    def put(rank: int, num_ops: int = 7, **peaks: int | None) -> KeptRecording:
        return kept.put(fakes.FakeRecording(rank, "a", {"rank": rank, **peaks}, num_ops), None)

    usual = put(0, peak_allocated_bytes=1 << 30, peak_device_bytes=None)
    assert usual.distance_ppm(put(1, peak_allocated_bytes=1 << 30)) == 40
    assert usual.distance_ppm(put(2, peak_allocated_bytes=(1 << 30) - (1 << 20))) == 977
    assert usual.distance_ppm(put(3, num_ops=8, peak_allocated_bytes=1 << 30)) is None


@given(
    st.builds(
        Part,
        rank=st.integers(0, 9999),
        batch=st.integers(1, 9),
        summoned=st.booleans(),
        info=st.text(),
        said=st.dictionaries(st.binary(), st.binary(), max_size=4),
        store=st.lists(st.fixed_dictionaries({"rule": st.text(), "key": st.text()}), max_size=2),
        recording=st.binary(),
    ),
    st.data(),
)
def test_a_part_comes_back_as_it_was_or_not_at_all(part: Part, data: st.DataObject) -> None:
    stored = part.to_bytes()
    assert Part.from_bytes(stored) == part
    at = data.draw(st.integers(0, len(stored) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match=r"checksum|not a rank's part"):
        Part.from_bytes(stored[:at] + bytes([stored[at] ^ bit]) + stored[at + 1 :])
    with pytest.raises(ValueError, match=r"checksum|not a rank's part"):
        Part.from_bytes(stored[:at])
