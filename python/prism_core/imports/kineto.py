"""Traces of PyTorch's profiler (Kineto)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.config import read_profile
from prism_core.errors import ConfigError
from prism_core.progress import Progress, wants_progress

PathLike = str | os.PathLike[str]


def import_kineto(
    sources: PathLike | Sequence[PathLike],
    output: PathLike | None = None,
    *,
    ranks: Mapping[str, int] | None = None,
    world_size: int | None = None,
    profile: str | None = None,
    keep_unmatched: bool = False,
    execution_traces: PathLike | Sequence[PathLike] = (),
    progress: bool = False,
) -> tuple[_native.Graph, dict[str, Any]]:
    """Makes an execution graph of the traces of a job's ranks.

    Args:
        sources: Trace files (`.json`, `.json.gz`), or folders of them; one file per rank, not necessarily of all ranks.
        output: Where to store the graph.
        ranks: Ranks of files that do not tell theirs, by file name.
        world_size: Ranks of the job, if the traces do not tell.
        profile: The network to start from: a built-in profile's name or a TOML file. By default that of the traces'
            device, else h100-sxm.
        keep_unmatched: Keep kernels of NCCL that fit to nothing as computations.
        execution_traces: PyTorch's execution traces of the same ranks (files, or folders of them), which tell more of
            communications. Those beside the traces are found.
        progress: Show a bar of what is read on standard error, if that is a terminal.

    Returns:
        The graph, and the account of the import: what was repaired, inferred and left out, and how far an unchanged
        replay is from the recording.

    Raises:
        ConfigError: A file is no trace, two files are of one rank, or they do not fit together.
        OSError: A file cannot be read or written.
    """
    paths, beside = _paths(sources), _paths(execution_traces)
    if not paths:
        raise ConfigError("no trace is named")
    options = {
        "ranks": dict(ranks or {}),
        "world_size": world_size,
        "profile": None if profile is None else read_profile(profile),
        "keep_unmatched": keep_unmatched,
        "execution_traces": beside,
    }
    counter = _native.ReadCounter()
    bars = Progress(enabled=wants_progress(progress))
    size = _size([*paths, *beside]) >> 20 if bars.enabled else None
    with bars.watched("MiB read", size, lambda: counter.bytes() >> 20):
        graph, account = _native.import_kineto(paths, json.dumps(options), counter)
    document: dict[str, Any] = json.loads(account)
    if output is not None:
        document = {"output": os.fspath(output), "graph_bytes": graph.save(os.fspath(output)), **document}
    return graph, document


def _paths(paths: PathLike | Sequence[PathLike]) -> list[str]:
    return [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]


def _size(paths: Sequence[str]) -> int:
    """Bytes of the files that an import reads; what is not there is the import's to complain of."""
    total = 0
    for path in map(Path, paths):
        inside = path.iterdir() if path.is_dir() else [path]
        files = [file for file in inside if file.name.endswith((".json", ".json.gz")) or file == path]
        total += sum(file.stat().st_size for file in files if file.is_file())
    return total
