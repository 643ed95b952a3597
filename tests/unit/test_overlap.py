"""Factors of overlap from kernels that were measured alone and beside communication."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import prism_core
import pytest
from prism_core import cli
from prism_core.errors import ConfigError
from prism_core.overlap import Pair, calibrate_overlap, pairs_of_trace, read_pairs

PAIRS = [
    {"class": "gemm", "name": "large", "alone_ns": [1000, 900, 1100], "beside_ns": [1200, 1150, 5000]},
    {"class": "gemm", "name": "small", "alone_ns": 100, "beside_ns": 160},
    {"class": "kernel", "alone_ns": 50.0, "beside_ns": 49.0},
]


def test_long_kernels_count_more_and_noise_is_no_speed_up(tmp_path: Path) -> None:
    source, table = tmp_path / "pairs.json", tmp_path / "overlap.toml"
    source.write_text(json.dumps(PAIRS))
    document = calibrate_overlap([source], table)
    assert document["overlap"] == {
        "gemm": {"factor": round(1360 / 1100, 6), "pairs": 2, "lowest": 1.2, "highest": 1.6},
        "kernel": {"factor": 1.0, "pairs": 1, "lowest": 0.98, "highest": 0.98},
    }
    # A computation on one stream while another one is in a collective takes as much longer.
    text = """prism-graph 1
world 2
name "gemm"
comm 0-1
template "t"
  +0 s0 training_begin
  +0 s1 AllReduce c0 Float32 1000000000 Sum
  +0 s0 compute 1000000000 Gemm Measured "gemm"
  +0 s0 iteration_end
rank 0-1 template 0 comms 0
"""
    graph = prism_core.Graph.from_text(text)
    alone = prism_core.replay(graph, contention="fair-share").iteration_time_ns
    beside = prism_core.replay(graph, contention="fair-share", overlap=table)
    assert beside.iteration_time_ns[0] / alone[0] == pytest.approx(1360 / 1100, rel=1e-5)
    assert beside.traffic["overlap"]["provenance"] == "measured"


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    source, table = tmp_path / "pairs.json", tmp_path / "overlap.toml"
    source.write_text(json.dumps(PAIRS))
    monkeypatch.setattr(sys, "argv", ["prism", "calibrate", "overlap", str(source), "-o", str(table)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    assert "gemm      1.236  (1.200 to 1.600 in 2 pairs)" in capfd.readouterr().out
    assert 'provenance = "measured"\ngemm = 1.236364' in table.read_text()


def event(name: str, start: float, length: float, category: str = "kernel", **arguments: object) -> dict[str, object]:
    grid = {"device": 0, "grid": [8, 1, 1], "block": [128, 1, 1], **arguments}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": grid}


def test_a_trace_has_pairs_where_kernels_meet_communication(tmp_path: Path) -> None:
    events = [{"ph": "M", "name": "process_name"}, "no event"]
    for start in (0, 1000, 2000):
        events += [event("ampere_bf16_gemm", start, 100), event("norm", start + 100, 10)]
        # Two communication kernels in a row, and a product under both of them; the next one only half under the second.
        events += [event("ncclDevKernel_AllReduce", start + 500, 60), event("ncclDevKernel_AllReduce", start + 560, 80)]
        events += [event("ampere_bf16_gemm", start + 505, 120), event("ampere_bf16_gemm", start + 625, 30)]
        events += [event("norm", start + 510, 12, grid=[9, 1, 1]), event("Memcpy DtoD", start + 505, 9, "gpu_memcpy")]
        # On another device nobody communicates.
        events += [
            event("Memcpy DtoD", start + 505, 6, "gpu_memcpy", device=1),
            event("norm", start + 510, 11, device=1),
        ]
    pairs = pairs_of_trace({"traceEvents": events})
    assert pairs == [
        Pair("gemm", "ampere_bf16_gemm", 100e3, 120e3),
        Pair("memcpy", "Memcpy DtoD", 6e3, 9e3),
    ], "another launch of norm is other work"
    trace, table = tmp_path / "trace.json.gz", tmp_path / "overlap.toml"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert calibrate_overlap([trace], table)["overlap"]["gemm"]["factor"] == 1.2
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events[:20]}).encode()))
    with pytest.raises(ConfigError, match="no kernel ran 3 times alone and 3 times beside communication"):
        calibrate_overlap([trace], table)
    with pytest.raises(ConfigError, match="cannot read"):
        calibrate_overlap([tmp_path / "absent.json"], table)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "must be a list"),
        ("[]", "must be a list"),
        ("[", "no file of pairs"),
        ("[3]", "entry 0: it is no object"),
        ('[{"class": "conv", "alone_ns": 1, "beside_ns": 1}]', "entry 0: class is 'conv': it must be one of gemm,"),
        ('[{"class": "gemm", "alone_ns": 0, "beside_ns": 1}]', "entry 0: alone_ns is 0: it must be a positive number"),
        ('[{"class": "gemm", "alone_ns": 1}]', "beside_ns is None"),
        ('[{"class": "gemm", "alone_ns": 1, "beside_ns": [true]}]', "beside_ns is True"),
        ('[{"class": "gemm", "alone_ns": [], "beside_ns": 1}]', "alone_ns has no times"),
        ('[{"class": "gemm", "alone_ns": NaN, "beside_ns": 1}]', "alone_ns is nan"),
    ],
)
def test_what_is_no_file_of_pairs_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_pairs(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_pairs(tmp_path / "absent.json")
