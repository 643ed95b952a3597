"""Arguments that `simulate` and `plan` share, checked and put into the engine's form."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from prism_core.errors import ConfigError
from prism_core.spare.traces import FailureTrace, read_trace


@dataclass(frozen=True, kw_only=True)
class LocalCheckpoints:
    """Checkpoints on the groups' own machines, between those on the storage.

    Attributes:
        save_s: Time to write one, seconds; the job waits.
        checkpoint_steps: Steps between them.
        restart_s: Time to restart from one, seconds.
        share: Share of restarts for which the copies of all groups survive; the others go back to the storage.
    """

    save_s: float
    checkpoint_steps: int
    restart_s: float
    share: float


class Details(TypedDict, total=False):
    """What `simulate` and `plan` take besides, all of it 0 or absent by default.

    Attributes:
        domains: What fails on top, several groups at once: pairs of the neighbouring groups that fail together (node,
            rack, switch, power feed) and the mean time between failures of one such domain, seconds.
        trace: Observed failures, in place of drawn ones: a `FailureTrace`, or the path of its file (`read_trace`).
        prefetch_s: Time to read the data of one type for one step in the background, seconds: no step is shorter than
            `r` times this.
        rejoin_s: How long all wait when repaired groups join again, seconds.
        restart_square_s: What a restart takes on top, in seconds, for the square of the number of groups.
        restarts_together: Restart storms: a failure within a restart makes everybody begin anew.
        save_per_type_s: What saving takes on top for each type a group holds, seconds.
        restart_per_type_s: What restarting takes on top for each type a group holds, seconds.
        local: Checkpoints on the groups' own machines.
    """

    domains: Sequence[tuple[int, float]]
    trace: FailureTrace | str | os.PathLike[str]
    prefetch_s: float
    rejoin_s: float
    restart_square_s: float
    restarts_together: bool
    save_per_type_s: float
    restart_per_type_s: float
    local: LocalCheckpoints | None


RECOVERY = ("rejoin_s", "restart_square_s", "restarts_together", "save_per_type_s", "restart_per_type_s")


def check_details(details: Details) -> None:
    """Refuses names that are none."""
    unknown = sorted(set(details) - set(Details.__annotations__))
    if unknown:
        raise ConfigError(f"{unknown[0]} is no argument: there are also {', '.join(Details.__annotations__)}")


def failures_of(
    groups: int,
    group_mtbf_s: float | None,
    system_mtbf_s: float | None,
    weibull_shape: float | None,
    domain_groups: int,
    domain_mtbf_s: float | None,
    details: Details,
) -> dict[str, Any]:
    """The engine's `Failures`."""
    trace = details.get("trace")
    if isinstance(trace, str | os.PathLike):
        trace = read_trace(Path(trace))
    if group_mtbf_s is not None and system_mtbf_s is not None:
        raise ConfigError("give either group_mtbf_s or system_mtbf_s, the mean time between failures")
    if group_mtbf_s is None and system_mtbf_s is None:
        if trace is None or not trace.failures:
            raise ConfigError("give either group_mtbf_s or system_mtbf_s, the mean time between failures")
        system_mtbf_s = trace.system_mtbf_s
    if domain_groups and domain_mtbf_s is None:
        raise ConfigError("domain_mtbf_s is missing: how often does a domain of domain_groups groups fail?")
    domains = [*details.get("domains", ())]
    if domain_groups and domain_mtbf_s is not None:
        domains.append((domain_groups, domain_mtbf_s))
    mtbf = group_mtbf_s if group_mtbf_s is not None else (system_mtbf_s or 0.0) * groups
    return {
        "group_mtbf_s": mtbf,
        "distribution": "exponential" if weibull_shape is None else {"weibull": {"shape": weibull_shape}},
        "domains": [{"groups": count, "mtbf_s": every} for count, every in domains],
        "trace": None if trace is None else trace.to_dict(),
    }


def recovery_of(
    save_s: float,
    stall_s: float | None,
    checkpoint_steps: int,
    restart_s: float,
    detection_s: float,
    shrink_s: float,
    repair_s: float | None,
    swap_s: float,
    details: Details,
) -> dict[str, Any]:
    """The engine's `Recovery`."""
    local = details.get("local")
    return {
        "save_s": save_s, "stall_s": save_s if stall_s is None else stall_s, "checkpoint_steps": checkpoint_steps,
        "restart_s": restart_s, "detection_s": detection_s, "shrink_s": shrink_s, "repair_s": repair_s,
        "swap_s": swap_s, "local": None if local is None else asdict(local),
        **{name: details[name] for name in RECOVERY if name in details},  # type: ignore[literal-required]
    }  # fmt: skip
