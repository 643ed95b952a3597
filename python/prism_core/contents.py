"""What is in a graph, for people: roles and who plays them, communicators, ops, bytes, memory, provenance, a map."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prism_core import _native
from prism_core import report as reports
from prism_core.report import _first_line, _mebibytes, _sandbox_rows, _share_rows, _table, clock_rows
from prism_core.rolemap import draw, letters, role_map

#: Entry of a graph's facts: what the ranks that were run used, and how their values came about.
META_RANKS = "ranks"
_SHOWN = 8
_RUNS = 6
#: Facts that are long, or said elsewhere.
_HIDDEN = frozenset({"profile", "published", "kernels", META_RANKS, "clocks"})


def facts_of_ranks(ranks: Iterable[Mapping[str, Any]]) -> str:
    """What is kept in a graph of the ranks that were run: peaks by rank, and payloads by tier, as text."""
    peaks: dict[str, list[int]] = {}
    tiers: Counter[tuple[str, str]] = Counter()
    for rank in ranks:
        peaks[str(rank["rank"])] = [rank["peak_allocated_bytes"], rank["peak_reserved_bytes"]]
        for use in rank["tiers"]:
            tiers[use["tier"], use["call"]] += use["count"]
    counted = [{"tier": tier, "call": call, "count": count} for (tier, call), count in sorted(tiers.items())]
    return json.dumps({"peaks": peaks, "tiers": counted})


def describe(graph: _native.Graph) -> dict[str, Any]:
    """The contents of a graph as `prism inspect --json` prints them."""
    document: dict[str, Any] = json.loads(graph.summary_json())
    roles = graph.rank_roles()
    facts = json.loads(graph.meta.get(META_RANKS, "{}"))
    for number, role in enumerate(document["roles"]):
        role["letter"] = letters(number)
        role["peak_allocated_bytes"], role["peak_reserved_bytes"] = None, None
    for rank, (allocated, reserved) in facts.get("peaks", {}).items():
        role = document["roles"][roles[int(rank)]]
        role["peak_allocated_bytes"] = max(allocated, role["peak_allocated_bytes"] or 0)
        role["peak_reserved_bytes"] = max(reserved, role["peak_reserved_bytes"] or 0)
    document["tiers"] = facts.get("tiers", [])
    document["clocks"] = json.loads(graph.meta["clocks"]) if "clocks" in graph.meta else None
    document["role_map"] = role_map(graph.world_size, roles, document["communicators"])
    return document


def contents_text(document: Mapping[str, Any]) -> str:
    """What `prism inspect` prints."""
    if document.get("level") == "message":
        return reports.inspect_text(document)
    per_op = document["bytes_per_op"]
    rows = [
        ("ranks", str(document["world_size"])),
        ("ops", f"{document['ops']:,} in {_mebibytes(document['graph_bytes'])} ({per_op:.3f} bytes each)"),
        *(row for role in _most_ranks(document["roles"]) for row in _role_rows(role)),
        *(("communicators", line) for line in _family_lines(document["communicators"])),
        *_sandbox_rows(document),
        *_kind_rows(document),
        *_share_rows(document["device_time"]["by_provenance_ns"]),
        *(("values", f"{use['call']} {use['tier']}: {use['count']:,}") for use in document["tiers"]),
        *clock_rows(document["clocks"]),
        *((f"meta {name}", _first_line(value)) for name, value in document["meta"].items() if name not in _HIDDEN),
    ]
    return "\n".join([_table(rows), "", "roles by place", *draw(document["role_map"])])


def _most_ranks(roles: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Some roles: those of most ranks, in the order of the graph."""
    most = sorted(roles, key=lambda role: -role["ranks"])[: 2 * _SHOWN]
    return [role for role in roles if role in most]


def runs_text(runs: Sequence[Sequence[int]], ranks: int) -> str:
    """Ranks as ranges with strides, such as `0-56/8`."""
    texts = []
    for first, last, step in runs[:_RUNS]:
        if first == last:
            texts.append(str(first))
        elif step == 1:
            texts.append(f"{first}-{last}")
        else:
            texts.append(f"{first}-{last}/{step}")
    more = ",..." if len(runs) > _RUNS else ""
    return f"{'rank' if ranks == 1 else 'ranks'} {','.join(texts)}{more}"


def _role_rows(role: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    who = f"{runs_text(role['rank_runs'], role['ranks'])} ({role['ranks']})"
    yield f"role {role['letter']}", f"{who}: {role['ops']:,} ops on {role['streams']} streams"
    held = [("driver", role["peak_device_bytes"]), ("reserved", role["peak_reserved_bytes"])]
    held.append(("allocated", role["peak_allocated_bytes"]))
    peaks = ", ".join(f"{_mebibytes(size)} {name}" for name, size in held if size)
    compute = f"{role['compute_ns'] / 1e6:.3f} ms of computation, {_mebibytes(role['payload_bytes'])} to NCCL"
    yield "", compute + (f"; peaks {peaks}" if peaks else "")


def _family_lines(families: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    used = [family for family in families if family["calls"]] or list(families)
    for family in used[: 2 * _SHOWN]:
        stride = "" if family["stride"] is None else f" every {family['stride']}"
        calls = ", ".join(f"{kind} {count:,}" for kind, count in family["calls"].items())
        yield f"{family['count']:,} of {family['size']:,} ranks{stride}" + (f": {calls}" if calls else "")
    unused = len(families) - len(used)
    if unused:
        yield f"{unused} more kinds without a call"


def _kind_rows(document: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for kind, count in document["ops_by_kind"].items():
        total = document["communication"].get(kind)
        yield kind, f"{count:,}" + (f", {_mebibytes(total['payload_bytes'])}" if total else "")
