"""Traces of other tools: commands, texts, errors, and the guide's commands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import prism_core
import pytest
from prism_core import ConfigError
from prism_core.imports import import_kineto

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
    with pytest.raises(ConfigError, match="neither built in"):
        import_kineto(traces, profile="h900")
    with pytest.raises(ConfigError, match=r"rank1.json.* both claim rank 0"):
        import_kineto(traces, ranks={"rank1.json": 0})
    code, out, err = prism("import", "kineto", str(traces), "-o", str(tmp_path / "x"), "--rank", "rank1.json", "--json")
    assert code == 1 and json.loads(out)["error"]["kind"] == "ConfigError" and "FILE=RANK" in err


def test_commands_of_the_guide_run(prism: Any, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(traces.parent)
    blocks = re.findall(r"```\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("prism ")]
    assert len(commands) >= 5
    for command in commands:
        code, _, err = prism(*command[1:])
        assert code == 0, (command, err)
