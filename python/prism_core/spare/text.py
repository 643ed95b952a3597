"""What `prism spare` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prism_core.units import duration_text

_NAMES = {
    "spare": "SPARe", "replication": "replication", "checkpoint": "checkpoints only", "elastic": "elastic shrinking",
    "spares": "hot spares",
}  # fmt: skip


def _name(choice: Mapping[str, Any]) -> str:
    details = [f"r {choice['r']}" if choice.get("r") else "", choice.get("placement") or ""]
    if choice.get("spares"):
        details.append(f"{choice['spares']} groups")
    return " ".join([_NAMES[choice["policy"]], *(detail for detail in details if detail)])


def _row(choice: Mapping[str, Any]) -> str:
    name = f"  {_name(choice):<34}"
    summary = choice["simulated"]
    if summary is None:
        return f"{name} gets nowhere: {choice['no_progress']}"
    time = summary["relative_time"]
    row = f"{name} {time['mean']:6.2f} x  (P10 {time['p10']:.2f}, P90 {time['p90']:.2f})"
    if summary["finished"] < summary["runs"]:
        return f"{row}  not finished: {summary['progress']['mean']:.1%} of the steps done by then"
    row += f"  {duration_text(summary['total_s']['mean']):>12}"
    row += f"  {summary['restarts']['mean']:6.1f} restarts  availability {summary['availability']['mean']:.1%}"
    if choice.get("gpu_hours") is not None:
        row += f"  {choice['gpu_hours']:,.0f} GPU h"
    if choice.get("cost") is not None:
        row += f"  cost {choice['cost']:,.0f}"
    return row


def plan_text(found: Mapping[str, Any]) -> str:
    """A recommendation, why, and what it is compared with."""
    best = found["best"]
    lines = [f"{found['groups']} groups, a failure every {duration_text(found['system_mtbf_s'])}", ""]
    if best["simulated"] is None:
        low, high = best["band"]
        lines += [
            f"Recommended: {_name(best)}, a checkpoint every {duration_text(best['interval_s'])}",
            f"  time {best['relative_time']:.2f} x that without failures ({low:.2f} to {high:.2f}), by closed forms",
        ]
    else:
        lines += [f"Recommended: {_name(best)}, a checkpoint every {best['checkpoint_steps']} steps", _row(best)]
    row = next(
        (row for row in found["frontier"] if (row["r"], row["placement"]) == (best["r"], best["placement"])), None
    )
    if row is not None:
        lines += [
            "", "Why:",
            f"  {row['masked']:.0f} failures are masked between two restarts,"
            f" {duration_text(row['restart_every_s'])} apart, for {row['stacks']:.2f} entries per step on average",
        ]  # fmt: skip
        lines += _neighbours(found["frontier"], row)
    for title, key in (("Finalists:", "finalists"), ("Other policies, on the same failures:", "alternatives")):
        if found[key]:
            lines += ["", title, *(_row(choice) for choice in found[key])]
    if found["sensitivities"]:
        lines += ["", "Time if an input were a fifth lower / higher:"]
        lines += [
            f"  {each['input']:<12} {each['lower']:6.2f} x / {each['higher']:.2f} x" for each in found["sensitivities"]
        ]
    if found["unknown"]:
        lines += ["", "Unknown (not given): " + ", ".join(found["unknown"])]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in found["warnings"])])


def _neighbours(rows: list[dict[str, Any]], best: Mapping[str, Any]) -> list[str]:
    """The closed forms around the recommended redundancy."""
    near = [row for row in rows if row["placement"] == best["placement"] and abs(row["r"] - best["r"]) <= 2]
    return ["  by closed forms: " + ", ".join(f"r {row['r']}: {row['relative_time']:.3f} x" for row in near)]


def job_text(found: Mapping[str, Any]) -> str:
    """What a graph says about a job."""
    job, checkpoint = found["job"], found["checkpoint"]
    size = "unknown" if checkpoint["size_bytes"] is None else f"{checkpoint['size_bytes'] / 1e9:,.3f} GB"
    lines = [
        f"{job['groups']} groups of {job['gpus_per_group']} ranks",
        f"  step         {job['step_ns'] / 1e6:,.3f} ms: an entry {job['entry_ns'] / 1e6:,.3f} ms, the rest"
        f" {job['rest_ns'] / 1e6:,.3f} ms ({job['rest_ns'] / max(job['step_ns'], 1):.1%})",
        f"  reduction    {job['reduction_ns'] / 1e6:,.3f} ms alone,"
        f" {job['gradient_bytes'] / 1e9:,.3f} GB a group ({job['gradient_elements']:,} elements)",
        f"  memory       {found['memory']['verdict']}",
        f"  checkpoint   {size} ({checkpoint['basis']}), {duration_text(checkpoint['save_s'])} to write",
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in job["notes"])])


def replayed_text(found: Mapping[str, Any]) -> str:
    """Iterations before, in and after failures."""
    lines = [f"{found['job']['groups']} groups of {found['job']['gpus_per_group']} ranks, r {found['r']}"]
    lines.append(f"{'iteration':>9}  {'replayed':>14}  {'closed form':>14}  {'entries':>7}  {'live':>5}")
    for row in found["iterations"]:
        what = ""
        if row["failed"]:
            what = f"  groups {', '.join(map(str, row['failed']))} die: {row['action']}, {row['moves']} moved entries"
        lines.append(
            f"{row['iteration']:>9}  {row['time_ns'] / 1e6:11,.3f} ms  {row['closed_form_ns'] / 1e6:11,.3f} ms"
            f"  {row['stacks']:>7}  {row['live']:>5}{what}"
        )
    return "\n".join([*lines, *(f"note: {note}" for note in found["job"]["notes"])])


def simulate_text(summary: Mapping[str, Any], policy: str, r: int | None) -> str:
    """One policy's results."""
    lines = [_row({"policy": policy, "r": r, "simulated": summary, "no_progress": None}).strip()]
    for key, what in (("failures", "failures"), ("reorders", "reorders"), ("repeated_steps", "repeated steps"),
                      ("mean_stacks", "entries per step"), ("goodput", "goodput")):  # fmt: skip
        band = summary[key]
        lines.append(
            f"  {what:<18} {band['mean']:10.3f}  (P10 {band['p10']:.3f}, P50 {band['p50']:.3f}, P90 {band['p90']:.3f})"
        )
    if summary["beyond_trace"]:
        lines.append(
            f"  warning: {summary['beyond_trace']} runs went on after the end of the trace: nothing failed then"
        )
    converged = "converged" if summary["is_converged"] else "not converged: ask for more seeds"
    return "\n".join([*lines, f"  {summary['runs']} runs, {converged}"])
