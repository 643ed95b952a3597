"""Pictures: time over redundancy, and what a training did when. SVG needs nothing; PNG needs matplotlib."""

from __future__ import annotations

import html
import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError
from prism_core.units import duration_text

#: Rows of `frontier`, by what they are called.
Curves = Mapping[str, Sequence[Mapping[str, Any]]]
Spans = Sequence[Mapping[str, Any]]

_COLOURS = ("#3b6fb6", "#c4562f", "#3f8f5b", "#8557a6", "#9a7b1c", "#47808a")
_ACTIVITIES = {
    "train": "#3b6fb6", "save": "#9a7b1c", "detect": "#8557a6", "patch": "#47808a", "repair": "#8a8f99",
    "restart": "#c4562f", "swap": "#d98d3a", "rejoin": "#3f8f5b",
}  # fmt: skip
#: Most rectangles of a timeline: shorter spans are drawn together.
_PIXELS = 1000


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of `frontier` by placement."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["placement"], []).append(row)
    return found


class _Svg:
    """Elements of a picture."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = (width, height)
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img" font-family="system-ui, sans-serif" font-size="12"><title>{html.escape(title)}</title>'
        ]

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>')

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 2) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def area(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{path}" fill="{colour}" fill-opacity="0.15"/>')

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> None:
        title = f"<title>{html.escape(hint)}</title>" if hint else ""
        self.parts.append(
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{colour}">{title}</rect>'
        )

    def circle(self, x: float, y: float, colour: str, hint: str) -> None:
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{html.escape(hint)}</title></circle>'
        )

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers in a range."""
    raw = max(high - low, 1e-9) / 5
    scale = 10 ** math.floor(math.log10(raw))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= raw)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def frontier_svg(lines: Curves, *, title: str = "Time to train over redundancy", most: float = 8.0) -> str:
    """Relative time over `r`, one curve and its band for each name; the best point of each is marked.

    Args:
        lines: Rows of `frontier` by name: of several failure rates, or `curves(rows)` by placement.
        title: Of the picture.
        most: Times above this are cut off.
    """
    rows = [row for line in lines.values() for row in line]
    if not rows:
        raise ConfigError("there is nothing to draw: the frontier has no rows")
    svg = _Svg(720, 420, title)
    left, top, width, height = 60.0, 40.0, 490.0, 320.0
    low_r, high_r = min(row["r"] for row in rows), max(row["r"] for row in rows)
    low, high = 1.0, min(most, max(2.0, max(row["band"][1] for row in rows)))

    def at(r: float, time: float) -> tuple[float, float]:
        share = (min(max(time, low), high) - low) / (high - low)
        return left + width * (r - low_r) / max(high_r - low_r, 1), top + height * (1 - share)

    svg.text(left, 22, title)
    for tick in _ticks(low, high):
        y = at(low_r, tick)[1]
        svg.line([(left, y), (left + width, y)], "#d9dee7", 1)
        svg.text(left - 8, y + 4, f"{tick:g} x", "end")
    for r in range(low_r, high_r + 1, max(1, (high_r - low_r) // 12)):
        svg.text(at(r, low)[0], top + height + 18, str(r), "middle")
    svg.text(left + width / 2, top + height + 38, "redundancy r", "middle")
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        upper = [at(row["r"], row["band"][1]) for row in line]
        lower = [at(row["r"], row["band"][0]) for row in line]
        svg.area([*upper, *reversed(lower)], colour)
        svg.line([at(row["r"], row["relative_time"]) for row in line], colour)
        best = min(line, key=lambda row: row["relative_time"])
        svg.circle(*at(best["r"], best["relative_time"]), colour, f"r {best['r']}: {best['relative_time']:.3f} x")
        svg.text(left + width + 14, top + 14 + 18 * number, f"{name}: r {best['r']}, {best['relative_time']:.2f} x")
        svg.rectangle(left + width + 2, top + 6 + 18 * number, 8, 8, colour)
    return svg.done()


def timeline_svg(spans: Spans, *, groups: int, title: str = "One training") -> str:
    """What a training did when (above), live groups (middle) and steps done (below).

    Args:
        spans: `timeline` of `simulate(..., timeline=True)`.
        groups: Groups of the job.
        title: Of the picture.
    """
    if not spans:
        raise ConfigError("there is nothing to draw: the timeline has no spans")
    svg = _Svg(760, 330, title)
    left, width, end = 70.0, 660.0, spans[-1]["end_s"]
    svg.text(left, 20, f"{title}: {duration_text(end)}")
    for start, length, activity, share in _merged(spans, end):
        svg.rectangle(left + width * start, 34, max(width * length, 0.3), 50, _ACTIVITIES[activity], share)
    used = list(dict.fromkeys(span["activity"] for span in spans))
    for number, activity in enumerate(used):
        x = left + 84 * number
        svg.rectangle(x, 92, 10, 10, _ACTIVITIES[activity])
        svg.text(x + 14, 101, activity)
    most = max(max(span["step"] for span in spans), 1)
    for name, top, highest, value in (
        ("live groups", 120.0, float(groups), "live"),
        ("steps done", 220.0, float(most), "step"),
    ):
        svg.text(left - 6, top + 12, f"{highest:g}", "end")
        svg.text(left - 6, top + 80, "0", "end")
        svg.line([(left, top + 80), (left + width, top + 80)], "#d9dee7", 1)
        svg.text(left + 4, top + 12, name)
        points = [(left + width * span["end_s"] / end, top + 80 * (1 - span[value] / highest)) for span in spans]
        svg.line(_thinned(points), "#1c2330", 1)
    svg.text(left, 322, "0")
    svg.text(left + width, 322, duration_text(end), "end")
    return svg.done()


def _merged(spans: Spans, end: float) -> list[tuple[float, float, str, str]]:
    """Per pixel the activity that takes most of it, neighbours as one: start and length as shares, activity, hint."""
    times: list[dict[str, float]] = [{} for _ in range(_PIXELS)]
    for span in spans:
        first, last = span["start_s"] / end * _PIXELS, span["end_s"] / end * _PIXELS
        for pixel in range(int(first), min(math.ceil(last), _PIXELS)):
            share = min(last, pixel + 1) - max(first, pixel)
            times[pixel][span["activity"]] = times[pixel].get(span["activity"], 0.0) + share
    merged: list[tuple[float, float, str, str]] = []
    for pixel, shares in enumerate(times):
        if not shares:
            continue
        activity = max(shares, key=lambda name: (shares[name], name))
        if merged and merged[-1][2] == activity:
            start, length, _, _ = merged[-1]
            merged[-1] = (start, length + 1 / _PIXELS, activity, activity)
        else:
            merged.append((pixel / _PIXELS, 1 / _PIXELS, activity, activity))
    return merged


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most a few points per pixel: the lowest, the highest and the last of each."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(int(point[0]), []).append(point)
    thinned: list[tuple[float, float]] = []
    for column in columns.values():
        kept = {min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1]), column[-1]}
        thinned += sorted(kept)
    return thinned


