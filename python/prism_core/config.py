"""What a run is asked to do: plain typed values, checked once, and the reading of their command-line forms."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from prism_core import _native
from prism_core.errors import ConfigError
from prism_core.perturb import Perturb
from prism_core.rules import RulesLike

DeviceKind = Literal["emulated", "real", "host"]
DEFAULT_DEVICE = "emulated:h100-sxm"


@dataclass(frozen=True, slots=True)
class Device:
    """The device ranks run on, and the profile (TOML text) that gives its speed and its node."""

    kind: DeviceKind
    profile: str

    @property
    def gpus_per_node(self) -> int:
        """Devices a node shows to its processes."""
        try:
            gpus = tomllib.loads(self.profile)["node"]["gpus"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"the device profile is not TOML: {error}") from error
        except (KeyError, TypeError) as error:
            raise ConfigError("the device profile has no [node] table with `gpus`") from error
        if not isinstance(gpus, int) or gpus < 1:
            raise ConfigError(f"the device profile says a node has {gpus!r} GPUs")
        return gpus


def parse_device(text: str) -> Device:
    """Reads `KIND[:PROFILE]`: the profile is the name of a built-in one or a path to a TOML file.

    `host` is for programs without CUDA that call NCCL with plain host memory (C, ctypes, cffi); `real` runs sandbox
    ranks on this machine's GPUs, in wall-clock time.
    """
    kind, _, profile = text.partition(":")
    kinds: dict[str, DeviceKind] = {kind: kind for kind in get_args(DeviceKind)}
    if kind in kinds:
        return Device(kinds[kind], read_profile(profile or DEFAULT_DEVICE.partition(":")[2]))
    known = ", ".join(f"{kind}[:PROFILE]" for kind in kinds)
    raise ConfigError(f"device '{text}' is unknown: write one of {known}")


def read_profile(name: str) -> str:
    """TOML text of a built-in profile or of a file."""
    if name in _native.profile_names():
        return _native.profile_toml(name)
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return path.read_text(encoding="utf-8")
    known = ", ".join(_native.profile_names())
    raise ConfigError(f"'{name}' is neither a device profile ({known}) nor a .toml file")


def device_entry(profile: str, name: str) -> int | None:
    """A whole number of a profile's table `[device]`, by the profile's TOML text; nothing if it does not say."""
    device = tomllib.loads(profile).get("device", {})
    value = device.get(name) if isinstance(device, dict) else None
    return value if isinstance(value, int) else None


def parse_ranks(text: str, world_size: int) -> list[int]:
    """Reads `0,5,8-11` into ranks in ascending order; every one must be below `world_size`."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            ranks.update(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            raise ConfigError(f"'{part.strip()}' in '{text}' is not a rank or a range of ranks") from None
    return check_ranks(ranks, world_size)


def check_ranks(ranks: Iterable[int], world_size: int) -> list[int]:
    """The ranks in ascending order, each once."""
    checked = sorted(set(ranks))
    if not checked:
        raise ConfigError("no rank is named")
    for rank in (checked[0], checked[-1]):
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is outside the job: it has {world_size} ranks, 0 to {world_size - 1}")
    return checked


def parse_slow(items: Sequence[str]) -> dict[int, float]:
    """Reads `RANK=FACTOR` items."""
    slow: dict[int, float] = {}
    for item in items:
        rank, _, factor = item.partition("=")
        try:
            slow[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(f"'{item}' is not of the form RANK=FACTOR, for example 4242=1.3") from None
    return slow


def check_slow(slow: Mapping[int, float], world_size: int) -> dict[str, float]:
    """The slow-down factors as the engine takes them."""
    if slow:
        check_ranks(slow, world_size)
    for rank, factor in slow.items():
        if not 0.0 < factor < float("inf"):
            raise ConfigError(f"the factor of rank {rank} must be a positive number, not {factor}")
    return {str(rank): float(factor) for rank, factor in sorted(slow.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectConfig:
    """One `prism collect`."""

    command: Sequence[str]
    output: Path
    world_size: int
    device: str = DEFAULT_DEVICE
    #: `auto`, `all`, or a list such as `0,5,8-11`.
    ranks: str = "auto"
    #: How many inferred ranks to run as a check.
    num_verified: int = 2
    #: Ranks that communicate alike and differ by no more than this share of their time count as one role.
    role_tolerance: float = 0.0
    seed: int = 0
    #: Processes at a time; 0 = one per CPU.
    jobs: int = 0
    #: Ranks exchange real values (tier T3; host device, all ranks): `jobs` run at a time, the others wait in calls.
    exact: bool = False
    #: Kernel tables: durations that need no model. The first that knows a kernel holds.
    kernels: Sequence[Path] = ()
    #: `constant` (costs per call from the profile) or `measured` (CPU time of the ranks; not repeatable).
    host_time: str = "constant"
    #: Where logs go; default: beside the output.
    run_folder: Path | None = None
    echo: bool = False
    #: Rules for values that are not known (`prism_core.rules`): a TOML file or the rules themselves.
    rules: RulesLike | None = None
    #: End the run at the first unknown value that the host reads.
    strict_values: bool = False
    #: Fork ranks from one process that has imported the program's modules; by default from four ranks on.
    fork_server: bool | None = None
    #: Ranks in play at a time; 0 = `jobs`. Their recordings are the same for every size and order.
    slice_size: int = 0
    #: `ascending`, `descending`, or `random` (by `seed`).
    slice_order: str = "ascending"
    #: Forget ranks that an earlier, unfinished collection has left.
    fresh: bool = False
    #: `(i, n)`: run the i-th of n parts of the ranks (from 0) and keep them for a collection that assembles all.
    part: tuple[int, int] | None = None
    #: Who runs slices: `local` (this machine) or `ray`.
    executor: str = "local"
    #: Recordings in memory; more are only on disk.
    memory_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulateConfig:
    """One `prism emulate`."""

    command: Sequence[str]
    graph: Path
    output: Path
    sandbox: Sequence[int]
    slow: Mapping[int, float] = field(default_factory=dict)
    perturb: Perturb | None = None
    #: Default: the device the graph was collected on.
    device: str | None = None
    #: On a real device: an error if one of a hundred held streams is released later than so many us.
    max_release_error_us: float = 200.0
    #: Sandbox ranks that run at a time, the others wait in their calls (host device); 0 = all.
    jobs: int = 0
    #: As for `prism collect`.
    host_time: str = "constant"
    #: Kernel tables of the sandbox ranks. Default: those the graph was collected with.
    kernels: Sequence[Path] = ()
    echo: bool = True
    #: As for `CollectConfig`.
    rules: RulesLike | None = None
    strict_values: bool = False
    fork_server: bool | None = None
    #: Write the graph of what the ranks did here; every rank must be a sandbox.
    record: Path | None = None
