"""Factors for `--overlap` from pairs: how long kernels take alone, and how long beside communication.

A file of pairs is JSON: a list of objects with `class` (gemm, kernel, memcpy, memset or operator), `alone_ns` and
`beside_ns` (numbers or lists of numbers), and, as far as known, `name`. Of several times the median counts.
The factor of a class is the time of its kernels beside communication over their time alone: long kernels count more.

A trace of `torch.profiler` has such pairs as well: kernels of one name and launch that run alone here, and under a
communication kernel of the same device there.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError
from prism_core.kernels import COMMUNICATION, read_trace

CLASSES = ("gemm", "kernel", "memcpy", "memset", "operator")


@dataclass(frozen=True, slots=True)
class Pair:
    """A kernel that was measured twice, ns."""

    kernel_class: str
    name: str
    alone_ns: float
    beside_ns: float


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file.

    Raises:
        ConfigError: The file or an entry (named by its number) is not of the form.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no file of pairs: {error}") from error
    if not isinstance(document, list) or not document:
        raise ConfigError(f"{path} is no file of pairs: it must be a list of them")
    return [_pair(entry, f"{path}, entry {number}") for number, entry in enumerate(document)]


#: Kernels that are matrix products, as the engine tells them by name.
_PRODUCT = re.compile(r"gemm|gemv|Gemm|cutlass|nvjet|cublas|splitKreduce|matmul")
#: A kernel is beside communication if so much of it is; those in between tell nothing.
_BESIDE = 0.9
#: So many times are needed on either side.
_TIMES = 3


def pairs_of_trace(document: Mapping[str, Any]) -> list[Pair]:
    """The pairs in a trace, of kernels that ran at least three times alone and three times beside communication."""
    communication: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    others = []
    for event in document["traceEvents"]:
        category = str(event.get("cat", "")).lower() if isinstance(event, dict) else ""
        if category not in ("kernel", "gpu_memcpy", "gpu_memset") or not _is_timed(event):
            continue
        if category == "kernel" and COMMUNICATION.search(str(event.get("name"))):
            communication[_arguments(event).get("device")].append((event["ts"], event["ts"] + event["dur"]))
        else:
            others.append((category, event))
    busy = {device: _united(spans) for device, spans in communication.items()}
    times: dict[tuple[str, str, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for category, event in others:
        share = _share_within(event["ts"], event["ts"] + event["dur"], busy.get(_arguments(event).get("device"), []))
        if share == 0 or share >= _BESIDE:
            times[_launch(category, event)][share > 0].append(event["dur"] * 1e3)
    return [
        Pair(kernel_class, name, statistics.median(alone), statistics.median(beside))
        for (kernel_class, name, _), (alone, beside) in sorted(times.items())
        if min(len(alone), len(beside)) >= _TIMES
    ]


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _is_timed(event: Mapping[str, Any]) -> bool:
    start, duration = event.get("ts"), event.get("dur")
    return isinstance(start, (int, float)) and isinstance(duration, (int, float)) and duration > 0


def _launch(category: str, event: Mapping[str, Any]) -> tuple[str, str, str]:
    """Class, name, and what else must be equal for two kernels to be the same work."""
    arguments, name = _arguments(event), str(event.get("name"))
    if category != "kernel":
        return category.removeprefix("gpu_"), name, str(arguments.get("bytes"))
    kind = "gemm" if _PRODUCT.search(name) else "kernel"
    return kind, name, f"{arguments.get('grid')} {arguments.get('block')}"


def _united(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans in order that do not overlap."""
    united: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(end, united[-1][1]))
        else:
            united.append((start, end))
    return united


def _share_within(start: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    """How much of a time lies within ordered spans."""
    first = max(0, bisect.bisect_right(spans, (start, math.inf)) - 1)
    within = 0.0
    for span in spans[first:]:
        if span[0] >= end:
            break
        within += max(0.0, min(end, span[1]) - max(start, span[0]))
    return within / (end - start)


def _pair(entry: Any, where: str) -> Pair:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: it is no object with class, alone_ns and beside_ns")
    kernel_class = entry.get("class")
    if kernel_class not in CLASSES:
        raise ConfigError(f"{where}: class is {kernel_class!r}: it must be one of {', '.join(CLASSES)}")
    times = [_median(entry.get(key), f"{where}: {key}") for key in ("alone_ns", "beside_ns")]
    return Pair(kernel_class, str(entry.get("name", "")), *times)


def _median(value: Any, what: str) -> float:
    values = value if isinstance(value, list) else [value]
    for number in values:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number) or number <= 0:
            raise ConfigError(f"{what} is {number!r}: it must be a positive number of ns")
    if not values:
        raise ConfigError(f"{what} has no times")
    return float(statistics.median(values))


def overlap_factors(pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """By class: `factor`, `pairs`, and the range of single pairs' factors as `lowest` and `highest`.

    A class that is not slower beside communication has a factor of 1: less is noise.
    """
    by_class: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_class[pair.kernel_class].append(pair)
    table = {}
    for kernel_class, of_class in sorted(by_class.items()):
        single = [pair.beside_ns / pair.alone_ns for pair in of_class]
        factor = sum(pair.beside_ns for pair in of_class) / sum(pair.alone_ns for pair in of_class)
        table[kernel_class] = {
            "factor": round(max(1.0, factor), 6),
            "pairs": len(of_class),
            "lowest": round(min(single), 6),
            "highest": round(max(single), 6),
        }
    return table


def overlap_toml(factors: Mapping[str, Mapping[str, Any]], source: str) -> str:
    """The table that `prism replay --overlap` (and a profile) reads."""
    lines = [
        f"# Computing beside communication, from {json.dumps(source)[1:-1]}.",
        "[overlap]",
        'provenance = "measured"',
    ]
    for kernel_class, entry in factors.items():
        remark = f"{entry['pairs']} pairs, {entry['lowest']:.3f} to {entry['highest']:.3f}"
        lines.append(f"{kernel_class} = {entry['factor']!r}  # {remark}")
    return "\n".join(lines) + "\n"


def calibrate_overlap(sources: Sequence[Path], output: Path) -> dict[str, Any]:
    """Makes a table of factors from files of pairs and from traces; returns `prism calibrate overlap --json`.

    Raises:
        ConfigError: A file is neither, or traces have no kernel both alone and beside communication.
    """
    pairs = [pair for source in sources for pair in _pairs_in(source)]
    if not pairs:
        raise ConfigError(
            f"no kernel ran {_TIMES} times alone and {_TIMES} times beside communication: "
            "trace several iterations of a program that overlaps them"
        )
    factors = overlap_factors(pairs)
    try:
        output.write_text(overlap_toml(factors, ", ".join(source.name for source in sources)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error
    return {"table": str(output), "pairs": len(pairs), "overlap": factors}


def _pairs_in(source: Path) -> list[Pair]:
    """A trace is an object (or gzipped), pairs are a list."""
    try:
        with source.open("rb") as file:
            start = file.read(64).lstrip()
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}") from error
    return pairs_of_trace(read_trace(source)) if start[:1] in (b"{", b"\x1f") else read_pairs(source)


def overlap_report(document: Mapping[str, Any]) -> str:
    """What `prism calibrate overlap` prints."""
    lines = [f"{document['table']}: {document['pairs']} pairs"]
    for kernel_class, entry in document["overlap"].items():
        spread = f"{entry['lowest']:.3f} to {entry['highest']:.3f} in {entry['pairs']} pairs"
        lines.append(f"  {kernel_class:<8}  {entry['factor']:.3f}  ({spread})")
    return "\n".join(lines)
