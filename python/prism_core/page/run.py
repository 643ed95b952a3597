"""Sections about a run folder: its iterations, its sandbox ranks, a plan against failures."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any

from prism_core.page.words import bar, bytes_text, escape, pairs, percent, table, time_text

Section = Callable[..., str]


def run_sections(content: Mapping[str, Any], section: Section) -> Iterator[str]:
    """Iterations, ranks and cost of the run, if there is one."""
    if not content["run"]:
        return
    summary, timing = content["run"]["summary"], content["run"]["timing"]
    times = summary["iteration_time_ns"]
    longest = max(times, default=0)
    rows = [[str(at), bar(time / max(longest, 1)), time_text(time)] for at, time in enumerate(times[:200])]
    yield section("Iterations of the run", table(["iteration", "", "time"], rows, (2,)) if rows else "")
    yield _sandbox(summary, section)
    yield _communicators(summary, section)
    cost = {key: _cost(key, timing[key]) for key in sorted(timing.keys() - {"graph"})}
    named = {key.removesuffix("_ns").removesuffix("_bytes"): value for key, value in cost.items()}
    yield section("Cost of this run", pairs(named))


def _cost(key: str, value: Any) -> str:
    if key.endswith("_ns") and isinstance(value, (int, float)):
        return time_text(value)
    if key.endswith("_bytes") and isinstance(value, (int, float)):
        return bytes_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_cost(key, one)}" for name, one in value.items())
    return str(value)


def _sandbox(summary: Mapping[str, Any], section: Section) -> str:
    rows = []
    for rank in summary["ranks"]:
        last = rank["iteration_time_ns"][-1] if rank["iteration_time_ns"] else 0
        peaks = (rank["peak_allocated_bytes"], rank["peak_reserved_bytes"], rank["nccl_buffer_bytes"])
        code = rank["exit_code"]
        rows.append([
            f"<b>{rank['rank']}</b>", time_text(last), *(bytes_text(peak) for peak in peaks),
            f"{sum(comm['calls'] for comm in rank['communicators']):,}", "-" if code is None else escape(code),
            escape(rank["last_op"] or "-"),
        ])  # fmt: skip
    head = ["rank", "last iteration", "peak allocated", "peak reserved", "NCCL buffers", "calls", "exit", "last op"]
    remark = "The ranks that ran the program."
    return section("Sandbox ranks", table(head, rows, range(1, 7)) if rows else "", remark)


def _communicators(summary: Mapping[str, Any], section: Section) -> str:
    rows = []
    for rank in summary["ranks"]:
        whole = sum(comm["bytes"] for comm in rank["communicators"])
        for comm in rank["communicators"][:32]:
            members = ", ".join(map(str, comm["members"][:8])) + (", …" if comm["size"] > 8 else "")
            rows.append([
                f"<b>{rank['rank']}</b>", f"{comm['size']:,}", escape(members), f"{comm['calls']:,}",
                bytes_text(comm["bytes"]), percent(comm["bytes"], whole),
            ])  # fmt: skip
    head = ["rank", "members", "first of them", "calls", "bytes", "of its bytes"]
    return section("Communicators of sandbox ranks", table(head, rows[:200], (1, 3, 4, 5)) if rows else "")


def spare_section(content: Mapping[str, Any], section: Section) -> str:
    """A plan of `prism spare`, if one lies in the run folder."""
    plan = content["spare"]
    if not plan:
        return ""
    rows = [
        [
            f"{row['r']}", escape(row["placement"] or "-"), f"{row['relative_time']:.2f} x",
            f"{100 * row['availability']:.1f} %", time_text(1e9 * row["interval_s"]), f"{row['masked']:.0f}",
        ]
        for row in plan["frontier"][:24]
    ]  # fmt: skip
    head = ["redundancy", "placement", "time", "availability", "checkpoint every", "failures masked"]
    remark = f"{plan['groups']:,} groups, a failure every {time_text(1e9 * plan['system_mtbf_s'])}."
    return section("Training through failures", _frontier(plan) + table(head, rows, (0, 2, 3, 4, 5)), remark)


def _frontier(plan: Mapping[str, Any]) -> str:
    """The frontier as a picture, where the package has one."""
    if not (files("prism_core.spare") / "plots.py").is_file():
        return ""
    plots = importlib.import_module("prism_core.spare.plots")
    return f'<div class="scroll picture">{plots.frontier_svg(plots.curves(plan["frontier"]))}</div>'
