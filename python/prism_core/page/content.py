"""What a report says, gathered from a graph, from a run folder, or from both."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.config import check_slow
from prism_core.diagnose import diagnose
from prism_core.errors import ConfigError
from prism_core.perturb import Perturb, perturbation_text
from prism_core.replay import open_graph

#: Where a plan of `prism spare plan --json` may lie in a run folder.
SPARE = "spare.json"
_FACTS = ("command", "device", "ranks_run", "ranks_inferred", "ranks_verified", "iterations", "tool_version", "source")

Content = dict[str, Any]


def gather_job(
    source: _native.Graph | str | os.PathLike[str],
    *,
    slow: Mapping[int, float] | None = None,
    perturb: Perturb | None = None,
    iteration: int | None = None,
    card_bytes: int | None = None,
    title: str | None = None,
) -> Content:
    """Everything about a job from its graph; with `slow` or `perturb` also how it was before.

    Args:
        source: The graph, or the path of its file.
        slow: Slow-down of single ranks' compute, for example `{4242: 1.3}`.
        perturb: Changes to the job, as for `prism_core.replay`.
        iteration: Which iteration, from 0; the last if not said.
        card_bytes: Memory of a card, if other than the profile's.
        title: Headline of the page; the file's name if not said.

    Returns:
        The content of a page: `diagnosis`, `overview`, `memory`, `before`, `provenance_ns` and more.
    """
    graph = source if isinstance(source, _native.Graph) else open_graph(source)
    name = title or (None if isinstance(source, _native.Graph) else Path(source).name)
    how = {"iteration": iteration, "card_bytes": card_bytes}
    changes = {"slow": check_slow(slow or {}, graph.world_size), "perturb": perturbation_text(perturb)}
    summary = json.loads(graph.summary_json())
    content: Content = {
        "title": name or "A job",
        "world_size": graph.world_size,
        "facts": _facts(graph.meta),
        "ops": graph.num_ops,
        "provenance_ns": summary["device_time"]["by_provenance_ns"],
        "class_ns": summary["device_time"]["by_class_ns"],
        "changes": _told(changes),
        "before": None,
        "run": None,
        "spare": None,
        **_look(graph, slow or {}, changes, how),
    }
    if content["changes"]:
        content["before"] = _look(graph, {}, {"slow": {}, "perturb": None}, how, sensitivities=False)
    return content


def gather_run(folder: Path, summary: Content, timing: Content, graph: Path | None = None) -> Content:
    """Everything about a run. With the graph it ran against also what all ranks of the job do.

    Args:
        folder: The run folder.
        summary: Its `summary.json`.
        timing: Its `timing.json`.
        graph: The graph, or nothing.
    """
    content: Content = {
        "title": folder.resolve().name,
        "world_size": summary["world_size"],
        "facts": {"command": summary["command"]},
        "ops": summary.get("ops", 0),
        "provenance_ns": summary["device_time"]["by_provenance"],
        "class_ns": summary["device_time"]["by_class"],
        "changes": _told({"slow": summary.get("slow") or {}, "perturb": summary.get("perturb")}),
        "before": None,
        "diagnosis": None,
        "overview": None,
        "memory": None,
        "why_not": f"what all ranks do is in the job's graph: prism report {folder} --graph JOB.prism -o report.html",
        "run": {"summary": summary, "timing": timing},
        "spare": _spare_plan(folder),
    }
    if graph is None:
        return content
    opened = open_graph(graph)
    if opened.world_size != summary["world_size"]:
        raise ConfigError(
            f"{graph} is a job of {opened.world_size} ranks, the run in {folder} one of {summary['world_size']}: "
            "it is not the graph of this run"
        )
    slow = {int(rank): factor for rank, factor in (summary.get("slow") or {}).items()}
    job = gather_job(opened, slow=slow, perturb=summary.get("perturb"))
    taken = ("before", "diagnosis", "overview", "memory", "why_not", "provenance_ns", "class_ns")
    return content | {key: job[key] for key in taken} | {"facts": job["facts"] | content["facts"]}


def _look(
    graph: _native.Graph,
    slow: Mapping[int, float],
    changes: Mapping[str, Any],
    how: Mapping[str, Any],
    *,
    sensitivities: bool = True,
) -> Content:
    """The job in one state: explained, and in one picture."""
    found = json.loads(_native.overview_json(graph, json.dumps({**changes, **how})))
    is_known = found["why_not"] is None
    diagnosis = diagnose(graph, slow=slow, perturb=changes["perturb"], sensitivities=sensitivities, **how)
    return {
        "diagnosis": diagnosis,
        "overview": found["overview"],
        "memory": found["memory"],
        "why_not": None if is_known else found["why_not"],
    }


def _facts(meta: Mapping[str, str]) -> dict[str, str]:
    """What the graph says of its origin, on one line each."""
    facts = {key: meta[key] for key in _FACTS if meta.get(key)}
    profile = meta.get("profile", "")
    names = [line.partition("=")[2].strip().strip('"') for line in profile.splitlines() if line.startswith("name")]
    return facts | ({"profile": names[0]} if names else {})


def _told(changes: Mapping[str, Any]) -> list[str]:
    """Perturbations in words."""
    told = [f"compute of rank {rank} takes {factor:g} times as long" for rank, factor in changes["slow"].items()]
    return told + ([changes["perturb"].strip()] if changes["perturb"] else [])


def _spare_plan(folder: Path) -> Content | None:
    path = folder / SPARE
    if not path.is_file():
        return None
    try:
        plan: Content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if not isinstance(plan, dict) or "frontier" not in plan:
        raise ConfigError(f"{path} is no plan: write it with `prism spare plan --json`")
    return plan
