"""A map of a job: which rank has which role, along the axes that its communicators span.

The axes are found from the graph alone. Communicators whose members are evenly spaced span an axis: its stride is the
distance between neighbours, its size their number. Axes in order of stride number the ranks as a program does that
makes a mesh: rank = first place + second place * size of the first axis + ...
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Widest line of a drawn map.
WIDTH = 80
_ROWS = 40
#: How many times more all-reduces there are within layers than of gradients, at least.
_OFTEN = 4
_MESSAGES = frozenset({"send", "recv"})


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks at equal distances.

    Attributes:
        size: How many.
        stride: Distance between neighbours.
        kind: What they do with each other: `pipeline` (messages), `exchange` (all-to-all), `shard` (all-gather,
            reduce-scatter), `data` (all-reduce), `tensor` (all-reduce, much more often than along another axis), or
            `rest` where no communicator says.
    """

    size: int
    stride: int
    kind: str

    def place(self, rank: int) -> int:
        """Where a rank is along the axis."""
        return rank // self.stride % self.size

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind, "size": self.size, "stride": self.stride}


def find_axes(world_size: int, families: Sequence[Mapping[str, Any]]) -> list[Axis]:
    """The axes of a job, by ascending stride; their sizes multiply to the world size."""
    even = [family for family in families if family["stride"] is not None and family["stride"] > 0]
    axes: list[Axis] = []
    stride = 1
    while stride < world_size:
        axis = _next_axis(world_size, stride, even)
        axes.append(axis)
        stride *= axis.size
    return _with_tensor(axes, even)


def _with_tensor(axes: Sequence[Axis], families: Sequence[Mapping[str, Any]]) -> list[Axis]:
    """Tells layers' all-reduces from gradients': there are many more of them."""
    calls = {
        (family["size"], family["stride"]): sum(family["calls"].values())
        for family in families
    }  # fmt: skip
    reduced = [axis for axis in axes if axis.kind == "data"]
    fewest = min((calls[axis.size, axis.stride] for axis in reduced), default=0)
    return [
        Axis(axis.size, axis.stride, "tensor")
        if axis in reduced and calls[axis.size, axis.stride] >= _OFTEN * fewest > 0
        else axis
        for axis in axes
    ]


