"""In what two graphs of one job differ, op for op: `prism inspect A --against B`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from prism_core import _native
from prism_core.replay import open_graph

#: What may be left out of a comparison: durations of computation, host time, memory taken from and given to the driver.
Ignored = Literal["durations", "host", "memory"]
IGNORED: tuple[Ignored, ...] = ("durations", "host", "memory")

GraphLike = _native.Graph | str | os.PathLike[str]

_SHOWN = 12


def compare_graphs(left: GraphLike, right: GraphLike, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """Compares two graphs rank by rank: ops, streams, communicators, peers, bytes, iterations, durations.

    How the graphs number their communicators, names and op programs does not count, nor do facts about how they came
    about; those that differ are listed as `meta`.

    Args:
        left: A graph, or the path of its file.
        right: The other.
        ignore: Any of `IGNORED`.

    Returns:
        `equal`; `world_size` and `ops` of both; `ranks_differing`; `differing`, the number of ops by what differs;
        `first`, the first differences with `rank`, `ranks` (how many ranks differ there in the same way), `op`, `what`,
        `left` and `right`; `meta`, the names of facts that are not the same.
    """
    one, other = _opened(left), _opened(right)
    document: dict[str, Any] = json.loads(one.difference_json(other, list(ignore)))
    mine, theirs = one.meta, other.meta
    document["ignored"] = list(ignore)
    document["meta"] = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
    return document


def _opened(graph: GraphLike) -> _native.Graph:
    return graph if isinstance(graph, _native.Graph) else open_graph(graph)


def difference_text(document: Mapping[str, Any]) -> str:
    """What `prism inspect A --against B` prints."""
    ignored = f" ({', '.join(document['ignored'])} ignored)" if document["ignored"] else ""
    if document["equal"]:
        return f"equal{ignored}: {document['world_size'][0]} ranks, {document['ops'][0]:,} ops"
    return "\n".join(_lines(document, ignored))


def _lines(document: Mapping[str, Any], ignored: str) -> Iterable[str]:
    ranks, ops = document["world_size"], document["ops"]
    if ranks[0] != ranks[1]:
        yield f"jobs of {ranks[0]} and {ranks[1]} ranks are not compared"
        return
    yield f"not equal{ignored}: {document['ranks_differing']} of {ranks[0]} ranks differ; {ops[0]:,} and {ops[1]:,} ops"
    for what, count in sorted(document["differing"].items(), key=lambda entry: (-entry[1], entry[0])):
        yield f"  {what}: {count:,} op{'' if count == 1 else 's'}"
    for entry in document["first"][:_SHOWN]:
        more = f" and {entry['ranks'] - 1} more" if entry["ranks"] > 1 else ""
        yield f"rank {entry['rank']}{more}, op {entry['op']}, {entry['what']}:"
        yield f"  left   {entry['left']}"
        yield f"  right  {entry['right']}"
    if len(document["first"]) > _SHOWN:
        yield "..."
