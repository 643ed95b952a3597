"""How long it takes until ranks train: from the start to the beginning of their first iteration, in real time.

An iteration begins with the first forward on the device, or where activations of another pipeline stage are received.
What comes before is what a job pays once: interpreters, imports, rendezvous, process groups, communicators, the model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from prism_core.launch import GroupResult, RankStatus


class Bootstrap:
    """Keeps when ranks began to train.

    Args:
        start_ns: When the command started (`time.monotonic_ns`).
    """

    def __init__(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._began: dict[int, tuple[int, int] | None] = {}

    def look(self, status: Mapping[int, RankStatus], result: GroupResult) -> None:
        """Takes in what the engine knows of ranks that were started. May be told of a rank several times."""
        now = time.monotonic_ns()
        for rank, state in status.items():
            start = result.start_ns.get(rank)
            if start is None or self._began.get(rank) is not None:
                continue
            began = None if state.training_for_ns is None else now - state.training_for_ns
            self._began[rank] = None if began is None else (start, began)

    def figures(self) -> dict[str, Any]:
        """`job_ns`: until the last of the ranks had begun, and `rank_ns`: from the start of each one's process.

        A rank that began no iteration has none, and then the job has none. Nor has a job of which no rank ran.
        """
        began = [moments for moments in self._began.values() if moments is not None]
        is_known = began and len(began) == len(self._began)
        return {
            "job_ns": max(moment for _, moment in began) - self._start_ns if is_known else None,
            "rank_ns": {
                str(rank): None if moments is None else moments[1] - moments[0]
                for rank, moments in sorted(self._began.items())
            },
        }
