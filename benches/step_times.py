"""Model beside measured: kernels of traces, and step times others published, with the baseline MFU x (1 + bubble).

`.venv/bin/python benches/step_times.py [kernels|scaled|dense|sensitivity|small ...] [FOLDER]` prints tables of
docs/accuracy.md, all without a name; FOLDER (default: `../shared/data`) has the traces and tables. No row is in the
calibration it is tested by: the constants of the models were fitted to other traces, those of step times to the rows of
all other models.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.config import read_profile
from prism_core.estimate import Layout, bubble, estimate, useful_flop
from published_steps import Constant, LeftOut, Row, changed, dense_rows, quantiles, vtrain_rows
from trace_works import Group, by_class, works_of

ROOT = Path(__file__).resolve().parents[1]
#: Traces, the profile of their device, and its memory bandwidth where that is another (bytes per second).
TRACES = [
    ("hta/trace_diff__control__control.json.gz", "a100-sxm", 1.555e12),
    ("hta/negative_queue_length_values_check__rank0.json.gz", "a100-sxm", None),
    ("hta/critical_path__alexnet__benchmark_result_2869224_1695835535_trace.json.gz", "a100-sxm", 1.555e12),
    ("tracelens/b200__eager_trace.json.gz", "b200-sxm", None),
]
#: Traces that constants of the models were fitted to (`docs/accuracy.md`): a row of each, for comparison.
FITTED = [("hta/trace_filter__sampled_rank-0.json.gz", "a100-sxm", 1.555e12)]
#: GPT-175B of Megatron-LM on A100 (published): GPUs, global batch, seconds.
GPT_175B = [
    (256, 768, 40.0), (1024, 768, 11.9), (3072, 6144, 29.02), (6144, 6144, 14.78), (8192, 6144, 12.24),
]  # fmt: skip
#: Llama 3 405B on H100 (published): GPUs, data-parallel degree, TFLOP/s of a GPU.
LLAMA_405B = [(8192, 64, 430), (16384, 128, 400)]


def _profile_of(name: str, bytes_per_s: float | None) -> str:
    profile = read_profile(name)
    return profile if bytes_per_s is None else changed(profile, {"device.memory_bytes_per_s": int(bytes_per_s)})


def kernels(folder: Path) -> None:
    """Kernels of traces of real devices. Device time: each launch as often as it was made."""
    print("| trace | purpose | provenance | launches | share | median | p10 | p90 | device time |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, profile, bytes_per_s in [*TRACES, *FITTED]:
        groups = works_of(folder / "traces" / name)
        asked = json.dumps([group.work for group in groups])
        found = json.loads(_native.work_durations_json(_profile_of(profile, bytes_per_s), [], asked))
        total = sum(sum(group.ns) for group in groups)
        short = name.split("/")[1].split("__benchmark")[0].split(".")[0]
        short += " (fitted)" if (name, profile, bytes_per_s) in FITTED else ""
        classes = by_class(groups, found)
        for (provenance, family), pairs in sorted(classes.items()):
            print(f"| {short} | {family} | {provenance} | {_compared(pairs, total)} |")
        pairs = [pair for key, items in classes.items() if key[0] == "modelled" for pair in items]
        print(f"| {short} | **all modelled** | | {_compared(pairs, total)} |")


def _compared(pairs: Sequence[tuple[float, Group]], total: float) -> str:
    """Launches, share of the trace's device time; model / measured of kinds of launches, and of their sums."""
    measured = sum(sum(group.ns) for _, group in pairs)
    together = sum(model * len(group.ns) for model, group in pairs) / measured
    ratios = sorted(model / statistics.median(group.ns) for model, group in pairs)
    quantiles = " | ".join(f"{ratios[min(len(ratios) - 1, len(ratios) * share // 10)]:.2f}" for share in (5, 1, 9))
    launches = sum(len(group.ns) for _, group in pairs)
    return f"{launches} | {measured / total:.0%} | {quantiles} | {together:.2f}"


