"""Simulation of a failing job, and the search for the best set-up."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, Unpack

from prism_core import _native
from prism_core.errors import ConfigError
from prism_core.spare.laws import PlacementLike, as_placement
from prism_core.spare.options import Details, check_details, failures_of, recovery_of

Policy: TypeAlias = Literal["spare", "replication", "checkpoint", "elastic", "spares"]
DEFAULT_PLACEMENTS: tuple[str, ...] = ("golomb", "contiguous", "disjoint")


def _threads(threads: int) -> int:
    return threads or len(os.sched_getaffinity(0))


def simulate(
    groups: int,
    *,
    compute_s: float,
    steps: int,
    save_s: float,
    restart_s: float,
    checkpoint_steps: int,
    all_reduce_s: float = 0.0,
    policy: Policy = "spare",
    r: int | None = None,
    placement: PlacementLike = "golomb",
    group_mtbf_s: float | None = None,
    system_mtbf_s: float | None = None,
    weibull_shape: float | None = None,
    domain_groups: int = 0,
    domain_mtbf_s: float | None = None,
    stall_s: float | None = None,
    detection_s: float = 0.0,
    shrink_s: float = 0.0,
    repair_s: float | None = None,
    swap_s: float = 0.0,
    spares: int = 0,
    jitter: float = 0.0,
    data_s: float = 0.0,
    published: bool = False,
    give_up: float = 30.0,
    seeds: int = 32,
    first_seed: int = 0,
    threads: int = 0,
    placement_seed: int = 0,
    timeline: bool = False,
    **details: Unpack[Details],
) -> dict[str, Any]:
    """Simulates `seeds` trainings of a job whose groups fail.

    All policies see the same failures for the same seed. `spare` reorders stacks of `r` types, `replication` has blocks
    of `r` groups, `checkpoint` restarts at every failure, `elastic` leaves failed groups out until they are repaired,
    `spares` puts spare groups in their place.

    Args:
        groups: Model-parallel groups, N.
        compute_s: Compute of one stack entry, seconds.
        steps: Optimiser steps.
        save_s: Time to write a checkpoint, seconds.
        restart_s: Time to restart, seconds.
        checkpoint_steps: Steps between checkpoints.
        all_reduce_s: All-reduce of a step, seconds.
        policy: What is done about failures.
        r: Redundancy, for `spare` and `replication`.
        placement: For `spare`: a name or offsets.
        group_mtbf_s: Mean time between failures of one group, seconds; or
        system_mtbf_s: of any of the groups.
        weibull_shape: Failures are Weibull of this shape instead of exponential.
        domain_groups: Neighbouring groups that fail together.
        domain_mtbf_s: Mean time between failures of such a domain, seconds.
        stall_s: How long a save holds the job, seconds; all of `save_s` by default.
        detection_s: Until a failure is noticed, seconds.
        shrink_s: To shrink communicators, seconds.
        repair_s: Until a failed group is whole again, seconds. It then joins again under every policy, and a restart
            that needs it waits for it. By default failed groups are replaced at the next restart, within
            `restart_s`; `elastic` and `spares` need a time.
        swap_s: To put a spare in place, seconds (`spares`).
        spares: Spare groups (`spares`).
        jitter: Standard deviation of the compute of an entry, relative.
        data_s: Time to read the data of a stack entry in every step, seconds.
        published: Simulate the published set-up, with what handicaps its baseline.
        give_up: Stop at this multiple of the time without failures.
        seeds: Trainings.
        first_seed: Seed of the first.
        threads: Threads; 0: one per CPU. The result does not depend on it.
        placement_seed: Seed of a random placement.
        timeline: Return also what the first training did when.
        **details: Failure domains, observed failures, local checkpoints and more: `prism_core.spare.Details`.

    Returns:
        `summary` (for each quantity mean, standard_error, p10, p50, p90; runs, finished, is_converged), `runs`, and
        `timeline` if asked for: spans with activity, start_s, end_s, step, live, stacks.
    """
    check_details(details)
    if repair_s is None and policy in ("elastic", "spares"):
        raise ConfigError(f"repair_s is missing: policy {policy!r} needs the time until a failed group is whole again")
    options = {
        "job": {
            "groups": groups, "steps": steps, "compute_s": compute_s, "all_reduce_s": all_reduce_s, "jitter": jitter,
            "data_s": data_s, "prefetch_s": details.get("prefetch_s", 0.0),
        },
        "failures": failures_of(
            groups, group_mtbf_s, system_mtbf_s, weibull_shape, domain_groups, domain_mtbf_s, details
        ),
        "recovery": recovery_of(
            save_s, stall_s, checkpoint_steps, restart_s, detection_s, shrink_s, repair_s, swap_s, details
        ),
        "policy": policy, "r": r, "placement": as_placement(placement), "placement_seed": placement_seed,
        "spares": spares, "published": published, "give_up": give_up, "first_seed": first_seed, "seeds": seeds,
        "threads": _threads(threads), "timeline": timeline,
    }  # fmt: skip
    found: dict[str, Any] = json.loads(_native.spare_simulate_json(json.dumps(options)))
    return found


def frontier(
    groups: int,
    *,
    save_s: float,
    restart_s: float,
    system_mtbf_s: float,
    redundancy: tuple[int, int] = (1, 28),
    placements: Sequence[PlacementLike] = DEFAULT_PLACEMENTS,
    repair_s: float | None = None,
) -> list[dict[str, Any]]:
    """What the closed forms say for every redundancy and placement that fits; no step time is needed.

    With `repair_s` failed groups join again so long after their failures; by default they are out until the restart.

    Returns:
        Rows with r, placement, masked, restart_every_s, stacks, interval_s, availability, relative_time, and band: the
        relative time if all restarts were as far apart as the last, and the first, tenth of them.
    """
    options = {
        "groups": groups, "redundancy": list(redundancy), "placements": [as_placement(each) for each in placements],
        "save_s": save_s, "restart_s": restart_s, "system_mtbf_s": system_mtbf_s,
        "repair_s": repair_s,
    }  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(_native.spare_frontier_json(json.dumps(options)))
    return rows


def plan(  # noqa: D417 - the other arguments are those of simulate
    groups: int,
    *,
    save_s: float,
    restart_s: float,
    compute_s: float | None = None,
    steps: int | None = None,
    all_reduce_s: float = 0.0,
    group_mtbf_s: float | None = None,
    system_mtbf_s: float | None = None,
    weibull_shape: float | None = None,
    domain_groups: int = 0,
    domain_mtbf_s: float | None = None,
    stall_s: float | None = None,
    checkpoint_steps: int | None = None,
    detection_s: float = 0.0,
    shrink_s: float = 0.0,
    repair_s: float | None = None,
    swap_s: float = 0.0,
    spares: int = 0,
    jitter: float = 0.0,
    data_s: float = 0.0,
    redundancy: tuple[int, int] = (2, 28),
    placements: Sequence[PlacementLike] = DEFAULT_PLACEMENTS,
    fits_memory: int | None = None,
    gpus_per_group: int | None = None,
    cost_per_gpu_hour: float | None = None,
    seeds: int = 32,
    threads: int = 0,
    timeline: bool = False,
    **details: Unpack[Details],
) -> dict[str, Any]:
    """Recommends redundancy, placement and checkpoint interval for the least expected time to train.

    With `compute_s` and `steps`, finalists and other policies are simulated on the same failures; without, the closed
    forms answer in relative times. What needs an input that is not given is None.

    Args:
        groups: Model-parallel groups, N.
        save_s: Time to write a checkpoint, seconds.
        restart_s: Time to restart, seconds.
        compute_s: Compute of one stack entry, seconds.
        steps: Optimiser steps.
        redundancy: Smallest and largest `r` to consider.
        placements: Placements to consider.
        fits_memory: Largest redundancy that fits into device memory.
        gpus_per_group: GPUs of a group, for GPU hours.
        cost_per_gpu_hour: For the cost.
        timeline: Simulate one more training as recommended, and return what it did when.

    Other arguments: as for [`simulate`][prism_core.spare.simulate].

    Returns:
        `best`, `finalists`, `alternatives`, `sensitivities`, `warnings`, `frontier`, and the inputs that are unknown.
    """
    check_details(details)
    failures = failures_of(groups, group_mtbf_s, system_mtbf_s, weibull_shape, domain_groups, domain_mtbf_s, details)
    if spares and repair_s is None:
        raise ConfigError("repair_s is missing: spares need the time until a failed group is whole again")
    rate = groups / failures["group_mtbf_s"] if failures["group_mtbf_s"] > 0 else float("inf")
    for domain in failures["domains"]:
        if domain["groups"] < 1 or not domain["mtbf_s"] > 0:
            raise ConfigError("a failure domain has at least one group, and a mean time between failures above 0")
        rate += -(-groups // domain["groups"]) / domain["mtbf_s"]
    if rate <= 0 or rate == float("inf"):
        raise ConfigError("the mean time between failures must be above 0")
    high = min(redundancy[1], fits_memory) if fits_memory is not None else redundancy[1]
    rows = frontier(
        groups, save_s=save_s if stall_s is None else stall_s, restart_s=restart_s, system_mtbf_s=1 / rate,
        redundancy=(redundancy[0], high), placements=placements, repair_s=repair_s,
    )  # fmt: skip
    found: dict[str, Any] = {"groups": groups, "system_mtbf_s": 1 / rate, "frontier": rows}
    unknown = [name for name, value in (("compute_s", compute_s), ("steps", steps)) if value is None]
    if unknown:
        best = min(rows, key=lambda row: (row["relative_time"], row["r"]))
        found |= {
            "best": {"policy": "spare", "simulated": None, "checkpoint_steps": None, "no_progress": None, **best},
            "finalists": [], "alternatives": [], "sensitivities": [],
            "warnings": ["the step time or the number of steps is unknown: closed forms only, in relative times"],
        }  # fmt: skip
    else:
        options: dict[str, Any] = {
            "job": {
                "groups": groups, "steps": steps, "compute_s": compute_s, "all_reduce_s": all_reduce_s,
                "jitter": jitter, "data_s": data_s, "prefetch_s": details.get("prefetch_s", 0.0),
            },
            "failures": failures,
            "recovery": recovery_of(
                save_s, stall_s, checkpoint_steps or 0, restart_s, detection_s, shrink_s, repair_s, swap_s, details
            ),
            "redundancy": list(redundancy), "placements": [as_placement(each) for each in placements],
            "spares": spares, "fits_memory": fits_memory, "seeds": seeds, "threads": _threads(threads),
        }  # fmt: skip
        found |= json.loads(_native.spare_plan_json(json.dumps(options)))
        if timeline:
            best = found["best"]
            options |= {
                "policy": "spare", "r": best["r"], "placement": best["placement"], "placement_seed": 0,
                "published": False, "give_up": 30.0, "first_seed": 0, "seeds": 1, "timeline": True,
                "recovery": {**options["recovery"], "checkpoint_steps": best["checkpoint_steps"]},
            }  # fmt: skip
            found["timeline"] = json.loads(_native.spare_simulate_json(json.dumps(options)))["timeline"]
    _add_cost(found, groups, gpus_per_group, cost_per_gpu_hour)
    optional = {
        "repair_s": repair_s, "gpus_per_group": gpus_per_group, "cost_per_gpu_hour": cost_per_gpu_hour,
        "fits_memory": fits_memory,
    }  # fmt: skip
    found["unknown"] = [*unknown, *(name for name, value in optional.items() if value is None)]
    return found


def _add_cost(found: dict[str, Any], groups: int, gpus_per_group: int | None, price: float | None) -> None:
    """GPU hours and cost of every simulated choice, where they are known."""
    for choice in [found["best"], *found["finalists"], *found["alternatives"]]:
        summary = choice["simulated"]
        hours = None
        if summary is not None and gpus_per_group is not None and summary["finished"] == summary["runs"]:
            hours = summary["total_s"]["mean"] / 3600 * (groups + (choice["spares"] or 0)) * gpus_per_group
        choice["gpu_hours"] = hours
        choice["cost"] = None if hours is None or price is None else hours * price
