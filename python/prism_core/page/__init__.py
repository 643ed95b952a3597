"""The report as one HTML file that needs nothing but itself: no network, no library.

`content.py` gathers what there is to say about a run or a job, `render.py` writes it down; style and script of the page
are files of their own in `templates`. The same content gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prism_core.page.content import Content, gather_job, gather_run
from prism_core.page.render import render
from prism_core.report import SUMMARY, TIMING, read_run, to_json

__all__ = ["REPORT", "Content", "gather", "gather_job", "gather_run", "render", "write_report", "write_run"]

REPORT = "report.html"


def write_run(folder: Path, summary: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
    """Writes the files of a run folder; its page does without the graph, which takes longer to look at."""
    (folder / SUMMARY).write_text(to_json(summary), encoding="utf-8")
    (folder / TIMING).write_text(to_json(timing), encoding="utf-8")
    (folder / REPORT).write_text(render(gather_run(folder, dict(summary), dict(timing))), encoding="utf-8")


def gather(source: Path, graph: Path | None = None, **how: Any) -> Content:
    """The content of a page about a graph file or a run folder.

    Args:
        source: Either of them.
        graph: The graph of a run. By default the one it ran against, where that is still there.
        how: As for `gather_job` (graphs only).
    """
    if not source.is_dir():
        return gather_job(source, **how)
    summary, timing = read_run(source)
    recorded = Path(timing.get("graph", ""))
    return gather_run(source, summary, timing, graph or (recorded if recorded.is_file() else None))


def write_report(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    graph: str | os.PathLike[str] | None = None,
    **how: Any,
) -> Content:
    """Writes one self-contained HTML page about a graph file or a run folder, as `prism report -o` does.

    Args:
        source: A graph file or a run folder.
        output: The file to write.
        graph: The graph of a run. By default the one it ran against, where that is still there.
        how: `slow`, `perturb`, `iteration`, `card_bytes`, as for `gather_job` (graphs only).

    Returns:
        What the page is made of.
    """
    content = gather(Path(source), None if graph is None else Path(graph), **how)
    Path(output).write_text(render(content), encoding="utf-8")
    return content
