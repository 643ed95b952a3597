"""Works out one configuration: collects its graph if it is a program, replays it, compares its memory with the card.

A layout without a program is estimated (`prism_core.estimate`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.config import device_entry, parse_slow, read_profile
from prism_core.errors import ConfigError, PrismError, error_entry
from prism_core.layout_file import DEFAULT_PROFILE, estimate_document, read_layout
from prism_core.memory import card_bytes
from prism_core.replay import open_graph, overlap_text, replay
from prism_core.sweep.plan import Configuration

#: Characters of a failed program's output that are kept.
_TAIL = 2000
_FLAGS = {"strict_values"}


def work_out(configuration: Configuration, folder: str, key: str) -> dict[str, Any]:
    """The record of a configuration. What goes wrong is part of it: others may do.

    Args:
        configuration: What to try.
        folder: The sweep file's folder: paths and programs are relative to it.
        key: The configuration's name in the results.
    """
    start = time.monotonic_ns()
    record: dict[str, Any] = {
        "key": key, "name": configuration.name(), "values": dict(configuration.values),
        "samples": configuration.samples, "iteration_time_ns": None, "iterations_ns": [], "peak_bytes": None,
        "fits": None, "over_by_bytes": None, "world_size": None, "ops": None, "error": None,
    }  # fmt: skip
    try:
        if configuration.layout is not None:
            record |= _estimated(configuration, Path(folder))
        elif configuration.graph is not None:
            record |= _measured(configuration, Path(folder), Path(folder) / configuration.graph)
        else:
            with tempfile.TemporaryDirectory(prefix="prism-sweep-") as scratch:
                graph = Path(scratch) / "job.prism"
                if configuration.keep_graphs is not None:
                    kept = Path(folder) / configuration.keep_graphs
                    kept.mkdir(parents=True, exist_ok=True)
                    graph = kept.absolute() / f"{key}.prism"
                _collect(configuration, folder, graph)
                record |= _measured(configuration, Path(folder), graph)
    except (PrismError, OSError) as error:
        record["error"] = error_entry(error)
    record["wall_ns"] = time.monotonic_ns() - start
    return record


def _collect(configuration: Configuration, folder: str, graph: Path) -> None:
    """Collects in a process of its own: configurations do not share what a run leaves behind."""
    command = [sys.executable, "-m", "prism_core.cli", "collect", "--json", "-o", str(graph)]
    for name, value in configuration.collect.items():
        option = f"--{name.replace('_', '-')}"
        if name in _FLAGS:
            command += [option] if value else []
        else:
            for one in value if isinstance(value, list) else [value]:
                command += [option, str(one)]
    command += ["--", *configuration.command]
    environment = {**os.environ, "PRISM_NO_PROGRESS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    if done.returncode == 0:
        return
    try:
        error = json.loads(done.stdout)["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": f"prism collect ended with {done.returncode}: {done.stderr[-_TAIL:].strip()}"}
    raise ConfigurationFailed(error["message"])


class ConfigurationFailed(PrismError):
    """A configuration's program did not get through."""


def _measured(configuration: Configuration, folder: Path, path: Path) -> dict[str, Any]:
    """Iteration time and memory of a graph under the configuration's settings."""
    graph = open_graph(path)
    how = dict(configuration.replay)
    slow = parse_slow(how.pop("slow", []))
    if "perturb" in how:
        how["perturb"] = _text(how["perturb"], folder)
    if isinstance(how.get("overlap"), str):
        how["overlap"] = overlap_text(_text(how["overlap"], folder))
    profile = how.get("profile")
    if profile is not None:
        profile = how["profile"] = _named(profile, folder)
    found = replay(graph, slow=slow, **how).to_dict()
    options = {"card_bytes": card_bytes(configuration.card), "profile": read_profile(profile) if profile else None}
    memory = json.loads(_native.memory_json(graph, json.dumps(options)))
    peak = max((group["peak_bytes"] for group in memory["groups"]), default=None)
    need = None if peak is None else peak + memory["context_bytes"]
    over = None if need is None else max(need - memory["card_bytes"], 0)
    return {
        "iteration_time_ns": found["iteration_time_ns"][-1], "iterations_ns": found["iteration_time_ns"],
        "peak_bytes": need, "fits": None if over is None else over == 0, "over_by_bytes": over or None,
        "world_size": found["world_size"], "ops": found["ops"],
    }  # fmt: skip


def _estimated(configuration: Configuration, folder: Path) -> dict[str, Any]:
    """Step time of a layout. Its memory is known from below only: what does not fit by that does not fit."""
    layout, named = read_layout(folder / str(configuration.layout), changes=configuration.changes)
    chosen = configuration.replay.get("profile")
    device = _named(chosen, folder) if chosen else named or DEFAULT_PROFILE
    found, profile = estimate_document(layout, device), read_profile(device)
    card = card_bytes(configuration.card) or device_entry(profile, "memory_bytes") or 0
    over = found["state_bytes"] + (device_entry(profile, "context_bytes") or 0) - card
    return {
        "iteration_time_ns": found["iteration_time_ns"], "iterations_ns": [found["iteration_time_ns"]],
        "fits": False if over > 0 else None, "over_by_bytes": over if over > 0 else None,
        "world_size": found["world_size"],
    }  # fmt: skip


def _named(profile: str, folder: Path) -> str:
    """A profile's name, or its file as the sweep file's folder has it."""
    return str(folder / profile) if (folder / profile).is_file() else profile


def _text(name: str, folder: Path) -> str:
    """A file's contents, or text that is TOML itself."""
    if "\n" in name:
        return name
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    return path.read_text(encoding="utf-8")
