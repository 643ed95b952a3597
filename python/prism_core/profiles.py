"""Device and cluster profiles by name."""

from __future__ import annotations

from pathlib import Path

from prism_core import _native
from prism_core.errors import ConfigError


def profile_text(name: str) -> str:
    """A profile's TOML text, by the name of a built-in one or by the path of a file."""
    if name in _native.profile_names():
        return _native.profile_toml(name)
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(_native.profile_names())
        raise ConfigError(f"profile {name!r} is neither built in ({known}) nor a file that can be read") from error
