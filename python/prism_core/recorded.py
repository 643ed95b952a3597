"""`prism emulate --record`: the graph of a run in which every rank ran the program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from prism_core import _native
from prism_core.errors import ConfigError


def check_recording(output: Path | None, sandbox: Sequence[int], world_size: int) -> None:
    """Before the ranks run, not after.

    Raises:
        ConfigError: Not every rank runs, or the folder does not exist.
    """
    if output is None:
        return
    if len(sandbox) != world_size:
        raise ConfigError(
            f"--record writes what the ranks did, and only {len(sandbox)} of {world_size} run: "
            f"name them all (--sandbox 0-{world_size - 1}), or use `prism collect`"
        )
    if not output.parent.is_dir():
        raise ConfigError(f"the folder of {output} does not exist")


def graph_of_run(session: _native.Session, graph: _native.Graph, sandbox: Sequence[int]) -> _native.Graph:
    """The graph of what all ranks of the session did. Facts about the job are those of the graph they ran against."""
    recordings = [session.recording(rank) for rank in sandbox]
    world_size = graph.world_size
    found = {
        "ranks_run": str(world_size),
        "ranks_inferred": "0",
        "ranks_verified": "0",
        "role_distinction": "none: every rank was run",
        "recorded_by": "emulate",
    }
    meta = {name: text for name, text in graph.meta.items() if name not in ("ranks", "clocks")} | found
    return _native.assemble(world_size, recordings, list(range(world_size)), json.dumps(meta))
