"""Kernel tables from traces."""

from __future__ import annotations

import gzip
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from prism_core.calibrate import Sizes, calibrate_compute, products
from prism_core.errors import ConfigError
from prism_core.kernels import collect_samples, import_kineto_kernels, plain_name, read_tables

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"


def event(category: str, name: str, ts: float, dur: float, **arguments: Any) -> dict[str, Any]:
    """A complete event of thread 1."""
    return {"ph": "X", "cat": category, "name": name, "tid": 1, "ts": ts, "dur": dur, "args": arguments}


def kernel(name: str, correlation: int, dur: float, grid: list[int], block: list[int]) -> dict[str, Any]:
    """A kernel on device 0."""
    launch = {"correlation": correlation, "grid": grid, "block": block, "device": 0}
    return event("kernel", name, 100 + correlation, dur, **launch)


def trace(tmp_path: Path, *events: dict[str, Any], device: str = "NVIDIA H100 80GB HBM3") -> Path:
    """A gzipped trace of one device."""
    path = tmp_path / f"{device.replace(' ', '-')}.json.gz"
    document = {"deviceProperties": [{"id": 0, "name": device}], "traceEvents": list(events)}
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


MM = {"Input Dims": [[64, 512], [512, 256]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}


def test_products_become_rows_by_shape_and_the_rest_rows_by_launch(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        event("cpu_op", "aten::linear", 0, 30),
        event("cpu_op", "aten::mm", 5, 20, **MM),
        event("cuda_runtime", "cudaLaunchKernel", 6, 2, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 9, 2, correlation=2),
        event("cpu_op", "aten::add_", 40, 9),
        event("cuda_runtime", "cudaLaunchKernel", 41, 2, correlation=3),
        kernel("nvjet_hsh_128x64", 1, 7.5, [4, 4, 1], [128, 1, 1]),
        kernel("cublasLt::splitKreduce_kernel", 2, 2.5, [1, 1, 1], [128, 1, 1]),
        kernel("add", 3, 3, [8, 1, 1], [32, 4, 1]),
        kernel("add", 4, 5, [8, 1, 1], [128, 1, 1]),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 5, 99, [8, 1, 1], [512, 1, 1]),
    )
    output = tmp_path / "kernels.toml"
    summary = import_kineto_kernels([path], output)
    assert (summary["kernels"], summary["gemms"], summary["operators"], summary["samples"]) == (1, 1, 0, 3)
    table = tomllib.loads(output.read_text())
    assert table["provenance"] == "imported" and table["device"] == "NVIDIA H100 80GB HBM3"
    product = {"m": 64, "n": 256, "k": 512, "batch": 1, "input": "bf16", "compute": "bf16", "ns": 10000.0, "samples": 1}
    assert table["gemm"] == [product], "all kernels of the product together"
    assert table["kernel"] == [{"name": "add", "grid": [8, 1, 1], "threads": 128, "ns": 4000.0, "samples": 2}]
    assert read_tables([output]) == [output.read_text()]


def test_causal_attention_has_half_the_work(tmp_path: Path) -> None:
    name = "aten::_scaled_dot_product_cudnn_attention"
    shape = [2, 8, 64, 16]
    inputs = {"Input Dims": [shape, shape, shape, [], [], [], []], "Input type": ["c10::BFloat16"] * 3 + [""] * 4}
    events = []
    for number, causal in enumerate(("True", "False")):
        start = 100 * number
        concrete = ["", "", "", "", "True", "0.", causal]
        events += [
            event("cpu_op", name, start, 50, **inputs, **{"Concrete Inputs": concrete}),
            event("cuda_runtime", "cudaLaunchKernelExC", start + 1, 2, correlation=number),
            kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", number, 9, [1, 1, 1], [128, 1, 1]),
        ]
    samples = collect_samples([trace(tmp_path, *events)])
    full = 2 * 2 * 8 * 64 * 64 * (16 + 16)
    assert sorted(samples.operators) == [
        ("cudnn.sdpa_forward", full * 65 // 128, "bf16"),
        ("cudnn.sdpa_forward", full, "bf16"),
    ]


def test_one_table_is_of_one_device(tmp_path: Path) -> None:
    one = trace(tmp_path, kernel("add", 1, 3, [8, 1, 1], [32, 1, 1]))
    other = trace(tmp_path, kernel("add", 1, 3, [8, 1, 1], [32, 1, 1]), device="NVIDIA A100")
    with pytest.raises(ConfigError, match="one table, one device"):
        collect_samples([one, other])
    assert collect_samples([one, other], "mine").device == "mine"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"traceEvents": 3}', '{"traceEvents": []}'])
def test_what_is_no_trace_of_a_device_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        collect_samples([path])


def test_names_are_demangled_as_profilers_do() -> None:
    assert plain_name("_Z3addIfEvPT_i") == "void add<float>(float*, int)"
    assert plain_name("ampere_sgemm_128x64_nn") == "ampere_sgemm_128x64_nn"


@pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not here")
def test_a_recorded_trace_of_an_a100() -> None:
    samples = collect_samples([TRACES / "hta" / "trace_diff__control__control.json.gz"])
    assert samples.device == "NVIDIA A100-PG509-200"
    assert len(samples.gemms) == 133 and len(samples.kernels) == 393
    assert {compute for *_, compute in samples.gemms} == {"fp32", "tf32"}


def test_nothing_is_measured_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRISM_SESSION", "/nowhere")
    with pytest.raises(ConfigError, match="emulated"):
        calibrate_compute(tmp_path / "kernels.toml", Sizes())
    assert len(set(products(Sizes(tp=2)))) == 15
