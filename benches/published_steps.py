"""Published step times of dense models as layouts, and what a model that knew no row of theirs says of them."""

from __future__ import annotations

import csv
import math
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from prism_core.config import read_profile
from prism_core.estimate import Layout, bubble, estimate, useful_flop
from prism_core.profiles import with_entry

#: Shapes, from the models' own configurations.
_LLAMA = dict(kv_heads=8, gated=True, vocab=128256, untied_embeddings=True, rotary=True)
MODELS: dict[str, dict[str, Any]] = {
    "8B": dict(layers=32, hidden=4096, heads=32, ffn=14336, **_LLAMA),
    "70B": dict(layers=80, hidden=8192, heads=64, ffn=28672, **_LLAMA),
    "405B": dict(layers=126, hidden=16384, heads=128, ffn=53248, **_LLAMA),
    "175B": dict(layers=96, hidden=12288, heads=96),
    "20B": dict(layers=44, hidden=6144, heads=48),
    "5B": dict(layers=24, hidden=4096, heads=32),
    "Nemotron-8B": dict(layers=32, hidden=4096, heads=32, ffn=16384, vocab=256000, untied_embeddings=True, rotary=True),
}
NAMES = {
    "Llama3-8B": "8B", "Llama3-70B": "70B", "Llama3.1-405B": "405B", "GPT3-5B": "5B", "GPT3-20B": "20B",
    "Nemotron-8B": "Nemotron-8B", "llama31_8b": "8B", "llama31_405b": "405B",
}  # fmt: skip
SYSTEMS: dict[str, tuple[str, dict[str, float]]] = {
    "H100": ("h100-sxm", {}),
    "H200": ("h200-sxm", {}),
    "B200": ("b200-sxm", {}),
    "GB200": ("gb200-nvl72", {}),
    # 8 TB/s and a card of 800 Gb/s (data/cost/presets.json).
    "GB300": (
        "gb200-nvl72",
        {"device.memory_bytes_per_s": 8_000_000_000_000, "network.nic_bytes_per_s": 100_000_000_000},
    ),
}
#: What submissions of MLPerf 5.1 set (training_results_v5.1, `config_common.sh`, `config_common_8b.sh`): parameters
#: are gathered in 8 bits, buckets of the 8B model have 768 million parameters.
_MLPERF: dict[str, dict[str, Any]] = {
    "8B": {"parameter_bytes": 1, "bucket_parameters": 768_000_000},
    "405B": {"parameter_bytes": 1},
}
#: Cisco's shards parameters as well, in 16 bits (`conf/custom.yaml`).
_SHARDED = {"fully_sharded": True}


#: Profiles whose nodes are racks.
RACKS = ("gb200-nvl72",)


@dataclass(frozen=True, slots=True)
class Row:
    """A step that somebody measured."""

    title: str
    #: Rows of one model are left out together.
    model: str
    #: Rows that share a calibration: generation and type.
    group: str
    layout: Layout
    gpus: int
    profile: str
    seconds: float


def changed(profile: str, values: Mapping[str, float]) -> str:
    """A profile with other numbers, by table and key."""
    for path, value in values.items():
        profile = with_entry(profile, path, repr(value))
    return profile


def _whole(text: str | None, other: int = 1) -> int:
    return int(text) if text and text != "null" else other


def _row(
    title: str, name: str, system: str, group: str, number: Mapping[str, str], seconds: float, **more: Any
) -> Row | None:
    model, gpus = NAMES[name], int(number["n_gpus"])
    base, values = SYSTEMS[system]
    tp, pp, cp = (_whole(number[key]) for key in ("tp", "pp", "cp"))
    micro = _whole(number["mbs"])
    ends = model == "405B"
    # Every rank of a rack of Blackwell systems is a neighbour; 64 of 72 are used where worlds are powers of two.
    values = values | (dict.fromkeys(("node.gpus", "node.nics"), 72 if gpus == 72 else 64) if base in RACKS else {})
    layout = Layout(
        **MODELS[model], seq=int(number["seq"]), global_batch=int(number["gbs"]), micro_batch=micro,
        tp=tp, pp=pp, cp=cp, vp=_whole(number["vp"]), dp=gpus // (tp * pp * cp), dtype="fp8",
        ends_are_layers=ends, tp_overlap=0.5, dp_overlap=True, distributed_optimizer=True, sequence_parallel=True,
        fixed_ns=20_000_000 if system in ("B200", "GB200", "GB300") else 10_000_000, **more,
    )  # fmt: skip
    return Row(f"{title} {name} {system}", model, group, layout, gpus, changed(read_profile(base), values), seconds)


