"""The HTML report of a plan: nothing but itself is needed to read it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from prism_core.spare.plots import curves, frontier_svg, timeline_svg
from prism_core.spare.text import job_text, plan_text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2330; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid #d9dee7; padding: 0.2rem 0.8rem 0.2rem 0; }
td { text-align: right; } pre { overflow-x: auto; background: #f4f6f9; padding: 0.8rem; }
"""


def plan_html(found: Mapping[str, Any]) -> str:
    """A plan (of `plan` or `plan_job`) as a page: frontier, sensitivities, alternatives, timeline."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Fault tolerance</title>",
        f"<style>{_STYLE}</style><h1>Fault tolerance of {found['groups']} groups</h1>",
    ]
    if "job" in found:
        parts.append(f"<h2>The job</h2><pre>{html.escape(job_text(found))}</pre>")
    parts.append(f"<h2>Recommendation</h2><pre>{html.escape(plan_text(found))}</pre>")
    parts.append("<h2>Time over redundancy, by closed forms</h2>" + frontier_svg(curves(found["frontier"])))
    if found["sensitivities"]:
        rows = [(each["input"], f"{each['lower']:.3f} x", f"{each['higher']:.3f} x") for each in found["sensitivities"]]
        parts.append("<h2>What it depends on</h2>" + _table(("input", "a fifth lower", "a fifth higher"), rows))
    if found.get("timeline"):
        svg = timeline_svg(found["timeline"], groups=found["groups"], title="as recommended")
        parts.append("<h2>One training</h2>" + svg)
    return "\n".join(parts) + "</html>\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"
