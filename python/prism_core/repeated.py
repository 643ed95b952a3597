"""The first slice of a collection, run again at its end: how the machine's speed changed in between.

Where host time is measured, ranks that run an hour apart find a machine of different speed (clock rates, other load).
The slice that is run twice makes the same calls at both times. Its two recordings tell offset and drift (by the solver
of `prism_core.clocks`). If the ranks of the slice agree about the drift, the slices between are brought to the speed of
the first one, each by when it ran; if they do not, the change is noise, and host time stays as it was measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prism_core import _native
from prism_core.errors import ConfigError

#: A larger change, in millionths, is none that a line between two moments describes.
MAX_DRIFT_PPM = 200_000

#: Two-sided 5 % points of Student's t by degrees of freedom; of more, that of the last.
_T_5_PERCENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)

Solve = Callable[[Any, Any, int], str]


@dataclass(slots=True)
class SliceSpeeds:
    """When ranks ran, and how fast the machine was then.

    Args:
        solve: Gives the clock of a recording's repetition, as JSON; the engine's.
    """

    solve: Solve | None = None
    _ran: dict[int, tuple[int, int]] = field(default_factory=dict)
    _again: dict[int, tuple[int, int]] = field(default_factory=dict)
    _drift_ppm: float = 0.0
    _document: dict[str, Any] = field(default_factory=dict)

    def ran(self, rank: int, start_ns: int, end_ns: int, *, again: bool = False) -> None:
        """Tells when a rank ran (`time.monotonic_ns`), for the first time or again."""
        (self._again if again else self._ran)[rank] = (start_ns, end_ns)

    def to_repeat(self) -> list[int]:
        """The first slice: the rank that started first and those beside it, two at least. None if nothing ran later."""
        if not self._ran:
            return []
        by_start = sorted(self._ran, key=lambda rank: (self._ran[rank], rank))
        beside = sum(start <= _middle(self._ran[by_start[0]]) for start, _ in self._ran.values())
        slice_ = by_start[: max(beside, 2)]
        return sorted(slice_) if len(slice_) < len(self._ran) else []

    def settle(self, first: Mapping[int, Any], again: Mapping[int, Any]) -> list[str]:
        """Finds the drift from recordings of the same ranks; returns what the user should know."""
        entries, problems = [], []
        for rank in sorted(first.keys() & again.keys()):
            try:
                solve = self.solve or _native.repeated_clock_json
                entries.append(json.loads(solve(first[rank], again[rank], MAX_DRIFT_PPM)))
            except ConfigError as error:
                problems.append(f"the speed of the machine is not known: {error}")
        drifts = [entry["drift_ppm"] for entry in entries]
        drift = statistics.fmean(drifts) if drifts else None
        spread = statistics.stdev(drifts) / len(drifts) ** 0.5 if len(drifts) > 1 else None
        if drift is not None and spread is not None:
            limit = _T_5_PERCENT[min(len(drifts) - 1, len(_T_5_PERCENT)) - 1] * spread
            self._drift_ppm = drift if abs(drift) > limit else 0.0
        self._document = {
            "slices": entries, "repeated": sorted(again), "drift_ppm": drift, "error_ppm": spread,
            "applied": self._drift_ppm != 0.0,
        }  # fmt: skip
        return problems

    def skipped(self, reason: str) -> None:
        """No slice was run again."""
        self._document = {
            "slices": [],
            "repeated": [],
            "drift_ppm": None,
            "error_ppm": None,
            "applied": False,
            "reason": reason,
        }

    def drift_ppm(self, rank: int) -> float:
        """How much faster the machine was at the first slice than when the rank ran, in millionths."""
        if not self._drift_ppm or rank not in self._ran or rank in self._again:
            return 0.0
        begin = _mean(_middle(self._ran[again]) for again in self._again)
        end = _mean(_middle(span) for span in self._again.values())
        share = (_middle(self._ran[rank]) - begin) / (end - begin)
        return self._drift_ppm * min(max(share, 0.0), 1.0)

    def document(self, ranks: Sequence[int]) -> dict[str, Any]:
        """For the result and the graph: the repeated slice's clocks, and what each rank's host time was brought by."""
        return self._document | {"by_rank": {str(rank): self.drift_ppm(rank) for rank in sorted(ranks)}}


def _middle(span: tuple[int, int]) -> int:
    return (span[0] + span[1]) // 2


def _mean(values: Iterable[int]) -> float:
    found = list(values)
    return sum(found) / len(found)
