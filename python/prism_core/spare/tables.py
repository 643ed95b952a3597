"""Sweeps over inputs, and tables as files."""

from __future__ import annotations

import csv
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from prism_core.errors import ConfigError
from prism_core.spare.laws import PlacementLike
from prism_core.spare.options import Details
from prism_core.spare.planning import DEFAULT_PLACEMENTS, frontier, simulate

Row = dict[str, Any]
#: Called after every part: parts done, parts in all.
Progress = Callable[[int, int], None]


def sweep(
    groups: Sequence[int],
    system_mtbf_s: Sequence[float],
    restart_s: Sequence[float],
    *,
    save_s: float,
    redundancy: tuple[int, int] = (1, 28),
    placements: Sequence[PlacementLike] = DEFAULT_PLACEMENTS,
    compute_s: float | None = None,
    all_reduce_s: float = 0.0,
    steps: int | None = None,
    seeds: int = 8,
    repair_s: float | None = None,
    progress: Progress | None = None,
    **details: Unpack[Details],
) -> list[Row]:
    """Closed forms for all combinations of inputs, redundancies and placements; simulated too if there is a step time.

    Args:
        groups: Numbers of groups.
        system_mtbf_s: Mean times between failures of any group, seconds.
        restart_s: Times to restart, seconds.
        save_s: Time to write a checkpoint, seconds.
        redundancy: Smallest and largest `r`.
        placements: Placements.
        compute_s: Compute of one stack entry, seconds; with it, and `steps`, every row is simulated.
        all_reduce_s: All-reduce of a step, seconds.
        steps: Optimiser steps.
        seeds: Simulated trainings of each row.
        repair_s: Until a failed group is whole again, seconds.
        progress: Told how far it is.
        **details: As for `simulate`.
    """
    if (compute_s is None) != (steps is None):
        missing = "steps" if steps is None else "compute_s"
        raise ConfigError(f"{missing} is missing: a simulation needs the step time and the number of steps")
    combinations = [(n, mtbf, restart) for n in groups for mtbf in system_mtbf_s for restart in restart_s]
    rows: list[Row] = []
    for done, (n, mtbf_s, one_restart_s) in enumerate(combinations):
        found = frontier(
            n, save_s=save_s, restart_s=one_restart_s, system_mtbf_s=mtbf_s, redundancy=redundancy,
            placements=placements, repair_s=repair_s,
        )  # fmt: skip
        for at, row in enumerate(found):
            low, high = row.pop("band")
            whole = {"groups": n, "system_mtbf_s": mtbf_s, "restart_s": one_restart_s, "save_s": save_s}
            whole |= {**row, "band_low": low, "band_high": high}
            if compute_s is not None and steps is not None:
                step_s = row["stacks"] * compute_s + all_reduce_s
                every = max(1, round((row["interval_s"] - save_s) / step_s))
                summary = simulate(
                    n, compute_s=compute_s, steps=steps, save_s=save_s, restart_s=one_restart_s,
                    checkpoint_steps=min(every, steps), all_reduce_s=all_reduce_s, r=row["r"],
                    placement=row["placement"], system_mtbf_s=mtbf_s, repair_s=repair_s, seeds=seeds, **details,
                )["summary"]  # fmt: skip
                whole |= {"checkpoint_steps": every, "finished": summary["finished"], "runs": summary["runs"]}
                for name in ("relative_time", "availability", "restarts"):
                    band = summary[name]
                    whole |= {f"simulated_{name}_{key}": band[key] for key in ("mean", "p10", "p50", "p90")}
            rows.append(whole)
            if progress is not None:
                progress(done * len(found) + at + 1, len(combinations) * len(found))
    return rows


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of a sweep as curves for a plot: one for each placement and each combination of what was swept."""
    swept = [key for key in ("groups", "system_mtbf_s", "restart_s") if len({row[key] for row in rows}) > 1]
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = ", ".join([row["placement"], *(f"{key} {row[key]:g}" for key in swept)])
        found.setdefault(name, []).append({**row, "band": (row["band_low"], row["band_high"])})
    return found


def check_table(path: str | os.PathLike[str]) -> None:
    """Refuses tables that could not be written, before anything is computed for them."""
    suffix = Path(path).suffix
    if suffix not in (".csv", ".parquet"):
        raise ConfigError(f"{str(path)!r} must end in .csv or .parquet")
    if suffix == ".parquet":
        _parquet(path)


def _parquet(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"{path}: Parquet needs pyarrow (pip install 'prism_core[parquet]'); .csv needs nothing"
        ) from None


def write_table(rows: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> int:
    """Writes rows as `.csv`, or as `.parquet` with pyarrow (extra `parquet`); returns their number."""
    check_table(path)
    table = [dict(row) for row in rows]
    if not table:
        raise ConfigError("there are no rows to write")
    location = Path(path)
    if location.suffix == ".parquet":
        pyarrow, parquet = _parquet(location)
        parquet.write_table(pyarrow.Table.from_pylist(table), location)
    else:
        with location.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(table[0]))
            writer.writeheader()
            writer.writerows(table)
    return len(table)
