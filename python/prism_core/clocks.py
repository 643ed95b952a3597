"""Clocks of slices that were recorded at different times or on different machines, brought to one."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from prism_core import _native
from prism_core.errors import ConfigError

#: A rate beyond this is no clock's.
MAX_DRIFT_PPM = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceClock:
    """How the clock of a slice goes against the reference's.

    Attributes:
        slice: Its name.
        offset_ns: What the reference reads when the slice reads zero.
        drift_ppm: How much faster the reference goes, in millionths.
        ties: Events it shares with other slices.
        set_aside: Those of them that count for little because they disagree.
        rms_ns: How far its ties are from the events' moments.
        error_ns: Standard error of the clock in the middle of what was observed.
    """

    slice: str
    offset_ns: float
    drift_ppm: float
    ties: int
    set_aside: int
    rms_ns: float
    error_ns: float

    def to_reference(self, time_ns: float) -> float:
        """A moment of the slice on the reference's clock, ns."""
        return time_ns + self.offset_ns + time_ns * self.drift_ppm / 1e6


def align_clocks(
    ties: Iterable[tuple[str, Hashable, int]], reference: str | None = None, max_drift_ppm: int = MAX_DRIFT_PPM
) -> dict[str, SliceClock]:
    """Finds the clocks for which slices agree best about the moments of events that they share.

    Wrong ties (a few late readings) count for little. The result is the same for equal ties.

    Args:
        ties: Slice, event, and when the slice saw the event, in ns on its own clock. Events may be anything that can be
            a key: the end of a collective that all members wait for, or an op of a reference slice that is run again.
        reference: The slice whose clock counts; by default that of the first tie.
        max_drift_ppm: More is no clock's drift, and an error.

    Raises:
        ConfigError: Slices that no event ties to the reference (named), too few ties, or ties of different events.
    """
    slices: dict[str, int] = {}
    events: dict[Hashable, int] = {}
    numbered = []
    for slice_, event, time in ties:
        place = slices.setdefault(slice_, len(slices))
        numbered.append((place, events.setdefault(event, len(events)), time))
    if not numbered:
        raise ConfigError("there are no ties: slices without a common event have no common clock")
    if reference is not None and reference not in slices:
        raise ConfigError(f"the reference '{reference}' has no ties; there are {', '.join(slices)}")
    first = 0 if reference is None else slices[reference]
    found = json.loads(_native.solve_clocks_json(list(slices), numbered, first, max_drift_ppm))
    return {entry["slice"]: SliceClock(**entry) for entry in found["slices"]}
