"""`prism profile`: the devices there are, and a profile's text to start one's own from."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.config import read_profile
from prism_core.errors import ConfigError

_TABLE = re.compile(r"\s*\[([^\]]+)\]")


def list_profiles() -> dict[str, Any]:
    """What `prism profile --json` prints: the built-in profiles, one GPU and one machine of each."""
    return {"profiles": [_entry(name) for name in _native.profile_names()]}


def _entry(name: str) -> dict[str, Any]:
    profile = tomllib.loads(_native.profile_toml(name))
    device, node, network = profile["device"], profile["node"], profile["network"]
    return {
        "name": name,
        "device": device["name"],
        "memory_bytes": device["memory_bytes"],
        "memory_bytes_per_s": device["memory_bytes_per_s"],
        "peak_flops": device["peak_flops"],
        "gpus_per_node": node["gpus"],
        "nvlink_bytes_per_s": node["nvlink_bytes_per_s"],
        "nics_per_node": node["nics"],
        "nic_bytes_per_s": network["nic_bytes_per_s"],
        "tuning": network["tuning"],
    }


def list_text(document: Mapping[str, Any]) -> str:
    """What `prism profile` prints."""
    rows = [["profile", "GPU", "memory", "fp16 TFLOP/s", "GPUs a node", "NVLink GB/s", "cards a node", "card GB/s"]]
    for entry in document["profiles"]:
        numbers = (
            entry["memory_bytes"] / (1 << 30), entry["peak_flops"]["fp16"] / 1e12, entry["gpus_per_node"],
            entry["nvlink_bytes_per_s"] / 1e9, entry["nics_per_node"], entry["nic_bytes_per_s"] / 1e9,
        )  # fmt: skip
        memory, *others = (f"{number:.4g}" for number in numbers)
        rows.append([entry["name"], entry["device"], f"{memory} GiB", *others])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def profile_text(name: str, settings: Sequence[str] = ()) -> str:
    """A profile as TOML, with what its comments say of every number.

    Args:
        name: A built-in profile or a file of one.
        settings: `table.key=value` items that change it.

    Raises:
        ConfigError: There is no such profile or key, or the profile is none with the value.
    """
    text = _native.profile_source(name) if name in _native.profile_names() else read_profile(name)
    for item in settings:
        path, sign, value = (part.strip() for part in item.partition("="))
        if not sign or not value or "\n" in value:
            raise ConfigError(f"--set {item!r} is not of the form table.key=value, for example node.gpus=4")
        text = with_entry(text, path, value)
    _native.profile_with_nccl(text, {})
    return text


def with_entry(text: str, path: str, value: object) -> str:
    """A profile's text with another value; the comment on the old one goes with it.

    Args:
        text: TOML.
        path: `table.key` of an entry that is there.
        value: As TOML has it.

    Raises:
        ConfigError: There is no such entry.
    """
    table, _, key = path.rpartition(".")
    lines, current, is_found = [], "", False
    for line in text.splitlines():
        if match := _TABLE.match(line):
            current = match[1].strip()
        elif current == table and line.partition("=")[0].strip() == key:
            line, is_found = f"{key} = {value}", True
        lines.append(line)
    if not is_found:
        raise ConfigError(f"the profile has no {path}: what is there can be changed, to add edit the file")
    return "\n".join(lines) + "\n"


def write_profile(name: str, output: Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Writes `profile_text` to a file that is not there yet.

    Raises:
        ConfigError: As `profile_text`; or the file is there, or cannot be written.
    """
    text = profile_text(name, settings)
    if output.suffix != ".toml":
        raise ConfigError(f"{output}: a profile is known by its name's end, .toml")
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{output} exists: remove it, or choose another name") from error
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from error
    return {"profile": name, "output": str(output)}
