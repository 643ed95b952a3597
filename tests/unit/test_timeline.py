"""Timelines for trace viewers: both formats say the same, and what replay says."""

from __future__ import annotations

import csv
import json
import os
import struct
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prism_core
import pytest
from prism_core import _native
from prism_core.errors import ConfigError
from prism_core.export import export_timeline
from prism_core.synthetic import transformer_step

RANKS = [0, 3, 9, 15]
TINY = """prism-graph 1
world 2
name "gemm"
comm 0-1
template "trainer"
  +1000000 s0 training_begin
  +0 s0 alloc 1000
  +5000000 s0 compute 100000000 Gemm Modelled "gemm"
  +5000000 s1 AllReduce c0 Float32 1024 Sum
  +0 s1 stream_sync
  +2000000 s0 free 400
  +0 s0 iteration_end
rank 0-1 template 0 comms 0
"""


@pytest.fixture(scope="module")
def graph() -> _native.Graph:
    """Two pipeline stages, tensor pairs, four replicas: 16 ranks."""
    return transformer_step(4, 2, 2, 3, 2)


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: numbers for varints and 64-bit words, bytes for the rest."""
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        match key & 7:
            case 0:
                yield key >> 3, varint()
            case 1:
                yield key >> 3, struct.unpack_from("<Q", message, at)[0]
                at += 8
            case 2:
                length = varint()
                yield key >> 3, message[at : at + length]
                at += length
            case other:
                raise AssertionError(f"wire type {other}")


def one(message: bytes, number: int) -> Any:
    return next((value for field, value in fields(message) if field == number), None)


class Perfetto:
    """What is in a file, by the field numbers of perfetto_trace.proto."""

    def __init__(self, content: bytes) -> None:
        packets = [value for field, value in fields(content) if field == 1]
        interned = one(packets[0], 12)
        self.names = {one(name, 1): one(name, 2).decode() for field, name in fields(interned) if field == 2}
        self.process_of: dict[int, str] = {}
        self.thread_of: dict[int, tuple[str, str]] = {}
        self.slices: list[tuple[str, str, str, int, int]] = []
        self.flows: dict[int, set[str]] = defaultdict(set)
        self.flow_sizes: Counter[int] = Counter()
        self.counters: list[tuple[str, int, int]] = []
        self.marks: list[tuple[str, str, int]] = []
        self.open_slices: dict[int, tuple[str, int]] = {}
        self.counter_of: dict[int, str] = {}
        for packet in packets:
            if track := one(packet, 60):
                self.add_track(track)
            if (event := one(packet, 11)) is not None:
                self.add_event(event, one(packet, 8))
        assert not self.open_slices

    def add_track(self, track: bytes) -> None:
        uuid, parent = one(track, 1), one(track, 5)
        if process := one(track, 3):
            self.process_of[uuid] = one(process, 6).decode()
        elif thread := one(track, 4):
            self.thread_of[uuid] = (self.process_of[parent], one(thread, 5).decode())
        else:
            self.counter_of[uuid] = self.process_of[parent]

    def add_event(self, event: bytes, time: int) -> None:
        uuid = one(event, 11)
        match one(event, 9):
            case 1:
                assert uuid not in self.open_slices, "slices of a track overlap"
                self.open_slices[uuid] = (self.names[one(event, 10)], time)
                if flow := one(event, 47):
                    self.flows[flow].add(self.thread_of[uuid][0])
                    self.flow_sizes[flow] += 1
            case 2:
                name, start = self.open_slices.pop(uuid)
                self.slices.append((*self.thread_of[uuid], name, start, time))
            case 3:
                self.marks.append((self.process_of[uuid], self.names[one(event, 10)], time))
            case 4:
                self.counters.append((self.counter_of[uuid], time, one(event, 30)))


def chrome(path: Path) -> tuple[list[tuple[str, str, str, int, int]], list[dict[str, Any]]]:
    events = json.loads(path.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [
        (
            processes[event["pid"]],
            threads[event["pid"], event["tid"]],
            event["name"],
            round(event["ts"] * 1_000),
            round((event["ts"] + event["dur"]) * 1_000),
        )
        for event in events
        if event["ph"] == "X"
    ]
    return slices, events


@pytest.fixture(scope="module")
def both(graph: _native.Graph, tmp_path_factory: pytest.TempPathFactory) -> tuple[Perfetto, Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("timeline")
    written = export_timeline(graph, folder / "job.pftrace", ranks=RANKS, slow={3: 1.5})
    assert (
        export_timeline(graph, folder / "job.json", "chrome", ranks=RANKS, slow={3: 1.5})["slices"] == written["slices"]
    )
    return Perfetto((folder / "job.pftrace").read_bytes()), folder / "job.json", written


def test_both_formats_say_the_same(both: tuple[Perfetto, Path, dict[str, Any]]) -> None:
    perfetto, path, written = both
    slices, _ = chrome(path)
    assert sorted(perfetto.slices) == sorted(slices)
    assert len(slices) == written["slices"]
    assert {process for process, *_ in slices} == {f"rank {rank}" for rank in RANKS}


def test_the_end_is_that_of_replay(graph: _native.Graph, both: tuple[Perfetto, Path, dict[str, Any]]) -> None:
    ends: dict[str, int] = {}
    for process, _, _, _, end in both[0].slices:
        ends[process] = max(ends.get(process, 0), end)
    job = prism_core.replay(graph, slow={3: 1.5})
    assert max(ends.values()) <= job.total_time_ns
    assert job.total_time_ns - max(ends.values()) < job.total_time_ns // 1_000


def test_slices_of_one_collective_are_connected(both: tuple[Perfetto, Path, dict[str, Any]]) -> None:
    """Ranks 0 and 3 differ in stage or place, so what they share are collectives of both, if any; 9 and 15 likewise."""
    perfetto, path, _ = both
    shared = Counter(tuple(sorted(ranks)) for ranks in perfetto.flows.values() if len(ranks) > 1)
    _, events = chrome(path)
    arrows = Counter(event["ph"] for event in events if event["ph"] in "sf")
    assert arrows["s"] == arrows["f"] == sum(count * (len(ranks) - 1) for ranks, count in shared.items())


def test_neighbours_meet(graph: _native.Graph, tmp_path: Path) -> None:
    """A tensor pair shares every collective of its communicator, at the same time for both."""
    export_timeline(graph, tmp_path / "pair.pftrace", ranks=[0, 1])
    perfetto = Perfetto((tmp_path / "pair.pftrace").read_bytes())
    assert any(ranks == {"rank 0", "rank 1"} for ranks in perfetto.flows.values())
    own = {rank: [s[1:] for s in perfetto.slices if s[0] == f"rank {rank}"] for rank in (0, 1)}
    assert own[0] == own[1]


def test_memory_and_iterations_are_shown(tmp_path: Path, tiny_job: _native.Graph) -> None:
    export_timeline(tiny_job, tmp_path / "tiny.pftrace")
    perfetto = Perfetto((tmp_path / "tiny.pftrace").read_bytes())
    assert {name for _, name, _ in perfetto.marks} == {"training begins", "iteration ends"}
    (end,) = {end for _, track, _, _, end in perfetto.slices if track == "stream 1"}
    own = [item[1:] for item in perfetto.slices if item[0] == "rank 1"]
    assert own == [
        ("host waits", "wait", 11_000, end),
        ("stream 0", "gemm", 6_000, 106_000),
        ("stream 1", "AllReduce", 11_000, end),
    ]
    assert perfetto.counters == [(f"rank {r}", t, b) for r in (0, 1) for t, b in ((1_000, 1_000), (end + 2_000, 600))]


@pytest.fixture
def tiny_job() -> _native.Graph:
    """Two ranks that allocate, compute, meet, wait and free."""
    return _native.Graph.from_text(TINY)


def test_bad_requests_name_what_is_wrong(graph: _native.Graph, tmp_path: Path) -> None:
    for arguments, message in [
        ({"ranks": [16]}, "16"),
        ({"ranks": []}, "no rank is named"),
        ({"format": "pdf"}, "format is 'pdf': it must be perfetto or chrome, csv or parquet"),
        ({"slow": {99: 2.0}}, "99"),
    ]:
        with pytest.raises(ConfigError, match=message):
            export_timeline(graph, tmp_path / "out", **arguments)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="cannot write"):
        export_timeline(graph, tmp_path / "no" / "out")


def test_from_the_command_line(prism: Callable[..., Any], graph: _native.Graph, tmp_path: Path) -> None:
    graph.save(str(tmp_path / "job.prism"))
    code, out, _ = prism("export", tmp_path / "job.prism", "--ranks", "0,1", "-o", tmp_path / "t.pftrace", "--json")
    assert code == 0
    assert json.loads(out)["ranks"] == 2


def unknown_fields(message: Any) -> list[str]:
    """Fields of a message and those in it that its schema does not have."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    found = [f"{message.DESCRIPTOR.full_name}: {field.field_number}" for field in UnknownFieldSet(message)]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in [value] if hasattr(value, "DESCRIPTOR") else value:
                found += unknown_fields(one)
    return found


