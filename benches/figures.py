"""From the figures a program measured to `extra_info` of a benchmark, and to its goal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

#: What was reported.
LINES: list[str] = []


def quartile(samples: Sequence[float]) -> float:
    """The first quartile: what the code costs also while other programs use the machine."""
    return statistics.quantiles(samples, n=4)[0] if len(samples) > 1 else samples[0]


def report(benchmark: Any, **series: Sequence[float]) -> None:
    """Adds the median of each series to the benchmark's record and to the lines shown at the end."""
    for name, samples in series.items():
        benchmark.extra_info[name] = round(statistics.median(samples), 3)
    shown = ", ".join(f"{name} {benchmark.extra_info[name]:,}" for name in series)
    LINES.append(f"{benchmark.name}: {shown}")


def check_goal(benchmark: Any, samples: Sequence[float], goal: float) -> None:
    """Fails, while benchmarks are timed, if the first quartile is over the goal."""
    benchmark.extra_info["goal"] = goal
    if benchmark.enabled:
        assert quartile(samples) <= goal, f"goal {goal}: {sorted(samples)}"
