"""`prism estimate LAYOUT.toml`: a layout from a file, its step time, and what an engineer compares it with."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from prism_core.config import DEFAULT_DEVICE, read_profile
from prism_core.errors import ConfigError
from prism_core.estimate import Layout, bubble, estimate, state_bytes, useful_flop
from prism_core.kernels import read_tables
from prism_core.report import _milliseconds, _share_rows, _table
from prism_core.settings import apply_settings, read_toml

#: What a file may have besides the table `[layout]`.
_KEYS = ("device", "layout")
DEFAULT_PROFILE = DEFAULT_DEVICE.partition(":")[2]
#: What a step is made of, in the text's words.
_PARTS = {
    "schedule": "schedule_ns", "logits, loss": "head_ns", "optimizer": "optimizer_ns",
    "exposed gradients, parameters": "exposed_ns", "slower beside communication": "slowed_ns",
}  # fmt: skip
_TYPES: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def read_layout(
    path: Path, settings: Sequence[str] = (), changes: Mapping[str, Any] | None = None
) -> tuple[Layout, str | None]:
    """A layout, and the device profile that the file names.

    Args:
        path: A TOML file: `device` (a profile's name, or its file as seen from this one), and a table `[layout]` whose
            keys are `Layout`'s.
        settings: `layout.key=value` items that change it, as `--set` takes them.
        changes: Other values of `[layout]`.

    Raises:
        ConfigError: The file cannot be read, or has a key or a value that cannot be.
    """
    document = apply_settings(read_toml(path, "the layout"), settings)
    if unknown := sorted(document.keys() - set(_KEYS)):
        raise ConfigError(f"{path}: '{unknown[0]}' is no key of a layout file: {', '.join(_KEYS)}")
    table, device = document.get("layout"), document.get("device")
    if not isinstance(table, dict):
        raise ConfigError(f"{path} has no table [layout]: the model and how it is spread over ranks (docs/estimate.md)")
    if device is not None and not isinstance(device, str):
        raise ConfigError(f"{path}: device is {device!r}: it must be the name of a device profile")
    if device is not None and (path.parent / device).is_file():
        device = str(path.parent / device)
    return layout_of(table | dict(changes or {})), device


def layout_of(table: Mapping[str, Any]) -> Layout:
    """A layout from its keys.

    Raises:
        ConfigError: A key is missing, unknown, or of another type, or the numbers do not fit together.
    """
    known = {field.name: field for field in fields(Layout)}
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"layout.{name} is unknown: {', '.join(known)}")
        kind = str(known[name].type)
        if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise ConfigError(f"layout.{name} is {value!r}: it must be of type {kind}")
    if missing := [name for name, field in known.items() if field.default is MISSING and name not in table]:
        raise ConfigError(f"[layout] lacks {', '.join(missing)}")
    layout = Layout(**table)
    layout.check()
    return layout


def estimate_document(layout: Layout, device: str, kernels: Sequence[Path] = ()) -> dict[str, Any]:
    """What `prism estimate --json` prints.

    Args:
        layout: The layout.
        device: Name of a device profile, or a file of one.
        kernels: Kernel tables.

    Returns:
        The parts of `estimate`, in ns, `state_bytes`, and `world_size`, `tokens_per_s` and `model_flop_per_s_per_gpu`
        of the job, `mfu` (that over the device's dense peak for the layout's type), `bubble` of the textbook's formula.
    """
    profile = read_profile(device)
    found = estimate(layout, profile, read_tables(kernels))
    world_size = layout.tp * layout.cp * layout.dp * layout.pp
    seconds = found["iteration_time_ns"] / 1e9
    achieved = useful_flop(layout) / seconds / world_size
    return {
        "device": device,
        "layout": asdict(layout),
        "world_size": world_size,
        **found,
        "state_bytes": state_bytes(layout),
        "tokens_per_s": layout.global_batch * layout.seq / seconds,
        "model_flop_per_s_per_gpu": achieved,
        "mfu": achieved / float(tomllib.loads(profile)["device"]["peak_flops"][layout.dtype]),
        "bubble": bubble(layout),
    }


def estimate_text(document: Mapping[str, Any]) -> str:
    """What `prism estimate` prints."""
    layout = document["layout"]
    degrees = ", ".join(f"{name} {layout[name]}" for name in ("tp", "cp", "dp", "pp", "vp") if layout[name] > 1)
    rows = [
        ("step time", _milliseconds(document["iteration_time_ns"])),
        ("GPUs", f"{document['world_size']:,} ({document['device']}; {degrees or 'one'})"),
        ("tokens", f"{document['tokens_per_s']:,.0f} per second"),
        ("model FLOP", f"{document['model_flop_per_s_per_gpu'] / 1e12:,.1f} TFLOP/s a GPU, MFU {document['mfu']:.1%}"),
        ("states", f"{document['state_bytes'] / (1 << 30):.2f} GiB of the fullest rank, activations left out"),
        ("bubble", f"{document['bubble']:.1%} of the work, by the formula"),
        *((name, _milliseconds(document[key])) for name, key in _PARTS.items() if document[key]),
        *_share_rows(document["device_time"]["by_provenance"]),
    ]
    return _table(rows)
