"""Settings on the command line: `--set key=value` changes an entry of a TOML file without editing it."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from prism_core.errors import ConfigError


def apply_settings(document: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The document with entries set.

    Args:
        document: As read from TOML.
        settings: `table.key=value` items; the value is TOML, or else a text (`axes.tp=[1, 2]`, `sweep.card=80GiB`).

    Raises:
        ConfigError: An item has no `=`, or a table on its way is a value.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for item in settings:
        name, sign, text = item.partition("=")
        keys = name.strip().split(".")
        if not sign or not all(keys):
            raise ConfigError(f"--set {item!r} is not of the form key=value, for example collect.world_size=64")
        table = changed
        for key in keys[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {item!r}: {key} is a value, not a table")
        table[keys[-1]] = _value(text.strip())
    return changed


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}\n")["value"]
    except tomllib.TOMLDecodeError:
        return text
