"""Closed forms and placements. `n` is the number of groups and of shard types, `r` the number of hosts of a type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prism_core import _native

PlacementLike: TypeAlias = str | Sequence[int]
"""`"golomb"`, `"contiguous"`, `"disjoint"`, `"random"`, or the offsets themselves."""


def as_placement(placement: PlacementLike) -> str | list[int]:
    """The placement as the engine takes it."""
    return placement if isinstance(placement, str) else list(placement)


def mean_endurable_failures(n: int, r: int) -> float:
    """Published estimate of the failures between two restarts, `Gamma(1 + 1/r) n^(1 - 1/r)`.

    Within 1 % of simulation of the Golomb placement for r >= 3 and n >= 200; 3 % too high at r = 2, n = 200.
    """
    return _native.spare_law("mean_endurable_failures", [n, r])


def overhead_lower_bound(n: int, r: int) -> float:
    """Mean of `ceil(n / (n - k))` over the failures `k` endured: stack entries computed per step, at least."""
    return _native.spare_law("overhead_lower_bound", [n, r])


def redundancy_rule(n: int) -> int:
    """Published rule of thumb, `floor(log2 n + 0.8327)`."""
    return int(_native.spare_law("redundancy_rule", [n]))


def max_redundancy(n: int) -> int:
    """Largest `r` whose optimal Golomb ruler fits on a circle of `n` groups."""
    return int(_native.spare_law("max_redundancy", [n]))


def masked_probability(n: int, r: int, k: float) -> float:
    """Probability that the first `k` failures are all masked, by the published Weibull law."""
    return _native.spare_law("masked_probability", [n, r, k])


def checkpoint_interval(save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Seconds between the ends of two checkpoints for most progress: `Ts + sqrt(Ts^2 + 2 Ts (Tf + Tr))`.

    Args:
        save_s: Time to write a checkpoint.
        restart_s: Time to restart from one.
        mtbf_s: Mean time between failures that stop the job.
    """
    return _native.spare_law("checkpoint_interval", [save_s, restart_s, mtbf_s])


def time_to_wipe_out(n: int, r: int, group_mtbf_s: float, repair_s: float) -> float:
    """Mean time until a type has lost all hosts if failed groups are whole again after `repair_s`, seconds.

    Ours: types are lost independently, at the rate `N r (1 - p) p^(r-1) / m`; `p` is the chance that a group is down.
    """
    return _native.spare_law("time_to_wipe_out", [n, r, group_mtbf_s, repair_s])


def availability(save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time that is progress at [`checkpoint_interval`][prism_core.spare.checkpoint_interval]."""
    return _native.spare_law("availability", [save_s, restart_s, mtbf_s])


def relative_time(n: int, r: int, save_s: float, restart_s: float, system_mtbf_s: float) -> float:
    """Time over time without failures, `J(r)`: overhead bound over availability."""
    return _native.spare_law("relative_time", [n, r, save_s, restart_s, system_mtbf_s])


@dataclass(frozen=True)
class Intervals:
    """Work between two checkpoints of a job that every failure stops, three ways; seconds."""

    young_s: float
    daly_s: float
    exact_s: float
    efficiency: float
    is_young_off: bool


def intervals(save_s: float, restart_s: float, mtbf_s: float) -> Intervals:
    """Young's, Daly's and the exact interval for exponential failures.

    `is_young_off` warns where Young's is more than 10 % off, because saving is not short against `mtbf_s`.
    """
    return Intervals(**_native.spare_intervals(save_s, restart_s, mtbf_s))


def expected_masked(n: int, r: int, placement: PlacementLike = "golomb", *, seed: int = 0) -> float:
    """Mean number of failures masked before a type has lost all hosts.

    Exact for disjoint and contiguous placements, for r <= 2, and for n <= 20; else a Poisson approximation, within
    0.7 % for n >= 600 and r >= 4.
    """
    return _native.spare_expected_masked(n, r, as_placement(placement), seed)[0]


def offsets(n: int, r: int, placement: PlacementLike = "golomb", *, seed: int = 0) -> list[int]:
    """Offsets of a cyclic placement: group `g` holds the types `(g + offset) mod n`."""
    return _native.spare_offsets(n, r, as_placement(placement), seed)


def min_stacks(n: int, offsets: Sequence[int], failed: Sequence[int]) -> int | None:
    """Fewest stack entries the survivors must compute to cover every type; None if a type has no host left."""
    return _native.spare_min_stacks(n, list(offsets), list(failed))


def wipe_out_index(n: int, offsets: Sequence[int], failure_order: Sequence[int]) -> int | None:
    """Number (from 1) of the failure after which a type has no host; None if there is none."""
    return _native.spare_wipe_out_index(n, list(offsets), list(failure_order))


def stack_thresholds(n: int, offsets: Sequence[int], failure_order: Sequence[int]) -> dict[int, int]:
    """The last number of failures for which `s` stack entries are enough, by `s`."""
    return _native.spare_stack_thresholds(n, list(offsets), list(failure_order))


@dataclass(frozen=True)
class SpreadPlacement:
    """A placement that keeps the hosts of every type in different failure domains.

    Attributes:
        offsets: Offsets on the circle of positions.
        order: Group at each position.
        shared: Types of which two hosts share a domain.
        most_in_domain: Most hosts of one type in one domain.
    """

    offsets: list[int]
    order: list[int]
    shared: int
    most_in_domain: int


def spread(domains: Sequence[int], r: int) -> SpreadPlacement:
    """Places `r` copies of every type over groups of the given failure domains (`domains[g]`: rack, switch, power)."""
    return SpreadPlacement(*_native.spare_spread(list(domains), r))