def test_files_are_of_perfetto_s_own_schema(graph: _native.Graph, tmp_path: Path) -> None:
    """Parsed by the classes that Perfetto's package makes of perfetto_trace.proto; needs no binary."""
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", exc_type=ImportError)
    export_timeline(graph, tmp_path / "job.pftrace", ranks=RANKS)
    content = (tmp_path / "job.pftrace").read_bytes()
    trace = schema.Trace.FromString(content)
    assert unknown_fields(trace) == [] and trace.ByteSize() == len(content)
    kinds = Counter(packet.track_event.type for packet in trace.packet if packet.HasField("track_event"))
    event = schema.TrackEvent
    assert kinds[event.TYPE_SLICE_BEGIN] == kinds[event.TYPE_SLICE_END] > 0
    tracks = {packet.track_descriptor.uuid for packet in trace.packet if packet.HasField("track_descriptor")}
    assert {p.track_event.track_uuid for p in trace.packet if p.HasField("track_event")} <= tracks
    assert all(p.trusted_packet_sequence_id for p in trace.packet if p.HasField("track_event"))


def eight_ranks() -> _native.Graph:
    """Eight ranks on two nodes: memory comes and goes, tensor pairs and the world meet, neighbours send."""
    pairs = [f"comm {rank}-{rank + 1}" for rank in range(0, 8, 2)]
    body = """
  +1000000 s0 training_begin
  +0 s0 alloc 9007199254740993
  +5000000 s0 compute 100000000 Gemm Modelled "gemm"
  +5000000 s1 AllReduce c1 Float32 1024 Sum
  +0 s1 stream_sync
  +2000000 s0 free 9007199254740000
  +0 s0 alloc 70000
  +1000000 s2 AllGather c0 Float32 4096 Sum
  +0 s2 stream_sync
  +0 s0 iteration_end
"""
    text = ["prism-graph 1", "world 8", 'name "gemm"', "comm 0-7", *pairs, 'template "trainer"' + body.rstrip()]
    text += [f"rank {rank} template 0 comms 0 {rank // 2 + 1}" for rank in range(8)]
    return _native.Graph.from_text("\n".join(text) + "\n")


