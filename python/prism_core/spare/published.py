"""The published set-ups (arXiv 2603.00357), as published and with a fair baseline, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prism_core.spare.planning import frontier, simulate

#: Groups; all-reduce, s; redundancy, published time and availability of replication and of SPARe.
SETUPS: Sequence[dict[str, Any]] = (
    {"groups": 200, "all_reduce_s": 2.0, "replication": (3, 6.07, 0.617), "spare": (9, 2.92, 0.870)},
    {"groups": 600, "all_reduce_s": 6.0, "replication": (3, 4.27, 0.799), "spare": (8, 2.49, 0.939)},
)
SAVE_S, RESTART_S, MTBF_S, STEP_S, SHAPE = 58.8, 3600.0, 300.0, 64.0, 0.78


def _checkpoint_steps(groups: int, r: int, policy: str, all_reduce_s: float) -> int:
    """The best interval of the closed forms, in steps."""
    placement = "golomb" if policy == "spare" else "disjoint"
    [row] = frontier(
        groups, save_s=SAVE_S, restart_s=RESTART_S, system_mtbf_s=MTBF_S, redundancy=(r, r), placements=[placement]
    )
    stacks: float = row["stacks"] if policy == "spare" else r
    interval_s: float = row["interval_s"]
    return max(1, round((interval_s - SAVE_S) / (stacks * STEP_S + all_reduce_s)))


def published(seeds: int = 16, threads: int = 0) -> list[dict[str, Any]]:
    """Simulates the published set-ups: 10,000 steps of 64 s, a failure every 300 s (Weibull 0.78), one hour to restart.

    Returns:
        Rows with groups, policy, r, checkpoint_steps, `published` (time and availability in print), `as_published` and
        `fair` (summaries: with the baseline's handicaps, and without). The interval between checkpoints is the best
        one of the closed forms.
    """
    rows = []
    for setup in SETUPS:
        for policy in ("replication", "spare"):
            r, time, availability = setup[policy]
            steps = _checkpoint_steps(setup["groups"], r, policy, setup["all_reduce_s"])
            summaries = {
                name: simulate(
                    setup["groups"], compute_s=STEP_S, steps=10_000, save_s=SAVE_S, restart_s=RESTART_S,
                    checkpoint_steps=steps, all_reduce_s=setup["all_reduce_s"], policy=policy,
                    r=r, system_mtbf_s=MTBF_S, weibull_shape=SHAPE, shrink_s=0.1, jitter=0.05, published=handicapped,
                    give_up=50.0, seeds=seeds, threads=threads,
                )["summary"]
                for name, handicapped in (("as_published", True), ("fair", False))
            }  # fmt: skip
            rows.append(
                {"groups": setup["groups"], "policy": policy, "r": r, "checkpoint_steps": steps,
                 "published": {"relative_time": time, "availability": availability}, **summaries}
            )  # fmt: skip
    return rows


def published_text(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table, with SPARe's gain over replication."""
    head = f"{'':<26}{'in print':>18}{'as published':>30}{'fair baseline':>30}"
    lines = [head, f"{'':<26}{'time   avail.':>18}" + f"{'time   avail.  wipe-outs':>30}" * 2]
    for row in rows:
        name = f"N {row['groups']}, {row['policy']} r {row['r']}"
        printed = row["published"]
        line = f"{name:<26}{printed['relative_time']:9.2f}{printed['availability']:8.1%} "
        for key in ("as_published", "fair"):
            found = row[key]
            line += f"{found['relative_time']['mean']:11.2f}{found['availability']['mean']:8.1%}"
            line += f"{found['restarts']['mean']:11.1f}"
        lines.append(line)
    for baseline, spare in zip(rows[::2], rows[1::2], strict=True):
        gains = []
        for key in ("published", "as_published", "fair"):
            pair = [each[key]["relative_time"] for each in (spare, baseline)]
            times = [value["mean"] if isinstance(value, dict) else value for value in pair]
            gains.append(f"{1 - times[0] / times[1]:.1%}")
        lines.append(f"gain at N {spare['groups']}: {gains[0]} in print, {gains[1]} as published, {gains[2]} fair")
    return "\n".join(lines)
