"""Version and build, for bug reports."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from prism_core import _native
from prism_core.collect import tool_version


def version_document() -> dict[str, Any]:
    """Version of the package, revision and profile of its extension, Python, and PyTorch if it is installed."""
    build = _native.build_info()
    return {
        "version": tool_version(),
        "revision": build.get("revision", "unknown"),
        "profile": build["profile"],
        "target": build["target"],
        "python": platform.python_version(),
        "torch": _torch(),
    }


def _torch() -> str | None:
    """Version of PyTorch as installed, without importing it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def version_text() -> str:
    """What `prism --version` prints."""
    found = version_document()
    return (
        f"prism {found['version']} ({found['revision']}, {found['profile']}, {found['target']}), "
        f"Python {found['python']}, torch {found['torch'] or 'not installed'}"
    )
