"""Workload files of SimAI and ASTRA-sim, as AICB writes them."""

from __future__ import annotations

import json
import os
from typing import Any

from prism_core import _native
from prism_core.config import read_profile
from prism_core.imports.kineto import PathLike


def import_simai(
    source: PathLike,
    output: PathLike | None = None,
    *,
    world_size: int | None = None,
    expert_parallel: int | None = None,
    iterations: int = 1,
    profile: str | None = None,
) -> tuple[_native.Graph, dict[str, Any]]:
    """Makes an execution graph of a workload: layers of one pipeline stage, forward and backward.

    Args:
        source: The workload, text with one line per layer.
        output: Where to store the graph.
        world_size: Ranks of the job, if the file does not tell (`all_gpus`).
        expert_parallel: Expert-parallel degree, if the file does not tell (`ep`).
        iterations: Passes in a row.
        profile: The network: a built-in profile's name or a TOML file (h100-sxm by default).

    Returns:
        The graph, and the account of the import.

    Raises:
        ConfigError: The file is no workload, or degrees do not fit the ranks.
        OSError: The file cannot be read or written.
    """
    options = {
        "world_size": world_size,
        "expert_parallel": expert_parallel,
        "iterations": iterations,
        "profile": None if profile is None else read_profile(profile),
    }
    graph, account = _native.import_simai(os.fspath(source), json.dumps(options))
    document: dict[str, Any] = json.loads(account)
    if output is not None:
        document = {"output": os.fspath(output), "graph_bytes": graph.save(os.fspath(output)), **document}
    return graph, document
