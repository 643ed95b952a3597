"""Export: a job in the form of another tool."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from prism_core import _native
from prism_core.config import check_ranks, check_slow
from prism_core.errors import ConfigError
from prism_core.perturb import Perturb, perturbation_text
from prism_core.replay import Messages, open_graph

Format = Literal["goal"]
TimelineFormat = Literal["perfetto", "chrome"]
#: Ranks in a timeline if nobody says which.
_DEFAULT_RANKS = 8


def export(
    graph_or_path: _native.Graph | str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: Format = "goal",
    *,
    messages: Messages = "coarse",
    tick_ps: int = 1000,
    rendezvous: bool = True,
) -> dict[str, Any]:
    """Writes a job as a program of calculations, sends and receives, in GOAL text as LogGOPSim reads it.

    Sizes are kept, links are not: the reader's network carries everything alike. `docs/contention.md` says what else
    a message program cannot tell.

    Args:
        graph_or_path: The graph, or the path of its file.
        output: The file to write.
        format: `goal`.
        messages: `coarse` has one message per ring step, `fine` cuts rings as NCCL does.
        tick_ps: Picoseconds per unit of time in the file; durations are rounded to it.
        rendezvous: Mark messages between two ranks as rendezvous (a comment other readers skip).

    Returns:
        What was written: `ranks`, `ops`, `sends`, `sent_bytes`, `tick_ps`, `file_bytes`.

    Raises:
        ConfigError: The format is unknown, an option is out of range, or the job is too large.
        OSError: The file cannot be written.
    """
    if format != "goal":
        raise ConfigError(f"format is {format!r}: it must be goal")
    if isinstance(tick_ps, bool) or not isinstance(tick_ps, int) or tick_ps < 1:
        raise ConfigError(f"tick_ps is {tick_ps!r}: it must be a whole number of at least 1")
    graph = graph_or_path if isinstance(graph_or_path, _native.Graph) else open_graph(graph_or_path)
    options = {"messages": messages, "tick_ps": tick_ps, "rendezvous": rendezvous}
    document: dict[str, Any] = json.loads(_native.export_goal(graph, str(output), json.dumps(options)))
    return {"output": str(output), **document, "file_bytes": Path(output).stat().st_size}


def export_timeline(
    graph_or_path: _native.Graph | str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: TimelineFormat = "perfetto",
    *,
    ranks: Sequence[int] | None = None,
    slow: Mapping[int, float] | None = None,
    perturb: Perturb | None = None,
) -> dict[str, Any]:
    """Writes what some ranks of a job do when, replayed among all its ranks, for a trace viewer.

    Args:
        graph_or_path: The graph, or the path of its file.
        output: The file to write.
        format: `perfetto` (protobuf) or `chrome` (JSON; chrome://tracing, Perfetto, Holistic Trace Analysis).
        ranks: Which ranks; the first eight if not said.
        slow: Slow-down of single ranks' compute, for example `{4242: 1.3}`.
        perturb: Changes to the job, as for `prism_core.replay`.

    Returns:
        What was written: `ranks`, `slices`, `marks`, `memory_changes`, `file_bytes`.

    Raises:
        ConfigError: The format is unknown, a rank is none of the job's, or the job is too large for a timeline.
        OSError: The file cannot be written.
    """
    graph = graph_or_path if isinstance(graph_or_path, _native.Graph) else open_graph(graph_or_path)
    options = {
        "format": format,
        "ranks": check_ranks(
            range(min(_DEFAULT_RANKS, graph.world_size)) if ranks is None else ranks, graph.world_size
        ),
        "slow": check_slow(slow or {}, graph.world_size),
        "perturb": perturbation_text(perturb),
    }
    document: dict[str, Any] = json.loads(_native.export_timeline(graph, str(output), json.dumps(options)))
    return {"output": str(output), **document, "file_bytes": Path(output).stat().st_size}


def export_text(document: Mapping[str, Any]) -> str:
    """What `prism export` prints."""
    if "slices" in document:
        size = document["file_bytes"] / (1 << 20)
        return f"{document['output']}: {document['slices']:,} slices of {document['ranks']:,} ranks, {size:.1f} MiB"
    counts = f"{document['ops']:,} ops of {document['ranks']:,} ranks, {document['sends']:,} messages"
    size = document["file_bytes"] / (1 << 20)
    return f"{document['output']}: {counts}, {size:.1f} MiB, 1 tick = {document['tick_ps']} ps"
