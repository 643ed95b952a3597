"""Observed failures: traces of single ones, the distribution that fits them, and published counts."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError
from prism_core.units import seconds


@dataclass(frozen=True)
class FailureTrace:
    """Failures of groups, in the order of time.

    Attributes:
        failures: Time in seconds from the start of the observation, and group, of each.
        until_s: End of the observation, seconds.
    """

    failures: Sequence[tuple[float, int]]
    until_s: float

    @property
    def system_mtbf_s(self) -> float:
        """Mean time between failures of any group, seconds; infinite if nothing failed."""
        return self.until_s / len(self.failures) if self.failures else math.inf

    def to_dict(self) -> dict[str, Any]:
        """As the engine takes it."""
        failures = [{"time_s": time, "group": group} for time, group in self.failures]
        return {"failures": failures, "until_s": self.until_s}


def read_trace(path: str | os.PathLike[str], *, until_s: float | None = None) -> FailureTrace:
    """Reads failures from a CSV file.

    Args:
        path: A file with the columns `group` and either `time_s` (seconds) or `time` (with a unit each, `1h30m`). Rows
            are in the order of time; other columns are left alone.
        until_s: End of the observation, seconds; the last failure by default.

    Raises:
        ConfigError: The file cannot be read, or a line is out of order, negative or of another unit; it names the line.
    """
    location = Path(path)
    try:
        with location.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            if "group" not in columns or ("time_s" in columns) == ("time" in columns):
                raise ConfigError(f"{location}: it must have the columns group and either time_s or time")
            column = "time_s" if "time_s" in columns else "time"
            failures: list[tuple[float, int]] = []
            for row in reader:
                place = f"{location}, line {reader.line_num}"
                failure = (_time(row[column], column, place), _group(row["group"], place))
                if failures and failure[0] < failures[-1][0]:
                    raise ConfigError(
                        f"{place}: {row[column]} is before the failure above it: failures must be in the order of time"
                    )
                failures.append(failure)
    except OSError as error:
        raise ConfigError(f"cannot read {location}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{location} is not UTF-8 text") from error
    if not failures:
        raise ConfigError(f"{location} has no failure: give a mean time between failures instead")
    last = failures[-1][0]
    if until_s is not None and until_s < last:
        raise ConfigError(f"until_s is {until_s}: {location} has a failure at {last} s")
    return FailureTrace(failures, last if until_s is None else until_s)


def _time(text: str | None, column: str, place: str) -> float:
    text = (text or "").strip()
    if column == "time":
        if not text or not text[-1].isalpha():
            raise ConfigError(f"{place}: time is {text!r}: it needs a unit, such as 300s or 1h30m")
        return seconds(text, f"{place}: time")
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{place}: time_s is {text!r}: it must be a number of seconds, without a unit") from None
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{place}: time_s is {text!r}: it must be at least 0")
    return value


def _group(text: str | None, place: str) -> int:
    if text is None or not text.strip().isdigit():
        raise ConfigError(f"{place}: group is {text!r}: it must be a number from 0")
    return int(text)


@dataclass(frozen=True)
class Fit:
    """Distributions of the time between failures of one group, fitted by maximum likelihood.

    Groups count as new at the start; what has not failed by the end is censored, not left out.

    Attributes:
        failures: Failures the fit rests on.
        group_mtbf_s: Mean of the exponential distribution, seconds.
        weibull_shape: Shape of the Weibull distribution; below 1, failures come in clusters.
        weibull_scale_s: Its scale, seconds.
        weibull_mean_s: Its mean, seconds.
        p_value: Chance that an exponential distribution would look so far from one (likelihood ratio, 1 degree).
        exponential_distance: Largest distance between the observed and the fitted distribution (Kolmogorov).
        weibull_distance: The same for the Weibull distribution.
        critical_distance: A distance above this would be found in 1 of 20 samples of the fitted distribution.
    """

    failures: int
    group_mtbf_s: float
    weibull_shape: float
    weibull_scale_s: float
    weibull_mean_s: float
    p_value: float
    exponential_distance: float
    weibull_distance: float
    critical_distance: float

    @property
    def best(self) -> str:
        """`weibull` if the data speak against an exponential distribution (1 in 20), else `exponential`."""
        return "weibull" if self.p_value < 0.05 else "exponential"

    @property
    def is_good(self) -> bool:
        """Whether the better distribution fits."""
        distance = self.weibull_distance if self.best == "weibull" else self.exponential_distance
        return distance <= self.critical_distance

    def text(self) -> str:
        """The quality in words."""
        quality = "fits" if self.is_good else "does NOT fit: use the trace itself"
        distance = self.weibull_distance if self.best == "weibull" else self.exponential_distance
        return (
            f"{self.failures} failures; {self.best} {quality} (distance {distance:.3f}, critical"
            f" {self.critical_distance:.3f}); Weibull shape {self.weibull_shape:.3f}, p {self.p_value:.2g}"
        )


def fit(trace: FailureTrace, groups: int) -> Fit:
    """Fits exponential and Weibull distributions to the times between failures of each of `groups` groups."""
    lives, cut = _lifetimes(trace, groups)
    if len(lives) < 8:
        raise ConfigError(f"the trace has {len(lives)} failures: at least 8 are needed to fit a distribution")
    total, count = math.fsum(lives) + math.fsum(cut), len(lives)
    if min(lives) <= 0 or total <= 0:
        raise ConfigError("a group fails twice at one time, or at 0: no distribution of positive times fits")
    mean = total / count
    shape = _weibull_shape(lives, cut)
    powers = math.fsum(math.pow(life / mean, shape) for life in (*lives, *cut)) / count
    scale = mean * math.pow(powers, 1 / shape)
    logs = math.fsum(map(math.log, lives))
    exponential = -count * math.log(mean) - count
    weibull = count * (math.log(shape) - shape * math.log(scale)) + (shape - 1) * logs - count
    ratio = max(0.0, 2 * (weibull - exponential))
    return Fit(
        failures=count, group_mtbf_s=mean, weibull_shape=shape, weibull_scale_s=scale,
        weibull_mean_s=scale * math.gamma(1 + 1 / shape), p_value=math.erfc(math.sqrt(ratio / 2)),
        exponential_distance=_distance([life / mean for life in lives], [life / mean for life in cut]),
        weibull_distance=_distance(
            [math.pow(life / scale, shape) for life in lives], [math.pow(life / scale, shape) for life in cut]
        ),
        critical_distance=1.358 / math.sqrt(count),
    )  # fmt: skip


def _lifetimes(trace: FailureTrace, groups: int) -> tuple[list[float], list[float]]:
    """Times to failures, and times that ended without one."""
    last = [0.0] * groups
    lives = []
    for time, group in trace.failures:
        if group >= groups:
            raise ConfigError(f"the trace has a failure of group {group}: there are {groups}, from 0")
        lives.append(time - last[group])
        last[group] = time
    return lives, [trace.until_s - time for time in last if trace.until_s > time]


def _weibull_shape(lives: Sequence[float], cut: Sequence[float]) -> float:
    """Root of the likelihood equation of the shape, by bisection: it is monotonic."""
    longest = max(*lives, *cut)
    scaled = [life / longest for life in (*lives, *cut)]
    logs = [math.log(life) for life in scaled]
    mean_log = math.fsum(math.log(life / longest) for life in lives) / len(lives)

    def slope(shape: float) -> float:
        powers = [math.exp(shape * log) for log in logs]
        weighted = math.fsum(power * log for power, log in zip(powers, logs, strict=True))
        return weighted / math.fsum(powers) - 1 / shape - mean_log

    low, high = 0.05, 50.0
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return math.sqrt(low * high)


def _distance(lives: Iterable[float], cut: Iterable[float]) -> float:
    """Largest distance of the Kaplan-Meier estimate of scaled times from the exponential distribution of mean 1."""
    events = sorted([(time, True) for time in lives] + [(time, False) for time in cut], key=lambda each: each[0])
    left, survival, worst = len(events), 1.0, 0.0
    for time, is_failure in events:
        if is_failure:
            expected = math.exp(-time)
            worst = max(worst, abs(survival - expected))
            survival *= 1 - 1 / left
            worst = max(worst, abs(survival - expected))
        left -= 1
    return worst


@dataclass(frozen=True)
class FailureSource:
    """What a published data set says about failures. Only counts are published: no distribution can be fitted to them.

    Attributes:
        dataset: Its name.
        gpu_mtbf_s: Mean time between failures of one GPU, seconds; `None` where the data set does not say.
        low_s: Lower end of the 95 % interval of `gpu_mtbf_s`, where the number of failures is known.
        high_s: Upper end.
        causes: Share of the failures by cause, largest first.
        points: Pairs of GPUs and mean time between failures of a job of so many, seconds.
        source: Where the numbers are from.
        notes: What is not read from the source itself, or does not fit together.
    """

    dataset: str
    gpu_mtbf_s: float | None
    low_s: float | None
    high_s: float | None
    causes: Mapping[str, float]
    points: Sequence[tuple[int, float]]
    source: str
    notes: Sequence[str] = field(default_factory=tuple)

    def group_mtbf_s(self, gpus_per_group: int) -> float:
        """Mean time between failures of a group of so many GPUs, seconds."""
        if self.gpu_mtbf_s is None:
            raise ConfigError(f"{self.dataset} does not say how often a GPU fails: it has shares of causes only")
        return self.gpu_mtbf_s / gpus_per_group


_UNITS = {"hours": 3600.0, "days": 86_400.0}


def failure_table(path: str | os.PathLike[str]) -> list[FailureSource]:
    """Reads a table of published failures (columns dataset, metric, cause, value, unit, source, confidence)."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    needed = {"dataset", "metric", "cause", "value", "unit", "source", "confidence"}
    if not rows or not needed <= set(rows[0]):
        raise ConfigError(f"{path}: it must have the columns {', '.join(sorted(needed))}")
    names = list(dict.fromkeys(row["dataset"] for row in rows))
    return [_source(name, [row for row in rows if row["dataset"] == name]) for name in names]