def left_out(title: str, goal: str, constant: LeftOut, rows: Sequence[Row], every: bool = False) -> None:
    """Rows whose model had no part in the calibration, and the baseline that had the same rows to learn from."""
    answers = constant.answers(rows)
    if every:
        print("\n| row | GPUs | measured s | model / measured | MFU x (1 + bubble) / measured | constant |")
        print("|---|---|---|---|---|---|")
        for answer in answers:
            row = answer.row
            model, baseline = answer.model / row.seconds, answer.baseline / row.seconds
            cells = [row.title, row.gpus, f"{row.seconds:.3f}", f"{model:.2f}", f"{baseline:.2f}"]
            print("| " + " | ".join(map(str, cells)), f"| {answer.constant:.3g} |")
    model = quantiles([answer.model / answer.row.seconds for answer in answers])
    baseline = quantiles([answer.baseline / answer.row.seconds for answer in answers])
    fitted = sorted({answer.constant for answer in answers})
    print(f"\n{HEADER}\n| {title} | {goal} | model | {len(rows)} | {model} |")
    print(f"| | | MFU x (1 + bubble) | {len(rows)} | {baseline} |")
    print(f"\nfitted {constant.constant.keys[0]}: {fitted[0]:.3g} to {fitted[-1]:.3g}")


HEADER = (
    "| rows | goal | | steps | model / measured, median | error, median | ninth decile | worst |\n"
    "|---|---|---|---|---|---|---|---|"
)


def dense(folder: Path) -> None:
    """G3: dense models in 8-bit floats."""
    rows = dense_rows(folder / "tables")
    efficiency = Constant(("device.gemm_efficiency.fp8",), (0.4, 0.5, 0.6, 0.75, 0.95))
    for group in ("Hopper", "Blackwell"):
        chosen = [row for row in rows if row.group == group]
        left_out(f"G3, {group}, FP8", "8 %, 16 %, 21 %", LeftOut(efficiency), chosen, every=True)


#: What is assumed of all rows, or left to a default, and what could as well be: changes of a layout.
ASSUMED: dict[str, dict[str, Any]] = {
    "as above": {},
    "communication takes no multiprocessors": {"dp_sms": 0},
    "it takes 32": {"dp_sms": 32},
    "no tensor-parallel communication hidden": {"tp_overlap": 0.0},
    "all of it hidden": {"tp_overlap": 1.0},
    "Megatron's buckets, gathered in 16 bits": {"bucket_parameters": 0, "parameter_bytes": 2},
    "parameters not sharded": {"fully_sharded": False},
    "one matrix for embedding and head": {"untied_embeddings": False},
    "positions not rotated": {"rotary": False},
    "no fixed time of a step": {"fixed_ns": 0},
}


def sensitivity(folder: Path) -> None:
    """G3 with other assumptions, each calibrated anew."""
    rows = dense_rows(folder / "tables")
    efficiency = LeftOut(Constant(("device.gemm_efficiency.fp8",), (0.4, 0.5, 0.6, 0.75, 0.95)))
    print("\n| assumed | Hopper: median, ninth decile, worst | Blackwell |\n|---|---|---|")
    for title, change in ASSUMED.items():
        cells = []
        for group in ("Hopper", "Blackwell"):
            chosen = [replace(row, layout=replace(row.layout, **change)) for row in rows if row.group == group]
            ratios = [answer.model / answer.row.seconds for answer in efficiency.answers(chosen)]
            cells.append(", ".join(quantiles(ratios).split(" | ")[1:]))
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


#: Time between launches of vTrain's hosts, fitted below to its rows of one node: none is among those of several.
HOST_2022: dict[str, float] = {"host.kernel_launch_ns": 73_000}