def save_frontier(lines: Curves, path: str | os.PathLike[str], *, title: str = "Time to train over redundancy") -> None:
    """Writes the frontier as `.svg`, or as `.png` with matplotlib (extra `plots`)."""

    def draw(axes: Any) -> None:
        for number, (name, line) in enumerate(lines.items()):
            colour, r = _COLOURS[number % len(_COLOURS)], [row["r"] for row in line]
            axes.fill_between(
                r, [row["band"][0] for row in line], [row["band"][1] for row in line], color=colour, alpha=0.15
            )
            axes.plot(r, [row["relative_time"] for row in line], color=colour, label=name)
        axes.set(xlabel="redundancy r", ylabel="time / time without failures", title=title)
        axes.set_ylim(1, min(8.0, axes.get_ylim()[1]))
        axes.legend()

    _save(path, lambda: frontier_svg(lines, title=title), draw)


def save_timeline(spans: Spans, path: str | os.PathLike[str], *, groups: int, title: str = "One training") -> None:
    """Writes a timeline as `.svg`, or as `.png` with matplotlib (extra `plots`)."""

    def draw(axes: Any) -> None:
        for start, length, activity, _ in _merged(spans, spans[-1]["end_s"]):
            scale = spans[-1]["end_s"] / 3600
            axes.barh(0, length * scale, left=start * scale, color=_ACTIVITIES[activity], height=groups, align="edge")
        hours = [span["end_s"] / 3600 for span in spans]
        axes.plot(hours, [span["live"] for span in spans], color="#1c2330", drawstyle="steps-pre", linewidth=0.8)
        axes.set(xlabel="hours", ylabel="live groups", title=title)

    _save(path, lambda: timeline_svg(spans, groups=groups, title=title), draw)


def _save(path: str | os.PathLike[str], svg: Callable[[], str], draw: Callable[[Any], None]) -> None:
    location = Path(path)
    if location.suffix == ".svg":
        location.write_text(svg(), encoding="utf-8")
        return
    if location.suffix != ".png":
        raise ConfigError(f"{location}: pictures end in .svg or .png")
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError(
            f"{location}: PNG needs matplotlib (pip install 'prism_core[plots]'); .svg needs nothing"
        ) from None
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    draw(figure.subplots())
    figure.savefig(location, dpi=150)
