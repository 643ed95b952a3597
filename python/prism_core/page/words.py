"""Numbers and escaped text, as the page shows them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MIB, GIB = 1 << 20, 1 << 30


def escape(text: object) -> str:
    """Text that is nothing but text, in an element or an attribute."""
    return html.escape(str(text), quote=True)


def time_text(nanoseconds: float) -> str:
    """A time in the unit that suits it."""
    for limit, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(nanoseconds) >= limit:
            value = nanoseconds / limit
            digits = 1 if value >= 100 else 2 if value >= 10 else 3
            return f"{value:,.{digits}f} {unit}"
    return f"{nanoseconds:.0f} ns"


def bytes_text(size: float) -> str:
    """A size in GiB or MiB."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


def percent(part: float, whole: float) -> str:
    """A share of something; a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def ranges_text(ranges: Sequence[Sequence[int]], count: int) -> str:
    """Ranges of ranks as the engine gives them, cut, and how many there are."""
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:4])
    shown = sum(last - first + 1 for first, last in ranges[:4])
    return listed + (f", … ({count:,} in all)" if shown < count else "")


def communicator_text(size: int, stride: int | None, example: Sequence[int]) -> str:
    """Who is in communicators of one shape."""
    if size == 1:
        return "single ranks"
    if stride == 1:
        return f"{size:,} neighbours"
    if stride is not None:
        return f"{size:,} ranks, every {stride:,}" if size > 2 else f"pairs, {stride:,} apart"
    return f"{size:,} ranks ({', '.join(map(str, example[:4]))}, …)"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """A table of cells that are HTML already; columns in `numbers` are set to the right."""
    right = set(numbers)

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="n">{cell}</{tag}>' if at in right else f"<{tag}>{cell}</{tag}>"
            for at, cell in enumerate(row)
        )

    header = f"<thead><tr>{cells('th', [escape(cell) for cell in head])}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{header}<tbody>{body}</tbody></table></div>'


def stacked(parts: Sequence[tuple[str, float, str]], label: str) -> str:
    """A bar of parts (name, size, class of its colour) and its legend."""
    whole = sum(size for _, size, _ in parts)
    if whole <= 0:
        return ""
    pieces = "".join(
        f'<span class="{kind}" style="width:{100 * size / whole:.3f}%" title="{escape(name)}"></span>'
        for name, size, kind in parts
        if size > 0
    )
    legend = "".join(
        f'<li><i class="{kind}"></i>{escape(name)} <b>{percent(size, whole)}</b></li>'
        for name, size, kind in parts
        if size > 0
    )
    return f'<div class="stack" role="img" aria-label="{escape(label)}">{pieces}</div><ul class="legend">{legend}</ul>'


def bar(share: float, kind: str = "compute") -> str:
    """A bar of a share of its cell."""
    return bars({kind: share})


def bars(shares: Mapping[str, float]) -> str:
    """Bars of shares of one cell, one behind the other, by colour."""
    pieces = "".join(
        f'<span class="{kind}" style="width:{100 * max(0.0, min(1.0, share)):.2f}%"></span>'
        for kind, share in shares.items()
    )
    return f'<div class="bar">{pieces}</div>'


def pairs(facts: Mapping[str, Any]) -> str:
    """Names and values, escaped."""
    rows = "".join(f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    return f"<dl>{rows}</dl>"
