"""The first slice of a collection, run again at its end: how the machine's speed changed in between.

Where host time is measured, ranks that run an hour apart find a machine of different speed (clock rates, other load).
The slice that is run twice makes the same calls at both times. Its two recordings tell offset and drift (by the solver
of `prism_core.clocks`). If the ranks of the slice agree about the drift, the slices between are brought to the speed of
the first one, each by when it ran; if they do not, the change is noise, and host time stays as it was measured.

Ranks that took part in the same collectives, however much later, tell the same without running again: those that make
the same calls by the host time between these collectives, those that know when collectives ended by that.
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
        share: Gives the clocks of recordings by the collectives that they share, as JSON; the engine's.
    """

    solve: Solve | None = None
    _ran: dict[int, tuple[int, int]] = field(default_factory=dict)
    _again: dict[int, tuple[int, int]] = field(default_factory=dict)
    share: Callable[[list[Any], int], str] | None = None
    _drift_ppm: float = 0.0
    _tied: dict[int, float] = field(default_factory=dict)
    _shared: dict[str, Any] = field(default_factory=dict)
    _document: dict[str, Any] = field(default_factory=dict)

    def ran(self, rank: int, start_ns: int, end_ns: int, *, again: bool = False) -> None:
        """Tells when a rank ran (`time.monotonic_ns`), for the first time or again."""
        (self._again if again else self._ran)[rank] = (start_ns, end_ns)

    def to_repeat(self) -> list[int]:
        """The first slice: the rank that started first and those beside it, two at least. None if nothing ran later."""
        slice_ = self._by_start()[: max(len(self._beside_first()), 2)]
        return sorted(slice_) if len(slice_) < len(self._ran) else []

    def _by_start(self) -> list[int]:
        return sorted(self._ran, key=lambda rank: (self._ran[rank], rank))

    def _beside_first(self) -> list[int]:
        """The rank that started first, and those that started before it had come half way."""
        order = self._by_start()
        return [rank for rank in order if self._ran[rank][0] <= _middle(self._ran[order[0]])]

    def tie(self, recordings: Mapping[int, Any]) -> list[str]:
        """Finds clocks from collectives that several ranks took part in; returns what the user should know.

        A rank that makes the same calls as one of the first slice, with which it shares collectives, is brought to the
        speed of that one, if the two halves of the ties agree so well about it that it is not noise (Student's t, 5 %,
        over all ranks that are tied).
        """
        order = [rank for rank in self._by_start() if rank in recordings]
        order += sorted(recordings.keys() - set(order))
        share = self.share or _native.shared_clocks_json
        try:
            parts = json.loads(share([recordings[rank] for rank in order], MAX_DRIFT_PPM))
        except ConfigError as error:
            return [f"the collectives that ranks share tell no clocks: {error}"]
        slices = [
            {**entry, "slice": f"rank {rank}", "rank": rank, "halves_ppm": halves}
            for part in parts
            for rank, entry, halves in zip(part["ranks"], part["slices"], part["halves_ppm"], strict=False)
        ]
        ties = sum(entry["ties"] for entry in slices)
        squares = sum(entry["ties"] * entry["rms_ns"] ** 2 for entry in slices)
        error_ppm = self._apply_tied([part for part in parts if part["problem"] is None], slices)
        self._shared = {
            "ties": ties, "residual_ns": (squares / ties) ** 0.5 if ties else None, "error_ppm": error_ppm,
            "seen": sorted({part["seen"] for part in parts}), "ranks": [part["ranks"] for part in parts],
            "slices": slices, "applied": sorted(self._tied),
        }  # fmt: skip
        return [f"collectives tie ranks to each other, but: {part['problem']}" for part in parts if part["problem"]]

    def _apply_tied(self, parts: Sequence[Mapping[str, Any]], slices: Sequence[Mapping[str, Any]]) -> float | None:
        """Takes over drifts that are no noise; returns the standard error of a drift by the two halves of its ties."""
        references = {part["ranks"][0] for part in parts}
        halves = [e["halves_ppm"] for e in slices if e["rank"] not in references and e["halves_ppm"] is not None]
        if not halves:
            return None
        # Each half has twice the variance of the whole, and their difference twice that of a half.
        error = float(statistics.fmean((first - second) ** 2 for first, second in halves) ** 0.5 / 2)
        limit = _T_5_PERCENT[min(len(halves), len(_T_5_PERCENT)) - 1] * error
        beside = self._beside_first() if self._ran else []
        by_rank = {entry["rank"]: entry["drift_ppm"] for entry in slices if entry["halves_ppm"] is not None}
        for part in parts:
            # Of those that know when collectives ended, the graph's own clocks take care.
            if part["seen"] == "starts" and part["ranks"][0] in beside:
                later = [rank for rank in part["ranks"] if rank not in beside and rank in by_rank]
                self._tied |= {rank: by_rank[rank] for rank in later if abs(by_rank[rank]) > limit}
        return error

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
        if rank in self._tied:
            return self._tied[rank]
        if not self._drift_ppm or rank not in self._ran or rank in self._again:
            return 0.0
        begin = _mean(_middle(self._ran[again]) for again in self._again)
        end = _mean(_middle(span) for span in self._again.values())
        share = (_middle(self._ran[rank]) - begin) / (end - begin)
        return self._drift_ppm * min(max(share, 0.0), 1.0)

    def document(self, ranks: Sequence[int]) -> dict[str, Any]:
        """For the result and the graph: the clocks, and what each rank's host time was brought by.

        `shared` has how many ties collectives gave, how far they are apart (`residual_ns`), and the clocks they tell.
        """
        by_rank = {str(rank): self.drift_ppm(rank) for rank in sorted(ranks)}
        shared = {"shared": self._shared} if self._shared else {}
        return self._document | shared | {"by_rank": by_rank}


def _middle(span: tuple[int, int]) -> int:
    return (span[0] + span[1]) // 2


def _mean(values: Iterable[int]) -> float:
    found = list(values)
    return sum(found) / len(found)
