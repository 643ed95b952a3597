"""What a run folder says about itself: why it failed, whose card is too small, or what its graph explains."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prism_core.report import read_run

_GIB = 1 << 30
_UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"(\d+(?:\.\d+)?) (bytes|B|KiB|MiB|GiB|TiB)"
#: PyTorch's words for it (c10/cuda/CUDACachingAllocator.cpp).
_TORCH = re.compile(
    rf"CUDA out of memory\. Tried to allocate {_SIZE}\. "
    rf"GPU \d+ has a total capacity of {_SIZE} of which {_SIZE} is free"
)
#: Bytes at the end of a rank's output that are looked at.
_TAIL = 1 << 16


def diagnose_run(folder: Path, card_bytes: int | None, explain: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The answer about a run.

    Args:
        folder: The run folder.
        card_bytes: Memory of another card than the one the run had, if that is the question.
        explain: Explains the graph of the run (`slow`, `perturb`) as `diagnose` does.

    Returns:
        The document of `prism diagnose RUN --json` (docs/diagnose.md).
    """
    summary, timing = read_run(folder)
    error = summary["error"]
    ranks = [
        {key: rank[key] for key in ("rank", "iterations", "last_op", "exit_code")}
        for rank in summary["ranks"]
        if error or rank["exit_code"]
    ]
    memory = _exhausted(folder, summary) if error else _too_small(summary, card_bytes)
    iterations = len(summary["iteration_time_ns"])
    headline = error["message"].splitlines()[0] if error else f"the run is complete: {iterations} iterations, no error"
    graph, job = Path(timing.get("graph", "")), None
    if not error and graph.is_file():
        slow = {int(rank): factor for rank, factor in (summary.get("slow") or {}).items()}
        job = explain(graph, slow=slow, perturb=summary.get("perturb"))
        headline = job["headline"]
    return {
        "headline": memory["headline"] if memory else headline,
        "world_size": summary["world_size"],
        "run": {"error": error, "command": summary["command"], "sandbox": summary["sandbox"], "ranks": ranks},
        "memory": memory,
        "job": job,
        "iteration_time_ns": summary["iteration_time_ns"],
        "notes": list(dict.fromkeys([*summary["notes"], *(job["notes"] if job else [])])),
    }


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _exhausted(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rank that asked for more than its card had, by what the program's allocator said."""
    first = summary["error"].get("rank")
    ranks = sorted(summary["ranks"], key=lambda rank: (rank["rank"] != first, rank["rank"]))
    for rank in ranks:
        path = folder / "logs" / f"rank-{rank['rank']}.log"
        found = _TORCH.search(_tail(path))
        if found is None:
            continue
        asked, capacity, free = (_bytes(*found.group(at, at + 1)) for at in (1, 3, 5))
        over = max(asked - free, 0)
        after = f", after {rank['last_op']}" if rank["last_op"] else ""
        return {
            "headline": f"out of memory: rank {rank['rank']} asks for {_gib(asked)} in iteration {rank['iterations']}"
            f"{after}; its card of {_gib(capacity)} has {_gib(free)} left: {_gib(over)} too little",
            "rank": rank["rank"], "iteration": rank["iterations"], "last_op": rank["last_op"], "asked_bytes": asked,
            "free_bytes": free, "card_bytes": capacity, "over_by_bytes": over,
        }  # fmt: skip
    return None


def _too_small(summary: Mapping[str, Any], card_bytes: int | None) -> dict[str, Any] | None:
    """The fullest sandbox rank, if another card would be too small for it."""
    if card_bytes is None or not summary["ranks"]:
        return None

    def need(rank: Mapping[str, Any]) -> int:
        return int(max(rank["peak_device_bytes"], rank["peak_reserved_bytes"]) + rank["nccl_buffer_bytes"])

    fullest = max(summary["ranks"], key=lambda rank: (need(rank), -rank["rank"]))
    over = need(fullest) - card_bytes
    if over <= 0:
        return None
    return {
        "headline": f"out of memory on such a card: rank {fullest['rank']} needs {_gib(need(fullest))}, NCCL's buffers "
        f"included, of {_gib(card_bytes)}: {_gib(over)} too little, without the CUDA context",
        "rank": fullest["rank"], "iteration": fullest["iterations"], "last_op": fullest["last_op"],
        "asked_bytes": need(fullest), "free_bytes": 0, "card_bytes": card_bytes, "over_by_bytes": over,
    }  # fmt: skip


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _tail(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL, 0))
        return file.read().decode(errors="replace")
