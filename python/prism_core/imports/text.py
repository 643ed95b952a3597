"""Accounts of imports, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Entries shown of one kind of repair.
_SHOWN = 3


def kineto_text(document: Mapping[str, Any]) -> str:
    """What `prism import kineto` prints."""
    found = document["collectives"]
    recorded, replayed = document["recorded_iteration_time_ns"], document["replayed_iteration_time_ns"]
    lines = [
        f"{_head(document)}, {document['ops']:,} ops from {document['events']:,} events",
        f"collectives: matched {found['matched']}, inferred {found['inferred']}, unmatched {found['unmatched']} "
        f"(kernels of NCCL: {found['kernels']})",
        *(f"  unmatched: {line}" for line in document["unmatched"][:_SHOWN]),
        f"iterations: {len(recorded)}, recorded {_milliseconds(recorded)} ms, replayed {_milliseconds(replayed)} ms, "
        f"worst error {100 * document['worst_error']:.3f} %",
    ]
    joined = document["execution_traces"]
    if joined["files"]:
        lines.append(
            f"execution traces: {joined['files']}; of {joined['spans']} calls {joined['by_id']} found by id, "
            f"{joined['by_order']} by order, {joined['unmatched']} not"
        )
    total = document["device_time"]
    lines.append(f"device time: {total['before_ns'] / 1e6:,.3f} ms recorded, {total['after_ns'] / 1e6:,.3f} ms used")
    for late in document["late"][:_SHOWN]:
        lines.append(
            f"late: rank {late['rank']} by {late['spread_ns'] / 1000:,.0f} us to {late['kind']} of {late['group']}"
        )
    return "\n".join([*lines, *_repairs(document)])


def chakra_text(document: Mapping[str, Any]) -> str:
    """What `prism import chakra` prints."""
    kinds = ", ".join(f"{count:,} {name}" for name, count in document["nodes_by_type"].items())
    lines = [
        f"{_head(document)}, {document['ops']:,} ops from {document['nodes']:,} nodes",
        f"schema: {', '.join(document['schemas'])}",
        f"nodes: {kinds}",
        f"communications: {document['communications']:,}, in the graph {document['used_communications']:,}",
    ]
    return "\n".join([*lines, *_repairs(document)])


def simai_text(document: Mapping[str, Any]) -> str:
    """What `prism import simai` prints."""
    tensor, expert, data = document["degrees"]
    return "\n".join(
        [
            f"{document.get('output', 'graph')}: {document['world_size']:,} ranks (tensor-parallel {tensor}, "
            f"expert-parallel {expert}, data-parallel {data})",
            f"{document['ops']:,} ops from {document['layers']:,} layers",
            f"collectives of a rank: {document['collectives']:,} ({document['collectives_alone']:,} in groups of one)",
        ]
    )


def _head(document: Mapping[str, Any]) -> str:
    ranks = f"{document['world_size']:,} ranks ({len(document['ranks']):,} with a trace)"
    return f"{document.get('output', 'graph')}: {ranks}"


def _repairs(document: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, note in sorted(document["repairs"].items()):
        lines.append(f"{name}: {note['count']}")
        lines += [f"  {line}" for line in note["listed"][:_SHOWN]]
    return lines


def _milliseconds(times: list[int]) -> str:
    shown = ", ".join(f"{time / 1e6:,.3f}" for time in times[:_SHOWN])
    return shown + (", ..." if len(times) > _SHOWN else "")
