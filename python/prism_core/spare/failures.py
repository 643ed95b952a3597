"""Group failures of a perturbation file: the tables `[[group_failure]]` and `[spare]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prism_core.errors import ConfigError
from prism_core.spare.laws import PlacementLike

#: Longest time a table may give, ns: eleven days.
_LONGEST_NS = 10**15


@dataclass(frozen=True, kw_only=True)
class GroupFailures:
    """Which groups die when, and how the job guards against it: the arguments of `replayed`.

    Attributes:
        failures: Groups that die, by iteration (from 0).
        r: Types of a group.
        placement: A name or offsets.
        iterations: Iterations to replay; `None`: two more than the last failure.
        groups: How many groups there must be; `None`: as many as the graph has.
        detection_s: Until a failure is noticed, seconds, on top of the step.
        shrink_s: To shrink communicators, seconds.
    """

    failures: Mapping[int, Sequence[int]]
    r: int
    placement: PlacementLike = "golomb"
    iterations: int | None = None
    groups: int | None = None
    detection_s: float = 0.0
    shrink_s: float = 0.0


def group_failures(tables: Mapping[str, Any]) -> GroupFailures:
    """What the tables say.

    Args:
        tables: `group_failure` and `spare`, as read from TOML.

    Raises:
        ConfigError: Something in them is wrong, missing or unknown; names the table and the key.
    """
    entries, guard = tables.get("group_failure", []), tables.get("spare")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("`group_failure` must be a list of tables: write [[group_failure]]")
    if guard is not None and not isinstance(guard, dict):
        raise ConfigError("`spare` must be a table: write [spare]")
    if not entries:
        raise ConfigError("`spare` says how a job guards against [[group_failure]] tables, and there are none")
    if guard is None or "redundancy" not in guard:
        raise ConfigError("`spare.redundancy` is missing: how many groups hold the data of each shard type?")
    _refuse_unknown("spare", guard, ("redundancy", "placement", "iterations", "groups", "detection_ns", "shrink_ns"))
    return GroupFailures(
        failures=_failures(entries),
        r=_integer("spare", guard, "redundancy", least=1),
        placement=_placement(guard.get("placement", "golomb")),
        iterations=_integer("spare", guard, "iterations", least=1) if "iterations" in guard else None,
        groups=_integer("spare", guard, "groups", least=2) if "groups" in guard else None,
        detection_s=_integer("spare", {"detection_ns": 0} | guard, "detection_ns", most=_LONGEST_NS) / 1e9,
        shrink_s=_integer("spare", {"shrink_ns": 0} | guard, "shrink_ns", most=_LONGEST_NS) / 1e9,
    )


def _failures(entries: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    """Groups by the iteration in which they die; a group dies once."""
    failures: dict[int, list[int]] = {}
    entry_of: dict[int, str] = {}
    for number, entry in enumerate(entries):
        name = f"group_failure[{number}]"
        _refuse_unknown(name, entry, ("iteration", "groups"))
        iteration, dead = _integer(name, entry, "iteration"), entry.get("groups")
        if not isinstance(dead, list) or not dead or not all(type(group) is int and group >= 0 for group in dead):
            raise ConfigError(f"`{name}.groups` must be a list of groups, such as [5, 9], not {dead!r}")
        for group in dead:
            if group in entry_of:
                raise ConfigError(f"`{name}.groups`: group {group} has died already in {entry_of[group]}")
            entry_of[group] = name
        failures.setdefault(iteration, []).extend(dead)
    return failures


def _placement(value: Any) -> PlacementLike:
    if isinstance(value, str) or (isinstance(value, list) and all(type(offset) is int for offset in value)):
        return value
    raise ConfigError(f"`spare.placement` must be a name, or offsets such as [0, 1, 4, 6], not {value!r}")


def _integer(name: str, table: Mapping[str, Any], key: str, *, least: int = 0, most: int | None = None) -> int:
    """A number of a table, in its range."""
    if key not in table:
        raise ConfigError(f"`{name}.{key}` is missing")
    value = table[key]
    if type(value) is not int or value < least or (most is not None and value > most):
        raise ConfigError(f"`{name}.{key}` must be a whole number of {least} or more{_up_to(most)}, not {value!r}")
    return value


def _up_to(most: int | None) -> str:
    return "" if most is None else f", at most {most}"


def _refuse_unknown(name: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"`{name}`: unknown key `{key}`; there are {', '.join(known)}")
