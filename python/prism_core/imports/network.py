"""`prism calibrate comm`: the network of a profile, fitted to measured collectives."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.config import read_profile
from prism_core.errors import ConfigError
from prism_core.imports.kineto import PathLike


def calibrate_comm(
    logs: PathLike | Sequence[PathLike],
    output: PathLike | None = None,
    *,
    profile: str = "h100-sxm",
    collective: str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
) -> dict[str, Any]:
    """Fits a profile's network to output of nccl-tests, records of NCCL's Inspector (JSON), or look-up tables.

    Args:
        logs: Files, each of one communicator size. Of several each is left out in turn, which gives an honest error.
        output: Where to store the fitted profile (TOML).
        profile: The profile to start from: a built-in one's name or a TOML file.
        collective: Which collective was measured, for files that do not tell (`all_reduce`).
        ranks: How many ranks, for files that do not list them.
        nodes: How many nodes, for files that do not list them.

    Returns:
        The account: factors (and among them `launch_us`, the time in microseconds that was added to every call), errors
        before and after, errors of rows that were left out, and `profile_toml`.

    Raises:
        ConfigError: A file has no measurement or does not tell what it measured.
        OSError: A file cannot be read or written.
    """
    paths = [logs] if isinstance(logs, (str, os.PathLike)) else list(logs)
    if not paths:
        raise ConfigError("no file of measurements is named")
    options = {"profile": read_profile(profile), "collective": collective, "ranks": ranks, "nodes": nodes}
    toml, account = _native.calibrate_comm([os.fspath(path) for path in paths], json.dumps(options))
    document: dict[str, Any] = json.loads(account)
    if output is not None:
        Path(output).write_text(toml, encoding="utf-8")
        document = {"output": os.fspath(output), **document}
    return {**document, "profile_toml": toml}


def calibrate_text(document: Mapping[str, Any]) -> str:
    """What `prism calibrate comm` prints."""
    lines = [f"{document.get('output', 'profile')}: {document['base']} scaled to {document['rows']} measurements"]
    lines += [f"  {count} of {group}" for group, count in sorted(document["groups"].items())]
    lines += [_constant(name, value) for name, value in document["factors"].items()]
    said = {
        "before": "error before",
        "fitted": "error of the rows fitted to",
        "left_out": f"error of rows left out (by {document['left_out_by']})",
    }
    for key, words in said.items():
        errors = document[key]
        shares = " ".join(f"{name} {100 * errors[name]:.1f} %" for name in ("median", "p90", "worst"))
        lines.append(f"{words}: {shares}")
    return "\n".join(lines)


def _constant(name: str, value: float) -> str:
    """A factor, or a time in microseconds."""
    words = name.replace("_", " ")
    return f"{words.removesuffix(' us')}: {value:+.1f} us" if name.endswith("_us") else f"{words}: x {value:.3f}"
