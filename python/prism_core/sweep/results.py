"""Results of a sweep: kept in JSON lines with checksums, ranked, as table, CSV and picture."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError

_GIB = 1 << 30


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def to_line(record: Mapping[str, Any]) -> str:
    """A record as one line that shows whether it is whole."""
    return json.dumps({"checksum": _checksum(record), "record": record}, sort_keys=True) + "\n"


def read_records(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Whole records by key, and how many lines are damaged (a sweep that was killed leaves half a line)."""
    records: dict[str, dict[str, Any]] = {}
    damaged = 0
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            record, checksum = entry["record"], entry["checksum"]
        except (ValueError, TypeError, KeyError):
            damaged += 1
            continue
        if not isinstance(record, dict) or checksum != _checksum(record) or "key" not in record:
            damaged += 1
            continue
        records[record["key"]] = record
    return records, damaged


def cost(record: Mapping[str, Any]) -> float:
    """What is compared: ns per sample, or ns per iteration where samples are not told."""
    return float(record["iteration_time_ns"]) / (record["samples"] or 1)


def ranked(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records with their `rank`: what fits by cost, then what does not fit, then what failed (both without a rank)."""
    found = [dict(record) for record in records]
    done = [record for record in found if record["error"] is None]
    fits = sorted((r for r in done if r["fits"] is not False), key=lambda r: (cost(r), r["name"]))
    rest = sorted((r for r in done if r["fits"] is False), key=lambda r: (cost(r), r["name"]))
    failed = sorted((r for r in found if r["error"] is not None), key=lambda r: r["name"])
    for place, record in enumerate(fits, 1):
        record["rank"] = place
    for record in [*rest, *failed]:
        record["rank"] = None
    return [*fits, *rest, *failed]


def _time(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:,.3f} ms"


def _outcome(record: Mapping[str, Any], best: float | None) -> list[str]:
    """Cells of a record after its values."""
    if record["error"] is not None:
        return [f"failed: {record['error']['message'].splitlines()[0]}"]
    slower = "" if not best else f"{cost(record) / best:.3f} x"
    peak = "-" if record["peak_bytes"] is None else f"{record['peak_bytes'] / _GIB:.2f} GiB"
    over = record["over_by_bytes"]
    fit = f"does not fit: {over / _GIB:.2f} GiB too little" if over else ("fits" if record["fits"] else "unknown")
    rate = f"{record['samples'] * 1e9 / record['iteration_time_ns']:,.2f} /s" if record["samples"] else ""
    return [cell for cell in (_time(record["iteration_time_ns"]), rate, slower, peak, fit) if cell]


def sweep_text(document: Mapping[str, Any]) -> str:
    """What `prism sweep` prints: the best first."""
    records, axes = document["results"], document["axes"]
    done = [record for record in records if record["rank"]]
    best = cost(done[0]) if done else None
    rows = [["", *axes, "iteration"]]
    rows += [
        [str(record["rank"] or "-"), *(str(record["values"].get(axis, "")) for axis in axes), *_outcome(record, best)]
        for record in records
    ]
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(len(axes) + 2)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip()
             + "".join(f"  {cell}" for cell in row[len(widths):]) for row in rows]  # fmt: skip
    counts = f"{document['finished']} of {document['configurations']} configurations"
    kept = f", {document['kept']} of them from before" if document["kept"] else ""
    return "\n".join([*lines, f"{counts}{kept}; {document['output']}", *(f"note: {n}" for n in document["notes"])])


def to_csv(records: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> str:
    """The table for a spreadsheet or pandas."""
    names = ["iteration_time_ns", "samples", "peak_bytes", "fits", "over_by_bytes", "world_size", "ops"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["rank", *axes, *names, "error"])
    for record in records:
        error = record["error"]["message"].splitlines()[0] if record["error"] else ""
        values = [record["values"].get(axis, "") for axis in axes]
        cells = ["" if record.get(name) is None else record[name] for name in names]
        writer.writerow([record["rank"] or "", *values, *cells, error])
    return out.getvalue()
