"""Perturbations: changes to a job that a replay or an emulation runs under.

Each class is one kind of change and renders to one `[[perturb]]` table of a TOML file; the engine checks what is in it.
Ranks are chosen by `ranks` (numbers, or a text such as `"0-7,64"` or `"all"`), `nodes` and `stride` (first, step), or
several of them together.
Windows are `[from, to)`: `iterations` counts from 0, `time_ns` is virtual time from the start of the program.

```python
prism_core.replay("job.prism", perturb=[Straggler(ranks=[4242], factor=1.3), RankDeath(rank=7, iteration=2)])
```
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from prism_core.errors import ConfigError

ComputeClass = Literal["kernel", "gemm", "operator", "memcpy", "memset"]
Ranks: TypeAlias = Sequence[int] | str
Range: TypeAlias = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """One change; not made itself."""

    kind: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """The table: `kind` and everything that is given."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        table = {"kind": self.kind, **{key: value for key, value in given.items() if value is not None}}
        if isinstance(table.get("stride"), tuple):
            table["stride"] = dict(zip(("first", "step"), table["stride"], strict=True))
        return table


@dataclass(frozen=True, kw_only=True)
class _OfRanks(Perturbation):
    """A change to chosen ranks."""

    ranks: Ranks | None = None
    nodes: Sequence[int] | None = None
    stride: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class _OfOps(_OfRanks):
    """A change to compute ops of chosen ranks, perhaps only of some classes or names (`*` stands for any text)."""

    iterations: Range | None = None
    time_ns: Range | None = None
    classes: Sequence[ComputeClass] | None = None
    names: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Straggler(_OfOps):
    """Compute takes `factor` times as long."""

    kind: ClassVar[str] = "straggler"
    factor: float


@dataclass(frozen=True, kw_only=True)
class Jitter(_OfOps):
    """Compute scatters: every op has a draw of its own, by which it is multiplied or which is added in ns.

    The numbers a distribution needs: normal `mean`, `std`; lognormal `mu`, `sigma` (of the logarithm); uniform `low`,
    `high`; gamma `shape`, `scale`. Draws below 0 count as 0.
    """

    kind: ClassVar[str] = "jitter"
    distribution: Literal["normal", "lognormal", "uniform", "gamma"]
    mode: Literal["multiply", "add"]
    seed: int
    mean: float | None = None
    std: float | None = None
    mu: float | None = None
    sigma: float | None = None
    low: float | None = None
    high: float | None = None
    shape: float | None = None
    scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class Imbalance(_OfOps):
    """Ranks have more or fewer tokens: all-to-alls, and compute ops of the classes or names given, are scaled.

    One of `factor` (for all of the ranks), `factors` (one each, in the order of `ranks`) and `zipf` (exponent; mean 1;
    with `seed` in random order) must be given.
    """

    kind: ClassVar[str] = "imbalance"
    factor: float | None = None
    factors: Sequence[float] | None = None
    zipf: float | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class SlowLink(_OfRanks):
    """Links at chosen ranks lose bandwidth or gain latency.

    `intra` are the ranks' NVLink ports, `inter` their network cards (with `nics`: these cards of their nodes).
    """

    kind: ClassVar[str] = "slow-link"
    bandwidth_factor: float | None = None
    added_latency_ns: int | None = None
    scope: Literal["intra", "inter", "both"] | None = None
    nics: Sequence[int] | None = None
    iterations: Range | None = None
    time_ns: Range | None = None


@dataclass(frozen=True, kw_only=True)
class ThermalThrottle(_OfRanks):
    """GPUs heat up under compute and lower their clock when they get too hot.

    `clocks` are shares of the full clock, falling from 1.0; every `period_ns` the clock goes one step down at
    `throttle_c` or above, one step up at `throttle_c - hysteresis_c` or below.
    """

    kind: ClassVar[str] = "thermal-throttle"
    ambient_c: float
    throttle_c: float
    hysteresis_c: float
    resistance_c_per_w: float
    capacitance_j_per_c: float
    idle_w: float
    power_w: float
    clocks: Sequence[float]
    period_ns: int
    initial_c: float | None = None
    class_power_w: Mapping[ComputeClass, float] | None = None


@dataclass(frozen=True, kw_only=True)
class RankDeath(Perturbation):
    """A rank stops for good, at a time or after so many iterations."""

    kind: ClassVar[str] = "rank-death"
    rank: int
    time_ns: int | None = None
    iteration: int | None = None


#: What `perturb` arguments take: a path, TOML text, or perturbations (or dictionaries like their tables).
Perturb: TypeAlias = str | os.PathLike[str] | Sequence[Perturbation | Mapping[str, Any]]


def to_toml(perturbations: Sequence[Perturbation | Mapping[str, Any]]) -> str:
    """The perturbations as the text of a TOML file."""
    tables = [item.to_dict() if isinstance(item, Perturbation) else dict(item) for item in perturbations]
    lines = []
    for table in tables:
        lines += ["[[perturb]]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def perturbation_text(perturb: Perturb | None) -> str | None:
    """TOML text of what a `perturb` argument says. A text with a line break or `=` is TOML, any other a path."""
    if perturb is None:
        return None
    if isinstance(perturb, str) and ("\n" in perturb or "=" in perturb):
        return perturb
    if isinstance(perturb, str | os.PathLike):
        try:
            return Path(perturb).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read {perturb}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{perturb} is not TOML: {error}") from error
    return to_toml(perturb)


def split_group_failures(text: str | None) -> tuple[str | None, dict[str, Any] | None]:
    """Takes the tables `[[group_failure]]` and `[spare]` out of a perturbation text.

    They do not change how a job runs but which job it is; `prism_core.spare.failures` reads them.

    Returns:
        The rest of the text (`None` if nothing is left), and the tables (`None` if there are none).
    """
    if text is None:
        return None, None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return text, None  # The engine says what is wrong.
    tables: dict[str, Any] = {key: document.pop(key) for key in ("group_failure", "spare") if key in document}
    if not tables:
        return text, None
    return "\n".join(f"{_key(key)} = {_value(value)}" for key, value in document.items()) or None, tables


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return (
        '"' + "".join(f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char for char in escaped) + '"'
    )


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence | range):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if hasattr(value, "item"):  # a NumPy number
        value = value.item()
    if isinstance(value, int | float):
        return repr(value)
    raise ConfigError(f"{value!r} cannot be part of a perturbation")