def _next_axis(world_size: int, stride: int, families: Sequence[Mapping[str, Any]]) -> Axis:
    def fits(size: int) -> bool:
        return size > 1 and world_size % (stride * size) == 0

    here = [family for family in families if family["stride"] == stride and fits(family["size"])]
    pairs = [family for family in here if family["size"] == 2 and set(family["calls"]) <= _MESSAGES]
    groups = [family for family in here if family not in pairs and family["calls"]]
    has_messages = bool(pairs) or any(_MESSAGES & set(family["calls"]) for family in here)
    if groups:
        group = min(groups, key=lambda family: family["size"])
        return Axis(group["size"], stride, "pipeline" if has_messages else _kind(group["calls"]))
    # Up to where the next communicators begin.
    further = sorted({family["stride"] for family in families if family["stride"] > stride and family["calls"]})
    sizes = [other // stride for other in further if other % stride == 0 and fits(other // stride)]
    size = min(sizes, default=world_size // stride)
    if not fits(size):
        size = world_size // stride if world_size % stride == 0 else 1
    return Axis(max(size, 2), stride, "pipeline" if has_messages else "rest")


def _kind(calls: Mapping[str, int]) -> str:
    if "all_to_all" in calls:
        return "exchange"
    if "all_gather" in calls or "reduce_scatter" in calls:
        return "shard"
    return "data"


def letters(number: int) -> str:
    """A short name of a role: A to Z, AA, AB and so on."""
    name = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        name = string.ascii_uppercase[rest] + name
    return name


def role_map(world_size: int, roles: Sequence[int], families: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The map as data.

    Args:
        world_size: Ranks of the job.
        roles: For every rank the number of its role.
        families: Communicators, as `prism inspect --json` has them.

    Returns:
        `axes`; `collapsed`, the numbers of axes along which roles do not change; `rows`: axes of the rows with the
        places of each, and `cells` as runs of role and count along the last axis that is not collapsed.
    """
    axes = find_axes(world_size, families)
    if _product(axes) != world_size:
        axes = [Axis(world_size, 1, "rest")] if world_size > 1 else []
    kept = [index for index, axis in enumerate(axes) if not _is_constant(axis, roles)]
    columns = _column_axis(axes, kept)
    row_axes = sorted((index for index in kept if index != columns), key=lambda index: -axes[index].stride)
    rows = [
        {"places": places, "cells": _cells(axes, columns, rank, roles)}
        for places, rank in _places(axes, row_axes)
    ]  # fmt: skip
    return {
        "axes": [axis.to_dict() for axis in axes],
        "collapsed": [index for index in range(len(axes)) if index not in kept],
        "row_axes": row_axes,
        "column_axis": columns,
        "rows": rows,
    }


def _product(axes: Iterable[Axis]) -> int:
    product = 1
    for axis in axes:
        product *= axis.size
    return product


def _is_constant(axis: Axis, roles: Sequence[int]) -> bool:
    """Tells whether every rank has the role of its neighbour along the axis."""
    return all(
        roles[rank] == roles[rank - axis.stride] for rank in range(len(roles)) if axis.place(rank) > 0
    )  # fmt: skip


def _column_axis(axes: Sequence[Axis], kept: Sequence[int]) -> int | None:
    """The axis across the page: the stages of a pipeline run down it, if another one can run across."""
    candidates = [index for index in kept if axes[index].kind != "pipeline"] or list(kept)
    if not candidates or (len(kept) == 1 and axes[kept[0]].kind == "pipeline"):
        return None
    return max(candidates, key=lambda index: (axes[index].size, -index))


def _places(axes: Sequence[Axis], row_axes: Sequence[int]) -> Iterable[tuple[list[int], int]]:
    """Every combination of places along the row axes, with the first rank there."""
    combinations: list[tuple[list[int], int]] = [([], 0)]
    for index in row_axes:
        axis = axes[index]
        combinations = [
            ([*places, place], rank + place * axis.stride)
            for places, rank in combinations
            for place in range(axis.size)
        ]
    return combinations


def _cells(axes: Sequence[Axis], columns: int | None, rank: int, roles: Sequence[int]) -> list[list[int]]:
    if columns is None:
        return [[roles[rank], 1]]
    axis = axes[columns]
    runs: list[list[int]] = []
    for place in range(axis.size):
        role = roles[rank + place * axis.stride]
        if runs and runs[-1][0] == role:
            runs[-1][1] += 1
        else:
            runs.append([role, 1])
    return runs


def draw(document: Mapping[str, Any], width: int = WIDTH) -> list[str]:
    """The map as lines of at most `width` characters."""
    if not document["axes"]:
        return ["A"]
    rows = _merged(document)
    label_width = max(len(label) for label, _ in rows)
    room = min(width, WIDTH) - label_width - 2
    one_by_one = all(_is_short(cells, room) for _, cells in rows)
    lines = _axis_lines(document)
    lines += [f"{label:<{label_width}}  {_cells_text(cells, one_by_one)}" for label, cells in rows[:_ROWS]]
    if len(rows) > _ROWS:
        lines.append(f"... {len(rows) - _ROWS} more rows")
    return [line if len(line) <= width else line[: width - 3] + "..." for line in lines]


def _merged(document: Mapping[str, Any]) -> list[tuple[str, Sequence[Sequence[int]]]]:
    """Labels and cells of the rows; equal rows in a row are one."""
    rows = document["rows"]
    merged: list[tuple[str, Sequence[Sequence[int]]]] = []
    first = 0
    for index, row in enumerate(rows):
        if index + 1 < len(rows) and rows[index + 1]["cells"] == row["cells"]:
            continue
        label = _row_label(document, rows[first]["places"])
        if index > first:
            label += f" .. {_row_label(document, row['places'])}"
        merged.append((label, row["cells"]))
        first = index + 1
    return merged


def _axis_lines(document: Mapping[str, Any]) -> list[str]:
    def text(index: int) -> str:
        axis = document["axes"][index]
        return f"{axis['kind']} {axis['size']} (every {axis['stride']})"

    down = ", ".join(map(text, document["row_axes"])) or "-"
    across = text(document["column_axis"]) if document["column_axis"] is not None else "-"
    alike = ", ".join(map(text, document["collapsed"]))
    return [f"down: {down}; across: {across}", *([f"alike along {alike}"] if alike else [])]


def _row_label(document: Mapping[str, Any], places: Sequence[int]) -> str:
    """The place along the axis of the rows, or the places along several in the order of the heading."""
    if len(places) == 1:
        return f"{document['axes'][document['row_axes'][0]]['kind']} {places[0]}"
    return "/".join(map(str, places)) or "all"


def _is_short(cells: Sequence[Sequence[int]], room: int) -> bool:
    return sum(number for _, number in cells) <= min(room, 64) and all(len(letters(role)) == 1 for role, _ in cells)


def _cells_text(cells: Sequence[Sequence[int]], one_by_one: bool) -> str:
    """One letter per rank where all rows are short, else names with counts."""
    if one_by_one:
        return "".join(letters(role) * number for role, number in cells)
    return " ".join(letters(role) if number == 1 else f"{letters(role)}*{number}" for role, number in cells)
