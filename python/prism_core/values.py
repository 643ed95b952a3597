"""What the host read from the device, by grade and place: part of every summary as `values`.

The preloaded library reports reads as notes of a fixed form; this module takes them out of the notes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prism_core.rules import ValueRules

#: How notes about values begin (`shim/cuda/src/values/reads.rs`).
_NOTE = "value\t"
GRADES = ("known", "provided", "unknown")
#: Places listed in a summary; the others are counted.
MOST_SITES = 50
#: `off`: values are not graded and no operator runs on the CPU.
ENV_VALUES = "PRISM_VALUES"
#: Where what is slow to find out is kept: parameters of kernels, the compiled value plane.
ENV_CACHE = "PRISM_CACHE_DIR"


def split_notes(notes: Mapping[str, int]) -> tuple[dict[str, int], dict[str, Any]]:
    """A rank's other notes, and its reads: their number by grade, and where values come from that are not known."""
    others: dict[str, int] = {}
    counts = dict.fromkeys(GRADES, 0)
    sites: list[dict[str, Any]] = []
    for note, count in notes.items():
        if not note.startswith(_NOTE):
            others[note] = count
            continue
        _, grade, *rest = note.split("\t")
        counts[grade] += count
        if rest:
            size, source, place = rest
            sites.append({"grade": grade, "count": count, "bytes": int(size), "source": source, "place": place})
    # Unknown ones first, then by number.
    sites.sort(key=lambda site: (site["grade"] != "unknown", -site["count"], site["place"], site["source"]))
    values = {**counts, "sites": sites[:MOST_SITES]}
    if len(sites) > MOST_SITES:
        values["more_sites"] = len(sites) - MOST_SITES
    return others, values


def cache_folder(base: Mapping[str, str]) -> Path:
    """The user's folder for what is slow to find out."""
    if base.get(ENV_CACHE):
        return Path(base[ENV_CACHE])
    home = base.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "prism_core"


def program_variables(rules: ValueRules, folder: Path, *, strict: bool) -> dict[str, str]:
    """What the program's environment says about values; the rules for reads are written into `folder`."""
    variables = {ENV_CACHE: str(cache_folder(os.environ)), "PRISM_PROGRAM_RULES": rules.for_program()}
    if os.environ.get(ENV_VALUES) == "off":
        return {ENV_VALUES: "off"}
    variables[ENV_VALUES] = "strict" if strict else "on"
    if rules.reads:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "value-rules.tsv"
        path.write_text(rules.read_lines(), encoding="utf-8")
        variables["PRISM_VALUE_RULES"] = str(path)
    return variables


def site_text(site: Mapping[str, Any]) -> str:
    """A place in words."""
    place = site["place"] or "no Python code"
    verb = {"unknown": "last written by", "provided": "provided by"}[site["grade"]]
    return f"{site['bytes']} B at {place}, {verb} {site['source']} ({site['count']} times)"
