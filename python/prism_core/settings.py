"""TOML files of settings, and `--set key=value` on the command line, which changes an entry without editing one."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError


def read_toml(path: Path, what: str = "") -> dict[str, Any]:
    """A TOML file's contents.

    Args:
        path: The file.
        what: What it is, for the messages ("the rules").

    Raises:
        ConfigError: It cannot be read, or is not TOML.
    """
    name = f"{what} {path}" if what else str(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {name}: not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} {'are' if what.endswith('s') else 'is'} not TOML: {error}") from error


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
