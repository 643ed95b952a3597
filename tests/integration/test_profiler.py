"""An unmodified program under `torch.profiler`: its trace has the device's timeline, in virtual time."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    layer = torch.nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    batch = torch.ones(64, 512, dtype=torch.bfloat16).pin_memory()
    for _ in range(3):
        data = batch.to("cuda", non_blocking=True)
        layer(data).float().sum().backward()
        dist.all_reduce(layer.weight.grad, async_op=True).wait()
        with torch.cuda.stream(side):
            torch.zeros(1 << 20, device="cuda").add_(1)
    torch.cuda.synchronize()
profiler.export_chrome_trace(sys.argv[1])
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def run(
    prism: Callable[..., Any], torch_program: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Events of the trace that a sandbox rank wrote, and what the engine says of the rank."""
    folder = tmp_path_factory.mktemp("profiled")
    script, graph, trace = folder / "program.py", folder / "job.prism", folder / "trace.json"
    script.write_text(PROGRAM)
    program = [sys.executable, script, trace]
    assert prism("collect", "--world-size", 2, "--ranks", "0", "--verify", 0, "-o", graph, "--", *program).document
    summary = prism("emulate", graph, "--sandbox", "0", "-o", folder / "run", "--", *program).document
    return json.loads(trace.read_text())["traceEvents"], summary["ranks"][0]


def of(events: list[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    """Events of these categories in order of time."""
    return sorted((event for event in events if event.get("cat") in categories), key=lambda event: event["ts"])


def ns(microseconds: float) -> int:
    """Whole nanoseconds."""
    return round(microseconds * 1000)


def test_the_device_s_work_is_there(run: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    events, _ = run
    names = [event["name"] for event in of(events, "kernel")]
    assert sum("ncclDevKernel_AllReduce_Sum_bf16" in name for name in names) == 3
    assert any("vectorized_elementwise_kernel<" in name for name in names), "names are demangled"
    assert any("emm" in name for name in names)
    copies = of(events, "gpu_memcpy")
    assert len(copies) == 3 and all("HtoD" in copy["name"] for copy in copies)
    assert all(copy["args"]["bytes"] == 64 * 512 * 2 for copy in copies)


def test_durations_are_the_engine_s(run: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    events, rank = run
    work = of(events, "kernel", "gpu_memcpy", "gpu_memset")
    computing = sum(ns(event["dur"]) for event in work if "nccl" not in event["name"])
    communicating = sum(ns(event["dur"]) for event in work if "nccl" in event["name"])
    told = sum(rank["device_time"]["by_class"].values())
    assert computing == pytest.approx(told, abs=2 * len(work)), "to the rounding of start and end"
    assert communicating == pytest.approx(rank["device_time"]["communication"], abs=8)


def test_work_runs_on_its_stream_one_after_the_other(run: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    events, _ = run
    streams: dict[int, list[dict[str, Any]]] = {}
    for event in of(events, "kernel", "gpu_memcpy", "gpu_memset"):
        streams.setdefault(event["args"]["stream"], []).append(event)
    assert len(streams) == 3, "compute, communication and the side stream"
    for work in streams.values():
        for before, after in itertools.pairwise(work):
            assert ns(before["ts"]) + ns(before["dur"]) <= ns(after["ts"]) + 1
    fills = [event for event in of(events, "kernel") if "FillFunctor<float>" in event["name"]]
    assert {event["args"]["stream"] for event in fills} & (set(streams) - {7}), "zeros() on the side stream"


def test_launches_and_work_are_tied(run: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    events, _ = run
    calls = {event["args"]["correlation"]: event for event in of(events, "cuda_runtime")}
    operators = {event["args"].get("External id"): event for event in of(events, "cpu_op")}
    work = of(events, "kernel", "gpu_memcpy", "gpu_memset")
    assert len({event["args"]["correlation"] for event in work}) == len(work)
    for event in work:
        call = calls[event["args"]["correlation"]]
        assert ns(event["ts"]) >= ns(call["ts"] + call["dur"]) - 1, "nothing runs before it is launched"
    for kernel in of(events, "kernel"):
        call, operator = calls[kernel["args"]["correlation"]], operators.get(kernel["args"].get("External id"))
        if operator is not None and operator["tid"] == call["tid"]:
            assert ns(operator["ts"]) <= ns(call["ts"]) and ns(call["ts"]) <= ns(operator["ts"] + operator["dur"]) + 1
    reduce = next(event for event in of(events, "kernel") if "AllReduce" in event["name"])
    assert reduce["args"]["Collective name"] == "allreduce" and reduce["args"]["Group size"] == 2
    assert reduce["args"]["In msg nelems"] == 512 * 256
