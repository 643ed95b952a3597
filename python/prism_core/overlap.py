"""Factors for `--overlap` from pairs: how long kernels take alone, and how long beside communication.

A file of pairs is JSON: a list of objects with `class` (gemm, kernel, memcpy, memset or operator), `alone_ns` and
`beside_ns` (numbers or lists of numbers), and, as far as known, `name`. Of several times the median counts.
The factor of a class is the time of its kernels beside communication over their time alone: long kernels count more.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError

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


def calibrate_overlap(source: Path, output: Path) -> dict[str, Any]:
    """Makes a table of factors from a file of pairs; returns what `prism calibrate overlap --json` prints."""
    pairs = read_pairs(source)
    factors = overlap_factors(pairs)
    try:
        output.write_text(overlap_toml(factors, source.name), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error
    return {"table": str(output), "pairs": len(pairs), "overlap": factors}


def overlap_report(document: Mapping[str, Any]) -> str:
    """What `prism calibrate overlap` prints."""
    lines = [f"{document['table']}: {document['pairs']} pairs"]
    for kernel_class, entry in document["overlap"].items():
        spread = f"{entry['lowest']:.3f} to {entry['highest']:.3f} in {entry['pairs']} pairs"
        lines.append(f"  {kernel_class:<8}  {entry['factor']:.3f}  ({spread})")
    return "\n".join(lines)