def _source(name: str, rows: list[dict[str, str]]) -> FailureSource:
    single = {row["metric"]: row for row in rows if not row["cause"]}
    caused = {row["cause"]: float(row["value"]) for row in rows if row["cause"]}
    total = math.fsum(caused.values())
    notes = sorted({f"{row['metric']}: {row['confidence']}" for row in rows if "MEMORY" in row["confidence"]})
    points = []
    for row in single.values():
        match = re.search(r"MTTF ([\d,]+)(?:-GPU| GPUs)", row["metric"])
        if match and row["unit"] in _UNITS:
            points.append((int(match.group(1).replace(",", "")), float(row["value"]) * _UNITS[row["unit"]]))
    mtbf, low, high = None, None, None
    counted = [single.get(key) for key in ("unexpected interruptions", "duration", "GPUs")]
    if all(counted):
        count, duration, gpus = (float(row["value"]) for row in counted if row)
        unit = _UNITS[counted[1]["unit"]] if counted[1] else 1.0
        hours = duration * unit * gpus
        # The usual interval of a Poisson count (Byar's approximation, within 1 % from 10 on).
        mtbf = hours / count
        low = hours / ((count + 1) * math.pow(1 - 1 / (9 * (count + 1)) + 1.96 / (3 * math.sqrt(count + 1)), 3))
        high = hours / (count * math.pow(1 - 1 / (9 * count) - 1.96 / (3 * math.sqrt(count)), 3))
    elif points:
        products = [gpus * time for gpus, time in points]
        mtbf = math.exp(math.fsum(map(math.log, products)) / len(products))
        if max(products) > 1.1 * min(products):
            notes.append(
                f"GPUs times mean time between failures is {min(products) / 3600:,.0f} to {max(products) / 3600:,.0f}"
                " GPU h: one rate per GPU does not fit all of it"
            )
    return FailureSource(
        dataset=name, gpu_mtbf_s=mtbf, low_s=low, high_s=high,
        causes={cause: value / total for cause, value in sorted(caused.items(), key=lambda item: -item[1])},
        points=sorted(points), source=rows[0]["source"], notes=tuple(notes),
    )  # fmt: skip
