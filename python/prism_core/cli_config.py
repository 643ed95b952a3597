"""Options of commands from a TOML file: a table per command, an entry per option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError
from prism_core.settings import apply_settings, read_toml

#: What a file does not set: they are asked for each time.
_NOT_SET = {"help", "version", "install_completion", "show_completion", "set", "config"}


def read_options(path: Path | None, settings: Sequence[str], root: Any) -> dict[str, Any]:
    """Defaults of all commands' options, as the command line takes them.

    Args:
        path: The file, or nothing.
        settings: `command.option=value` items that change it.
        root: The command line's own definition: the group of all commands.

    Raises:
        ConfigError: The file cannot be read, or names a command or an option there is not.
    """
    document: Mapping[str, Any] = {}
    if path is not None:
        document = read_toml(path)
    return _defaults(apply_settings(document, settings), root, "")


def _defaults(table: Mapping[str, Any], command: Any, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if hasattr(command, "commands"):
        for name, entries in table.items():
            if name not in command.commands or not isinstance(entries, dict):
                known = ", ".join(command.commands)
                raise ConfigError(f"[{where}{name}] is none of the commands' tables: {known}")
            found[name] = _defaults(entries, command.commands[name], f"{where}{name}.")
        return found
    names = {_long_name(parameter): parameter for parameter in command.params if parameter.param_type_name == "option"}
    names = {name: parameter for name, parameter in names.items() if name not in _NOT_SET}
    for name, value in table.items():
        if name not in names:
            raise ConfigError(f"{where}{name} is no option of {where[:-1]}: {', '.join(sorted(names))}")
        parameter = names[name]
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, (str, int, float)) for one in values) or (
            isinstance(value, list) and not parameter.multiple
        ):
            raise ConfigError(f"{where}{name} is {value!r}: it must be one value, as on the command line")
        is_flag = all(isinstance(one, bool) for one in values)
        plain = values if is_flag else [str(one) for one in values]
        found[parameter.name] = plain if parameter.multiple else plain[0]
    return found


def _long_name(parameter: Any) -> str:
    """The option's name in a file: that of the command line, with underscores."""
    longest: str = max(parameter.opts, key=len)
    return longest.lstrip("-").replace("-", "_")
