"""Model beside measured: kernels of traces, and step times others published. Nothing is fitted here.

`.venv/bin/python benches/step_times.py [FOLDER]` prints the tables of docs/accuracy.md; FOLDER (default:
`../shared/data`) holds the traces and tables. What constants of the profiles were fitted to is said in them:
`a100-sxm`'s GEMM efficiency to the multi-node rows below, nothing else to any row here.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from prism_core import _native
from prism_core.config import read_profile
from prism_core.estimate import Layout, estimate
from prism_core.kernels import collect_samples

ROOT = Path(__file__).resolve().parents[1]
TRACES = {
    "hta/trace_diff__control__control.json.gz": "a100-sxm",
    "hta/negative_queue_length_values_check__rank0.json.gz": "a100-sxm",
    "hta/trace_filter__sampled_rank-0.json.gz": "a100-sxm",
    "tracelens/b200__eager_trace.json.gz": "b200-sxm",
}
#: GPT-175B of Megatron-LM on A100 (published): GPUs, global batch, seconds.
GPT_175B = [
    (256, 768, 40.0), (1024, 768, 11.9), (3072, 6144, 29.02), (6144, 6144, 14.78), (8192, 6144, 12.24),
]  # fmt: skip
#: Llama 3 405B on H100 (published): GPUs, data-parallel degree, TFLOP/s of a GPU.
LLAMA_405B = [(8192, 64, 430), (16384, 128, 400)]


def spread(ratios: Iterable[float]) -> str:
    """Count, median, tenth and ninetieth percentile."""
    found = sorted(ratios)
    low, high = found[len(found) // 10], found[min(len(found) - 1, 9 * len(found) // 10)]
    return f"{len(found)} | {statistics.median(found):.2f} | {low:.2f} | {high:.2f}"


def kernels(folder: Path) -> None:
    """Kernels of traces of real devices."""
    print("| trace | purpose | provenance | kernels | median | p10 | p90 | all together |")
    print("|---|---|---|---|---|---|---|---|")
    for name, profile in TRACES.items():
        samples = collect_samples([folder / "traces" / name], "any")
        fields = ("m", "n", "k", "batch", "input", "compute")
        works = [({"gemm": dict(zip(fields, key, strict=True))}, ns) for key, ns in samples.gemms.items()]
        works += [
            ({"kernel": {"name": key[0], "grid": list(key[1]), "threads": key[2]}}, ns)
            for key, ns in samples.kernels.items()
        ]
        text = json.dumps([work for work, _ in works])
        found = json.loads(_native.work_durations_json(read_profile(profile), [], text))
        groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for model, (_, ns) in zip(found, works, strict=True):
            family = model["family"] if model["provenance"] == "modelled" else "everything else"
            groups[model["provenance"], family].append((model["ns"], statistics.median(ns)))
        for (provenance, family), pairs in sorted(groups.items()):
            if len(pairs) >= 4:
                together = sum(model for model, _ in pairs) / sum(measured for _, measured in pairs)
                ratios = spread(model / measured for model, measured in pairs)
                short = name.split("/")[1].split(".")[0]
                print(f"| {short} | {family} | {provenance} | {ratios} | {together:.2f} |")


def _vtrain(path: Path) -> Iterator[tuple[Layout, float]]:
    for row in csv.DictReader(path.open()):
        number = {key: value for key, value in row.items() if key}
        layers, stages = int(number["# layers"]), int(number["pipeline parallelism"])
        if layers % stages:
            continue
        yield (
            Layout(
                layers=layers, pp=stages, hidden=int(number["hidden size"]), heads=int(number["attention heads"]),
                seq=int(number["sequence length"]), global_batch=int(number["global batch"]),
                micro_batch=int(number["micro batch"]), tp=int(number["tensor parallelism"]),
                dp=int(number["data parallelism"]), dtype="fp16", fused_attention=False, dropout=True, recompute=True,
            ),
            float(number["iteration time (ms)"]),
        )  # fmt: skip


def steps(folder: Path) -> None:
    """Step times of dense models."""
    print("\n| rows | steps | median | p10 | p90 |\n|---|---|---|---|---|")
    a100 = read_profile("a100-sxm")
    for title, file in (("vTrain, several nodes of A100 (G6)", "multi"), ("vTrain, one node of A100 (G7)", "single")):
        rows = list(_vtrain(folder / "traces" / "vtrain" / f"ground_truth_{file}.csv"))
        ratios = [(layout, estimate(layout, a100)["iteration_time_ns"] / 1e6 / ms) for layout, ms in rows]
        print(f"| {title} | {spread(ratio for _, ratio in ratios)} |")
        if file == "single":
            large = [ratio for layout, ratio in ratios if layout.hidden >= 2048 and layout.micro_batch >= 4]
            print(f"| the same, hidden size 2,048 and microbatches of 4 and more | {spread(large)} |")
    print("\n| job | GPUs | measured s | model s | model / measured | from the first row |\n|---|---|---|---|---|---|")
    first: float | None = None
    for gpus, batch, seconds in GPT_175B:
        layout = Layout(
            layers=96, hidden=12288, heads=96, seq=2048, global_batch=batch, tp=8, pp=8, vp=6, dp=gpus // 64,
        )  # fmt: skip
        model = estimate(layout, a100)["iteration_time_ns"] / 1e9
        first = first or model / seconds
        share = model / seconds
        print(f"| GPT-175B, A100 (G5) | {gpus} | {seconds} | {model:.2f} | {share:.2f} | {share / first:.2f} |")
    # How far the schedule is interleaved is not published: not at all, and as far as layers allow.
    for gpus, dp, tflops, vp in [(*row, vp) for vp in (1, 8) for row in LLAMA_405B]:
        layout = Layout(
            layers=128, hidden=16384, heads=128, kv_heads=8, ffn=53248, gated=True, vocab=128256, seq=8192,
            global_batch=2048, tp=8, pp=16, vp=vp, dp=dp, dtype="bf16", gradient_bytes_per_parameter=4,
        )  # fmt: skip
        seconds = 6 * 405e9 * 2048 * 8192 / (tflops * 1e12 * gpus)
        model = estimate(layout, read_profile("h100-sxm"))["iteration_time_ns"] / 1e9
        first = model / seconds if gpus == LLAMA_405B[0][0] else first
        share = model / seconds
        title = f"Llama 3 405B, H100, {vp} block{'s' if vp > 1 else ''} of layers a stage"
        print(f"| {title} | {gpus} | {seconds:.2f} | {model:.2f} | {share:.2f} | {share / (first or share):.2f} |")


def main() -> None:
    """Prints all tables."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        sys.exit(f"{folder} is not here: name the folder with traces and tables")
    kernels(folder)
    steps(folder)


if __name__ == "__main__":
    main()