def dense_rows(folder: Path) -> list[Row]:
    """Dense models in 8-bit floats on 64 GPUs and more: Megatron-Bridge, NeMo, MLPerf Training."""
    rows: list[Row | None] = []
    for number in csv.DictReader((folder / "published_training_throughput.csv").open()):
        is_listed = number["model"] in NAMES and int(number["n_gpus"]) >= 64 and number["precision"].startswith("FP8")
        if is_listed and number["system"].startswith("DGX-") and number["gbs"]:
            system = number["system"].removeprefix("DGX-")
            group = "Hopper" if system.startswith("H") else "Blackwell"
            title = "Megatron-Bridge" if "Bridge" in number["source"] else "NeMo"
            seconds = float(number["iter_time_s_derived"])
            sharded = number["fsdp"] == "1"
            more = {"fully_sharded": True} if sharded else {}
            rows.append(_row(title, number["model"], system, group, number, seconds, **more))
    for number in csv.DictReader((folder / "mlperf_v51_llm_step_times.csv").open()):
        seconds = number["step_time_s_median_over_runs"]
        if (
            number["bench"] not in NAMES
            or not seconds
            or int(number["n_gpus"]) < 64
            or number["precision_guess"] != "fp8"
        ):
            continue
        name = number["accelerator"]
        system = next(key for key in ("GB300", "GB200", "B200", "H200", "H100") if key in name)
        group = "Hopper" if system.startswith("H") else "Blackwell"
        title, bench = f"MLPerf {number['org']}", number["bench"]
        more = _SHARDED if number["org"] == "Cisco" else _MLPERF[NAMES[bench]]
        rows.append(_row(title, bench, system, group, number, float(seconds), **more))
    for number in csv.DictReader((folder / "mlperf_v40_gpt3_step_times.csv").open()):
        layout = Layout(
            **MODELS["175B"], seq=2048, global_batch=2304, micro_batch=2, tp=4, pp=8, vp=4, dp=16, dtype="fp8",
            tp_overlap=0.5, dp_overlap=True, distributed_optimizer=True, sequence_parallel=True, fixed_ns=10_000_000,
        )  # fmt: skip
        profile = read_profile("h100-sxm")
        rows.append(Row("MLPerf GPT-3 H100", "175B", "Hopper", layout, 512, profile, float(number["step_time_s"])))
    return [row for row in rows if row is not None]


def vtrain_rows(path: Path, group: str) -> list[Row]:
    """GPT models that vTrain measured on A100; each of its nodes has 800 Gb/s, half of the profile's."""
    profile = changed(read_profile("a100-sxm"), {"network.nic_bytes_per_s": 12_500_000_000})
    rows = []
    for layout, gpus, ms in _vtrain(path):
        model = f"{layout.layers}x{layout.hidden}"
        rows.append(Row(f"vTrain {model}", model, group, layout, gpus, profile, ms / 1e3))
    return rows


def _vtrain(path: Path) -> Iterator[tuple[Layout, int, float]]:
    for row in csv.DictReader(path.open()):
        number = {key: value for key, value in row.items() if key}
        layers, stages = int(number["# layers"]), int(number["pipeline parallelism"])
        if layers % stages:
            continue
        layout = Layout(
            layers=layers, pp=stages, hidden=int(number["hidden size"]), heads=int(number["attention heads"]),
            seq=int(number["sequence length"]), global_batch=int(number["global batch"]),
            micro_batch=int(number["micro batch"]), tp=int(number["tensor parallelism"]),
            dp=int(number["data parallelism"]), dtype="fp16", fused_attention=False, dropout=True, recompute=True,
            fused_loss=False,
        )  # fmt: skip
        yield layout, int(number["# GPUs"]), float(number["iteration time (ms)"])