def small(folder: Path) -> None:
    """G6 and G7: vTrain's rows."""
    vtrain = folder / "traces" / "vtrain"
    efficiency = Constant(("device.gemm_efficiency.fp16",), (0.5, 0.6, 0.75, 0.9))
    several = vtrain_rows(vtrain / "ground_truth_multi.csv", "G6")
    left_out("G6, several nodes of A100", "5 %, 21 %", LeftOut(efficiency, HOST_2022), several)
    host = Constant(("host.kernel_launch_ns",), (4500, 20_000, 40_000, 60_000, 90_000, 130_000))
    single = vtrain_rows(vtrain / "ground_truth_single.csv", "G7")
    chosen = [row for row in single if row.layout.hidden <= 2048 or row.seconds < 0.15]
    left_out("G7, one node of A100, hidden size to 2,048 or steps under 150 ms", "10 %, 20 %", LeftOut(host), chosen)


def scaled(folder: Path) -> None:
    """G5: one job on more and more GPUs, from its first row on."""
    del folder
    a100 = read_profile("a100-sxm")
    print(
        "\n| job | GPUs | measured s | model s | model / measured | from the first row | MFU x (1 + bubble) from it |"
    )
    print("|---|---|---|---|---|---|---|")
    first: tuple[float, float] | None = None
    for gpus, batch, seconds in GPT_175B:
        layout = Layout(
            layers=96, hidden=12288, heads=96, seq=2048, global_batch=batch, tp=8, pp=8, vp=6, dp=gpus // 64,
        )  # fmt: skip
        _print_scaled("GPT-175B, A100 (G5)", layout, a100, gpus, seconds, first)
        first = first or _shares(layout, a100, gpus, seconds)
    # How far the schedule is interleaved is not published: not at all, and as far as layers allow.
    for vp in (1, 8):
        first = None
        for gpus, dp, tflops in LLAMA_405B:
            layout = Layout(
                layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, gated=True, vocab=128256, seq=8192,
                global_batch=2048, tp=8, pp=16, vp=vp, dp=dp, dtype="bf16", gradient_bytes_per_parameter=4,
                ends_are_layers=True, sequence_parallel=True, rotary=True, untied_embeddings=True,
            )  # fmt: skip
            seconds = 6 * 405e9 * 2048 * 8192 / (tflops * 1e12 * gpus)
            profile, title = read_profile("h100-sxm"), f"Llama 3 405B, H100, {vp} block{'s' if vp > 1 else ''} a stage"
            _print_scaled(title, layout, profile, gpus, seconds, first)
            first = first or _shares(layout, profile, gpus, seconds)


def _shares(layout: Layout, profile: str, gpus: int, seconds: float) -> tuple[float, float]:
    """Model / measured, and the same of the baseline, up to one factor for all rows."""
    model = estimate(layout, profile)["iteration_time_ns"] / 1e9
    return model / seconds, useful_flop(layout) * (1 + bubble(layout)) / gpus / seconds


def _print_scaled(
    title: str, layout: Layout, profile: str, gpus: int, seconds: float, first: tuple[float, float] | None
) -> None:
    model, baseline = _shares(layout, profile, gpus, seconds)
    from_model, from_baseline = first or (model, baseline)
    print(
        f"| {title} | {gpus} | {seconds:.2f} | {model * seconds:.2f} | {model:.2f} | {model / from_model:.2f} | "
        f"{baseline / from_baseline:.2f} |"
    )


TABLES = {"kernels": kernels, "scaled": scaled, "dense": dense, "sensitivity": sensitivity, "small": small}


def main() -> None:
    """Prints all tables."""
    chosen = [argument for argument in sys.argv[1:] if argument in TABLES] or list(TABLES)
    folders = [argument for argument in sys.argv[1:] if argument not in TABLES]
    folder = Path(folders[0]) if folders else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        sys.exit(f"{folder} is not here: name the folder with traces and tables")
    for table in chosen:
        TABLES[table](folder)


if __name__ == "__main__":
    main()
