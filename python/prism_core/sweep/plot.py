"""The picture of a sweep, as SVG: a bar per configuration, the best on top; what does not fit is hatched."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from prism_core.sweep.results import cost

_ROW, _LEFT, _WIDTH, _RIGHT, _TOP = 22, 250, 900, 130, 46
#: Configurations in a picture; the worst beyond are left out, and the picture says so.
_SHOWN = 60

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #171b24; } 
.soft { fill: #5d6675; } .title { font-size: 16px; font-weight: 600; }
.fits { fill: #2f6fd6; } .best { fill: #1a8f5a; } .over { fill: #d8435a; fill-opacity: 0.55; }
.unknown { fill: #7b8794; }
.ground { fill: #ffffff; } line { stroke: #e2e6ec; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebf1; } .soft { fill: #98a2b3; } .ground { fill: #171b23; } line { stroke: #2a303c; }
}
"""


def sweep_svg(records: Sequence[Mapping[str, Any]], title: str) -> str:
    """The picture of ranked records; the same records give the same text."""
    done = [record for record in records if record["error"] is None]
    shown = done[:_SHOWN]
    most = max((cost(record) for record in shown), default=1.0) or 1.0
    height = _TOP + _ROW * len(shown) + 34
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    per_sample = any(record["samples"] for record in shown)
    rows = "".join(_row(record, at, scale) for at, record in enumerate(shown))
    ticks = "".join(
        f'<line x1="{_LEFT + tick * most / 4 * scale:.1f}" x2="{_LEFT + tick * most / 4 * scale:.1f}" y1="{_TOP - 6}" '
        f'y2="{height - 30}"/>'
        for tick in range(5)
    )
    left_out = len(records) - len(shown)
    remark = f"{left_out} configurations failed or are left out" if left_out else ""
    what = "time per sample" if per_sample else "iteration time"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{html.escape(title, quote=True)}"><style>{_STYLE}</style>'
        f'<rect class="ground" width="{_WIDTH}" height="{height}"/>{ticks}'
        f'<text class="title" x="14" y="26">{html.escape(title)}</text>{rows}'
        f'<text class="soft" x="{_LEFT}" y="{height - 10}">{what}; red does not fit its card. {remark}</text></svg>\n'
    )


def _row(record: Mapping[str, Any], at: int, scale: float) -> str:
    top = _TOP + _ROW * at
    kind = "over" if record["fits"] is False else "best" if record["rank"] == 1 else "fits"
    if record["fits"] is None and record["rank"] != 1:
        kind = "unknown"
    width = max(cost(record) * scale, 1.0)
    name = record["name"] if len(record["name"]) <= 36 else record["name"][:35] + "…"
    return (
        f'<text x="{_LEFT - 10}" y="{top + 14}" text-anchor="end">{html.escape(name)}</text>'
        f'<rect class="{kind}" x="{_LEFT}" y="{top + 2}" width="{width:.1f}" height="{_ROW - 6}" rx="3">'
        f"<title>{html.escape(record['name'])}</title></rect>"
        f'<text class="soft" x="{_LEFT + width + 7:.1f}" y="{top + 14}">{cost(record) / 1e6:,.3f} ms</text>'
    )
