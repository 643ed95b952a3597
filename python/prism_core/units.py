"""Quantities as people write them: `300s`, `1h`, `1h30m`, `20TB`, `340GB/s`."""

from __future__ import annotations

import re

from prism_core.errors import ConfigError

_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_BYTES = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50,
}  # fmt: skip
_PART = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)")


def seconds(text: str, field: str) -> float:
    """A duration in seconds; parts add up (`1h30m`), a bare number is seconds. Errors name `field`."""
    total, at, previous = 0.0, 0, float("inf")
    while at < len(text.rstrip()):
        match = _PART.match(text, at)
        unit = match.group(2) if match else ""
        if match is None or (unit or "s") not in _SECONDS or (unit == "" and (at or match.end() < len(text.rstrip()))):
            raise ConfigError(f"{field} is {text!r}: it must be a duration such as 300s, 5min, 1h30m or 2d")
        scale = _SECONDS[unit or "s"]
        if scale >= previous:
            raise ConfigError(f"{field} is {text!r}: units must go from large to small, each once")
        total, at, previous = total + float(match.group(1)) * scale, match.end(), scale
    if at == 0:
        raise ConfigError(f"{field} is empty: it must be a duration such as 300s, 5min, 1h30m or 2d")
    return total


def byte_count(text: str, field: str) -> float:
    """A size in bytes (`20TB`, `16GiB`). Errors name `field`."""
    match = _PART.fullmatch(text.strip())
    if match is None or match.group(2) not in _BYTES:
        raise ConfigError(f"{field} is {text!r}: it must be a size such as 20TB or 16GiB")
    return float(match.group(1)) * _BYTES[match.group(2)]


def bytes_per_second(text: str, field: str) -> float:
    """A bandwidth in bytes per second (`340GB/s`). Errors name `field`."""
    size, slash, per = text.strip().partition("/")
    if not slash or per.strip() != "s":
        raise ConfigError(f"{field} is {text!r}: it must be a bandwidth such as 340GB/s")
    rate = byte_count(size, field)
    if rate <= 0:
        raise ConfigError(f"{field} is {text!r}: it must be above 0")
    return rate


def duration_text(value_s: float) -> str:
    """A duration for people, in two units at most."""
    for unit, scale, finer in (("d", 86_400, 3600), ("h", 3600, 60), ("min", 60, 1)):
        if value_s >= scale:
            count, rest = divmod(round(value_s / finer), scale // finer)
            small = {3600: "h", 60: "min", 1: "s"}[finer]
            return f"{count} {unit} {rest} {small}" if rest else f"{count} {unit}"
    return f"{value_s:.3g} s"
