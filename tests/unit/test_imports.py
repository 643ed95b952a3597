"""Traces of other tools: commands, texts, errors, and the guide's commands."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import prism_core
import pytest
from prism_core import ConfigError
from prism_core.export import export_chakra, export_timeline
from prism_core.imports import calibrate_comm, import_chakra, import_kineto, import_simai
from prism_core.imports.network import calibrate_text

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "traces.md"


def trace(rank: int, late_us: float, iterations: int = 2) -> dict[str, Any]:
    """A rank that computes and reduces; the last to come decides when the reduction ends."""
    told = {
        "Collective name": "allreduce",
        "In msg nelems": 1 << 20,
        "Out msg nelems": 1 << 20,
        "dtype": "Float",
        "Group size": 2,
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]",
    }
    events: list[dict[str, Any]] = []
    for iteration in range(iterations):
        start = 1000.0 * iteration
        kernels = [
            ("gemm", 7, start + 10, start + 20, 400 + late_us, {}),
            ("ncclDevKernel_AllReduce(x)", 20, start + 30, start + 420 + late_us, 280 - late_us, told),
        ]
        step = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, "args": {}}
        events.append({**step, "name": f"ProfilerStep#{iteration}", "ts": start, "dur": 1000})
        for number, (name, stream, launch, begin, duration, more) in enumerate(kernels):
            correlation = 10 * iteration + number + 1
            call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
            events.append({**call, "ts": launch, "dur": 2, "args": {"correlation": correlation}})
            args = {"device": 0, "stream": stream, "correlation": correlation, **more}
            kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream}
            events.append({**kernel, "ts": begin, "dur": duration, "args": args})
    return {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}


CALLS = """[rank0 ~ rank15]
comm_type,comm_group,comm_group_size,msg_size,stage,_elapsed_time
CommType.all_to_all,CommGroup.ep_group,None,1048576,forward.MoE,None
CommType.all_reduce,CommGroup.dp_group,8,1048576,backward,None
CommType.all_reduce,CommGroup.tp_group,2,1048576,backward,None
CommType.epoch_end,None,None,0,,None
"""
WORKLOAD = """HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 8 checkpoints: 0 checkpoint_initiates: 0
2
attention\t-1\t752000\tALLREDUCE\t20971520\t752000\tALLREDUCE\t20971520\t752000\tNONE\t0\t100
mlp\t-1\t750000\tALLREDUCE\t20971520\t750000\tALLREDUCE\t20971520\t750000\tREDUCESCATTER\t1048576\t100
"""


def nccl_tests() -> str:
    """Output of nccl-tests on one node of eight GPUs that reach 300 GB/s of bus bandwidth after 30 us."""
    lines = ["# Collective test starting: all_reduce_perf"]
    lines += [f"#  Rank  {rank} Group  0 Pid  {rank} on  node0 device  {rank} [0x18] NVIDIA" for rank in range(8)]
    lines.append("#       size         count      type   redop    root     time   algbw   busbw #wrong")
    for power in range(20, 31):
        size = 1 << power
        time_us = 30 + size * 2 * 7 / 8 / 300e3
        lines.append(f"{size:12} {size // 4:12} float sum -1 {time_us:8.2f} 1.0 1.0 0")
    return "\n".join(lines) + "\n"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(2):
        (folder / f"rank{rank}.json").write_text(json.dumps(trace(rank, 100.0 * rank)))
    return folder


def test_imported_traces_replay_as_recorded_and_with_a_slower_rank(traces: Path) -> None:
    graph, account = import_kineto(traces)
    assert account["recorded_iteration_time_ns"] == account["replayed_iteration_time_ns"]
    assert account["worst_error"] == 0.0
    assert account["collectives"] == {"kernels": 4, "matched": 2, "inferred": 0, "used_kernels": 4, "unmatched": 0}
    assert [late["rank"] for late in account["late"]] == [1, 1]
    healthy = prism_core.replay(graph).iteration_time_ns
    assert healthy == account["replayed_iteration_time_ns"]
    slower = prism_core.replay(graph, slow={1: 3.0}).iteration_time_ns
    assert sum(slower) > sum(healthy) + 500_000


def test_the_command_prints_text_and_json(prism: Any, traces: Path, tmp_path: Path) -> None:
    output = tmp_path / "job.prism"
    code, out, _ = prism("import", "kineto", str(traces), "-o", str(output))
    assert code == 0 and "matched 2, inferred 0, unmatched 0" in out and "worst error 0.000 %" in out
    code, out, _ = prism("import", "kineto", str(traces), "-o", str(output), "--json")
    document = json.loads(out)
    assert code == 0 and document["world_size"] == 2 and document["graph_bytes"] == output.stat().st_size


def test_bad_input_is_an_error_with_a_way_out(prism: Any, traces: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="no file in"):
        import_kineto(empty)
    with pytest.raises(ConfigError, match="no trace is named"):
        import_kineto([])
    with pytest.raises(OSError, match="cannot read"):
        import_kineto(tmp_path / "nowhere.json")
    text = tmp_path / "text.json"
    text.write_text("this is no JSON")
    with pytest.raises(ConfigError, match="is not a profiler trace"):
        import_kineto(text)
    with pytest.raises(ConfigError, match="neither a device profile"):
        import_kineto(traces, profile="h900")
    with pytest.raises(ConfigError, match=r"rank1.json.* both claim rank 0"):
        import_kineto(traces, ranks={"rank1.json": 0})
    code, out, err = prism("import", "kineto", str(traces), "-o", str(tmp_path / "x"), "--rank", "rank1.json", "--json")
    assert code == 1 and json.loads(out)["error"]["kind"] == "ConfigError" and "FILE=RANK" in err


def test_commands_of_the_guide_run(prism: Any, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(traces.parent)
    Path("workload.txt").write_text(WORKLOAD)
    Path("all_reduce_8.log").write_text(nccl_tests())
    Path("calls.csv").write_text(CALLS)
    Path("et").mkdir()
    Path("et/rank0.json").write_text('{"schema": "1.1.0", "pid": 1, "nodes": [{"id": 1, "name": "root"}]}')
    blocks = re.findall(r"```\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("prism ")]
    assert len(commands) >= 5
    for command in commands:
        code, _, err = prism(*command[1:])
        assert code == 0, (command, err)


def test_calibration_tells_its_error(tmp_path: Path) -> None:
    log = tmp_path / "all_reduce_8.log"
    log.write_text(nccl_tests())
    document = calibrate_comm(log, tmp_path / "site.toml")
    assert document["rows"] == 11 and document["left_out_by"] == "every fifth row"
    assert document["fitted"]["median"] < 0.1 and document["fitted"]["median"] <= document["before"]["median"]
    assert (tmp_path / "site.toml").read_text() == document["profile_toml"]
    said = calibrate_text(document)
    assert f"launch: {document['factors']['launch_us']:+.1f} us" in said and "nvlink bandwidth: x " in said
    assert "error of rows left out (by every fifth row): median " in said
    with pytest.raises(ConfigError, match="must be such as all_reduce"):
        calibrate_comm(log, collective="gossip")


def test_chakra_there_and_back(traces: Path, tmp_path: Path) -> None:
    graph, _ = import_kineto(traces)
    written = export_chakra(graph, tmp_path / "job")
    profile = tmp_path / "network.toml"
    profile.write_text(graph.meta["profile"])
    back, account = import_chakra(
        [tmp_path / "job.0.et", tmp_path / "job.1.et"], groups=tmp_path / "job.groups.json", profile=str(profile)
    )
    assert account["nodes"] == written["nodes"] and account["used_communications"] == written["communications"] == 4
    there, again = prism_core.replay(graph).iteration_time_ns, prism_core.replay(back).iteration_time_ns
    assert len(there) == len(again) and all(abs(a - b) <= 100 for a, b in zip(there, again, strict=True))


def test_a_workload_replays(prism: Any, tmp_path: Path) -> None:
    source = tmp_path / "workload.txt"
    source.write_text(WORKLOAD)
    graph, account = import_simai(source, world_size=16, iterations=2)
    assert account["degrees"] == [8, 1, 2] and account["collectives"] == 5
    assert min(prism_core.replay(graph).iteration_time_ns) > 4_506_000
    code, out, err = prism("import", "simai", str(source), "-o", str(tmp_path / "x"), "--json")
    assert code == 1 and "--world-size" in json.loads(out)["error"]["message"] and err


def test_a_table_has_a_row_per_op(prism: Any, traces: Path, tmp_path: Path) -> None:
    graph, _ = import_kineto(traces)
    document = export_timeline(graph, tmp_path / "t.csv", "csv")
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == document["slices"]
    calls = [row for row in rows if row["kind"] == "communication"]
    assert [(row["rank"], row["members"], row["bytes"]) for row in calls] == [
        (str(rank), "2", str(4 << 20)) for rank in (0, 0, 1, 1)
    ]
    for row in rows:
        assert int(row["end_ns"]) - int(row["start_ns"]) == int(row["duration_ns"]) >= 0
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(ConfigError, match="pip install pyarrow"):
            export_timeline(graph, tmp_path / "t.parquet", "parquet")
    else:
        table = importlib.import_module("pyarrow.parquet")
        export_timeline(graph, tmp_path / "t.parquet", "parquet")
        assert table.read_table(tmp_path / "t.parquet").num_rows == len(rows)


def test_another_network_can_be_asked_for(traces: Path) -> None:
    graph, _ = import_kineto(traces)
    slow = graph.meta["profile"].replace("nvlink_bytes_per_s = ", "nvlink_bytes_per_s = 1 # ")
    path = traces / "slow.toml"
    path.write_text(slow.replace("1 # ", "20000000 # "))
    assert sum(prism_core.replay(graph, profile=str(path)).iteration_time_ns) > 100_000_000
    with pytest.raises(ConfigError, match="neither a device profile"):
        prism_core.replay(graph, profile="h900")
