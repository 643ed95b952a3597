"""Completion of one collective of 8,192 ranks by name: closed form or message by message, JSON in and out included."""

from __future__ import annotations

from typing import Any

from figures import check_goal, report
from prism_core.collectives import completion
from test_replay import repeat

RANKS = 8192
GOAL_S = 0.02
#: All-reduce, two slices per step: 268 million messages over all ranks.
RING: dict[str, Any] = {
    "n": RANKS,
    "messages_per_phase": [2 * (RANKS - 1) * 2],
    "slices_per_step": 2,
    "credits": 0,
    "credit_latency_ns": 0,
    "arrival_ns": [rank * 7919 % 100_000 for rank in range(RANKS)],
}
#: Seven of eight hops inside a node.
TWO_KINDS = {
    "occ_ns_per_phase_per_sender": [[1200 if rank % 8 == 7 else 110 for rank in range(RANKS)]],
    "latency_ns_of_incoming_link": [6500 if rank % 8 == 0 else 900 for rank in range(RANKS)],
}
EQUAL = {"occ_ns_per_phase_per_sender": [[1000] * RANKS], "latency_ns_of_incoming_link": [700] * RANKS}
SLOTS = 4


def test_ring_of_two_kinds_of_link(benchmark: Any) -> None:
    """Closed form, whatever the number of messages."""
    ends, timed = repeat(benchmark, 20, lambda: completion("ring_two_level", **RING, **TWO_KINDS))
    assert len(ends) == RANKS and min(ends) > max(RING["arrival_ns"])
    report(benchmark, s=timed.s, cpu_s=timed.cpu_s)
    check_goal(benchmark, timed.cpu_s, GOAL_S)


def test_ring_with_credits(benchmark: Any) -> None:
    """Closed form of equal links; the latest rank ends when it would without credits."""
    inputs = {**RING, **EQUAL, "credits": SLOTS, "credit_latency_ns": 300}
    ends, timed = repeat(benchmark, 20, lambda: completion("ring_credits", **inputs))
    assert max(ends) == max(completion("ring_two_level", **RING, **EQUAL))
    report(benchmark, s=timed.s, cpu_s=timed.cpu_s)
    check_goal(benchmark, timed.cpu_s, GOAL_S)


def test_ring_message_by_message(benchmark: Any) -> None:
    """No closed form for credits over unequal links: the definition, 268 million messages."""
    inputs = {**RING, **TWO_KINDS, "credits": SLOTS, "credit_latency_ns": 300}
    ends, timed = repeat(benchmark, 3, lambda: completion("ring_credits", **inputs))
    free = completion("ring_two_level", **RING, **TWO_KINDS)
    assert all(held >= end for held, end in zip(ends, free, strict=True))
    report(benchmark, s=timed.s, cpu_s=timed.cpu_s)
