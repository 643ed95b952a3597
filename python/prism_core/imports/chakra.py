"""Chakra execution traces."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.config import read_profile
from prism_core.errors import ConfigError
from prism_core.imports.kineto import PathLike


def import_chakra(
    sources: PathLike | Sequence[PathLike],
    output: PathLike | None = None,
    *,
    world_size: int | None = None,
    groups: PathLike | None = None,
    profile: str | None = None,
) -> tuple[_native.Graph, dict[str, Any]]:
    """Makes an execution graph of Chakra traces, one per rank: protobuf of all schema versions, or JSON.

    Args:
        sources: Files whose names end in the rank (`job.3.et`), or folders of them; ranks without a file come to
            everything at once.
        output: Where to store the graph.
        world_size: Ranks of the job; one more than the highest with a file if not said.
        groups: A JSON file with the members of each process group; by default every group is the whole world.
        profile: The network: a built-in profile's name or a TOML file (h100-sxm by default).

    Returns:
        The graph, and the account of the import.

    Raises:
        ConfigError: A file is no Chakra trace, or they do not fit together.
        OSError: A file cannot be read or written.
    """
    paths = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    if not paths:
        raise ConfigError("no trace is named")
    options = {
        "world_size": world_size,
        "groups": None if groups is None else Path(groups).read_text(encoding="utf-8"),
        "profile": None if profile is None else read_profile(profile),
    }
    graph, account = _native.import_chakra([os.fspath(path) for path in paths], json.dumps(options))
    document: dict[str, Any] = json.loads(account)
    if output is not None:
        document = {"output": os.fspath(output), "graph_bytes": graph.save(os.fspath(output)), **document}
    return graph, document
