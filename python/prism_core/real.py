"""Sandbox ranks on real GPUs: which GPU a rank gets, and whether time was kept."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism_core.environment import ENV_REAL_NCCL
from prism_core.errors import ConfigError, PrismError, TimekeepingError

_DEVICE_FILES = Path("/dev")
_DEVICE_FILE = re.compile(r"nvidia\d+")


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """How many GPUs a program would see here, without asking the driver."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return sum(1 for name in chosen.split(",") if name.strip() and name.strip() != "-1")
    return sum(1 for path in _DEVICE_FILES.glob("nvidia*") if _DEVICE_FILE.fullmatch(path.name))


def assign_gpus(ranks: Sequence[int]) -> dict[int, int]:
    """The GPU of each sandbox rank, in turn; several ranks share one where there are more ranks than GPUs.

    Raises:
        ConfigError: There is no GPU here.
    """
    count = visible_gpus()
    if count == 0:
        raise ConfigError("--device real: no GPU is visible here (no /dev/nvidia0, or CUDA_VISIBLE_DEVICES is empty)")
    return {rank: index % count for index, rank in enumerate(sorted(ranks))}


def real_nccl(environment: Mapping[str, str] = os.environ) -> str | None:
    """Path of the real NCCL: what the user says, else the one of the installed wheel of NVIDIA's."""
    if environment.get(ENV_REAL_NCCL):
        return environment[ENV_REAL_NCCL]
    spec = importlib.util.find_spec("nvidia") if "nvidia" not in sys.modules else sys.modules["nvidia"].__spec__
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or []]
    found = [folder / "nccl" / "lib" / "libnccl.so.2" for folder in folders]
    return next((str(path) for path in found if path.is_file()), None)


def release_failure(ranks: Sequence[Mapping[str, Any]], limit_us: float) -> PrismError | None:
    """An error if a rank's held streams were released so late that its times are not those of the target job."""
    for rank in ranks:
        errors = rank.get("release_errors")
        if errors is not None and errors["p99_ns"] > limit_us * 1_000:
            return TimekeepingError(
                f"rank {rank['rank']}: one of a hundred of {errors['count']} held streams was released more than "
                f"{errors['p99_ns'] / 1_000:.0f} us late (the limit is {limit_us:g} us), so its times are too long. "
                "Leave a CPU core free for each sandbox rank, run fewer of them, or say --max-release-error"
            )
    return None
