"""The controller a training framework can call: who computes what after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prism_core import _native
from prism_core.spare.laws import PlacementLike, as_placement


@dataclass(frozen=True)
class Plan:
    """What the survivors are to do.

    Attributes:
        action: `continue` (nothing changes), `reorder` (the moves are computed for the current step too), or `wipe-out`
            (restart from a checkpoint).
        stacks: Entries of its stack that every live group computes from now on.
        moves: Group and shard type of every entry that came into the computed part.
        computed_by: The live group whose gradient of each type counts; empty after a wipe-out.
        lost: Types without a live host.
    """

    action: Literal["continue", "reorder", "wipe-out"]
    stacks: int
    moves: list[tuple[int, int]]
    computed_by: list[int]
    lost: list[int]


class Layout:
    """Stacks of `n` groups. Deterministic: the same failures give the same plans everywhere."""

    def __init__(self, n: int, r: int, placement: PlacementLike = "golomb", *, seed: int = 0) -> None:
        self._inner = _native.Layout(n, r, as_placement(placement), seed)

    @property
    def stacks(self) -> int:
        """Entries that every live group computes."""
        return self._inner.stacks

    @property
    def live(self) -> list[int]:
        """Groups that have not failed."""
        return self._inner.live

    def computed(self, group: int) -> list[int]:
        """Types a group computes, in order."""
        return self._inner.computed(group)

    def fail(self, groups: Sequence[int]) -> Plan:
        """Groups have failed: what now? Raises ConfigError, and changes nothing, if one of them is not alive."""
        return Plan(**self._inner.fail(list(groups)))

    def rejoin(self, groups: Sequence[int]) -> Plan:
        """Failed groups are whole again: stacks become as short as they can be, from the next step on."""
        return Plan(**self._inner.rejoin(list(groups)))

    def reset(self) -> None:
        """All groups are back, as after a restart."""
        self._inner.reset()