@lru_cache(maxsize=100_000)
def _seconds(layout: Layout, profile: str) -> float:
    return float(estimate(layout, profile)["iteration_time_ns"]) / 1e9


@dataclass(frozen=True, slots=True)
class Constant:
    """A number of the profile that is fitted: the steps at some values are evaluated, those between interpolated."""

    keys: tuple[str, ...]
    values: tuple[float, ...]

    def steps(self, row: Row, others: Mapping[str, float]) -> Callable[[float], float]:
        """Seconds of a row by the constant."""
        found = [
            _seconds(row.layout, changed(row.profile, dict(others) | dict.fromkeys(self.keys, value)))
            for value in self.values
        ]

        def at(value: float) -> float:
            for low, high in zip(range(len(found) - 1), range(1, len(found)), strict=True):
                if value <= self.values[high] or high == len(found) - 1:
                    share = (value - self.values[low]) / (self.values[high] - self.values[low])
                    return found[low] + share * (found[high] - found[low])
            return found[-1]

        return at

    def candidates(self, count: int = 200) -> list[float]:
        """Values to choose among."""
        low, high = self.values[0], self.values[-1]
        return [low + (high - low) * step / count for step in range(count + 1)]


@dataclass(slots=True)
class Answer:
    """A row, what the model and the baseline say of it, and the constant they had."""

    row: Row
    model: float
    baseline: float
    constant: float


@dataclass(slots=True)
class LeftOut:
    """Each model's rows by a constant (and a baseline's MFU) that were fitted to the other models' rows."""

    constant: Constant
    others: dict[str, float] = field(default_factory=dict)

    def answers(self, rows: Sequence[Row]) -> list[Answer]:
        """All rows, each with its own model left out."""
        steps = {id(row): self.constant.steps(row, self.others) for row in rows}
        found: list[Answer] = []
        for model in sorted({row.model for row in rows}):
            other = [row for row in rows if row.model != model]
            value = self._fit(other, steps) if other else self.constant.values[len(self.constant.values) // 2]
            mfu = balanced([(row.model, _mfu(row)) for row in other]) if other else math.nan
            for row in rows:
                if row.model == model:
                    found.append(Answer(row, steps[id(row)](value), _mfu(row) / mfu * row.seconds, value))
        return found

    def _fit(self, rows: Sequence[Row], steps: Mapping[int, Callable[[float], float]]) -> float:
        """The value with the least mean error of logarithms, every model counting alike."""

        def error(value: float) -> float:
            by_model: dict[str, list[float]] = {}
            for row in rows:
                by_model.setdefault(row.model, []).append(abs(math.log(steps[id(row)](value) / row.seconds)))
            return statistics.fmean(statistics.fmean(errors) for errors in by_model.values())

        return min(self.constant.candidates(), key=error)


def balanced(values: Sequence[tuple[str, float]]) -> float:
    """The median of the medians of each model."""
    by_model: dict[str, list[float]] = {}
    for model, value in values:
        by_model.setdefault(model, []).append(value)
    return statistics.median(statistics.median(found) for found in by_model.values())


def _mfu(row: Row) -> float:
    """Model FLOP utilisation of a row outside the pipeline's bubble."""
    peak = float(tomllib.loads(row.profile)["device"]["peak_flops"][row.layout.dtype])
    return useful_flop(row.layout) * (1 + bubble(row.layout)) / (row.gpus * peak * row.seconds)


def quantiles(ratios: Sequence[float]) -> str:
    """Median of the ratios; median, ninth decile and largest of their errors."""
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    ninth = errors[min(len(errors) - 1, 9 * len(errors) // 10)]
    return f"{statistics.median(ratios):.2f} | {statistics.median(errors):.0%} | {ninth:.0%} | {errors[-1]:.0%}"