class TraceProcessor:
    """SQL on Perfetto's trace processor, whose binary `PRISM_TRACE_PROCESSOR` names."""

    def __init__(self, trace: Path) -> None:
        self.binary = os.environ.get("PRISM_TRACE_PROCESSOR", "")
        self.trace = trace
        if not self.binary:
            pytest.skip("PRISM_TRACE_PROCESSOR names no binary of Perfetto's trace processor")

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of an answer, with whole numbers as such."""
        script = self.trace.with_suffix(".sql")
        script.write_text(query + ";\n")
        command = [self.binary, "-q", str(script), str(self.trace)]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        lines = csv.reader(answer.splitlines())
        next(lines)
        return [tuple(int(cell) if cell.lstrip("-").isdigit() else cell for cell in line) for line in lines if line]


@pytest.mark.parametrize(("job", "ranks"), [("step", RANKS), ("eight", range(8)), ("far", [0, 4096, 8191])])
def test_the_trace_processor_reads_what_was_written(job: str, ranks: Any, graph: _native.Graph, tmp_path: Path) -> None:
    """Every slice, arrow, counter value and instant comes back by SQL, and nothing is complained of."""
    processor = TraceProcessor(tmp_path / "job.pftrace")
    if job != "step":
        graph = eight_ranks() if job == "eight" else transformer_step(512, 8, 2, 2, 1)
    written = export_timeline(graph, processor.trace, ranks=list(ranks), slow={ranks[1]: 1.5})
    perfetto = Perfetto(processor.trace.read_bytes())
    assert len(perfetto.slices) == written["slices"]

    assert processor.rows("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []
    owner = "join thread using (utid) join process using (upid)"
    slices = processor.rows(
        "select process.name, thread.name, slice.name, slice.ts, slice.ts + slice.dur from slice"
        f" join thread_track on slice.track_id = thread_track.id {owner}"
    )
    assert sorted(slices) == sorted(perfetto.slices)
    marks = processor.rows(
        "select process.name, slice.name, slice.ts from slice"
        " join process_track on slice.track_id = process_track.id join process using (upid)"
    )
    assert sorted(marks) == sorted(perfetto.marks)
    # Exact in a double up to 2^53; the counter is one.
    counters = processor.rows(
        "select process.name, counter.ts, cast(counter.value as int) from counter"
        " join process_counter_track on counter.track_id = process_counter_track.id join process using (upid)"
    )
    assert sorted(counters) == sorted((rank, ts, int(float(value))) for rank, ts, value in perfetto.counters)
    assert bool(counters) == (job == "eight")
    [(arrows,)] = processor.rows("select count(*) from flow")
    assert arrows == sum(count - 1 for count in perfetto.flow_sizes.values()) and arrows > 0
    ends = "select s.name, d.name, s.track_id = d.track_id from flow"
    ends += " join slice s on flow.slice_out = s.id join slice d on flow.slice_in = d.id"
    for start, end, is_own in processor.rows(ends):
        assert not is_own and (start == end or {start, end} == {"Send", "Recv"}), "arrows join tracks within one op"
