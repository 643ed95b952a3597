"""Fits, does not fit, by how much: device memory of ranks against the card, part by part, with what each rests on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prism_core.config import device_entry
from prism_core.errors import ConfigError

#: Key of a graph's meta entries for what its ranks took.
META = "memory"
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Card:
    """Memory of a device, from its profile."""

    capacity_bytes: int
    context_bytes: int

    @classmethod
    def of_profile(cls, profile: str) -> Card:
        """Reads a profile's TOML text.

        Raises:
            ConfigError: It does not say how much memory the device has.
        """
        capacity = device_entry(profile, "memory_bytes")
        if capacity is None:
            raise ConfigError("the device profile has no memory_bytes in its table [device]")
        return cls(capacity, device_entry(profile, "context_bytes") or 0)


def rank_memory(rank: Mapping[str, Any], card: Card) -> dict[str, Any]:
    """Memory of one rank: its parts, what they rest on, and what is left of the card.

    Args:
        rank: The rank's peaks as the engine tells them, `nccl_buffer_bytes` and `workspace_bytes` among them.
        card: The card it is to fit on.
    """
    reserved, allocated = rank["peak_reserved_bytes"], rank["peak_allocated_bytes"]
    # Without a caching allocator of PyTorch's, what the driver handed out is all there is.
    beside = max(0, rank["peak_device_bytes"] - reserved)
    parts = [
        _part("allocator", reserved, "recorded", f"{allocated} allocated, {reserved - allocated} more reserved"),
        _part("driver allocations beside it", beside, "recorded"),
        _part("NCCL buffers", rank["nccl_buffer_bytes"], "modelled", _alone(rank)),
        _part("CUDA context and library images", card.context_bytes, "assumed", "of the device profile"),
    ]
    total = sum(part["bytes"] for part in parts)
    free = card.capacity_bytes - total
    return {
        "parts": parts,
        "workspace_bytes": rank["workspace_bytes"],
        "total_bytes": total,
        "capacity_bytes": card.capacity_bytes,
        "free_bytes": free,
        "fits": free >= 0,
        "verdict": verdict(free),
    }


def _part(name: str, size: int, basis: str, remark: str = "") -> dict[str, Any]:
    return {"name": name, "bytes": size, "basis": basis, **({"remark": remark} if remark else {})}


def _alone(rank: Mapping[str, Any]) -> str:
    alone = sum(comm["size"] == 1 for comm in rank.get("communicators", rank.get("comms", ())))
    return f"without {alone} of a single rank: unknown" if alone else ""


def verdict(free_bytes: int) -> str:
    """In words."""
    amount = f"{abs(free_bytes) / _GIB:.2f} GiB"
    return f"fits, {amount} free" if free_bytes >= 0 else f"does not fit: {amount} too much"


def stages(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By pipeline stage, the rank that takes most of those that ran. Ranks of no pipeline are stage 0."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        found.setdefault(rank.get("pipeline_stage") or 0, []).append(rank)
    return [_largest(found[stage], stage) for stage in sorted(found)]


def _largest(ranks: Sequence[Mapping[str, Any]], stage: int) -> dict[str, Any]:
    worst = max(ranks, key=lambda rank: (rank["memory"]["total_bytes"], -rank["rank"]))
    memory = worst["memory"]
    return {
        "stage": stage,
        "ranks_run": sorted(rank["rank"] for rank in ranks),
        "rank": worst["rank"],
        "peak_allocated_bytes": worst["peak_allocated_bytes"],
        "total_bytes": memory["total_bytes"],
        "free_bytes": memory["free_bytes"],
        "fits": memory["fits"],
        "least_total_bytes": min(rank["memory"]["total_bytes"] for rank in ranks),
    }


def job_memory(ranks: Sequence[Mapping[str, Any]], card: Card) -> dict[str, Any]:
    """The verdict for a job: per stage, and the rank that is worst off (with experts, the worst-routed one run)."""
    by_stage = stages(ranks)
    worst = max(by_stage, key=lambda stage: (stage["total_bytes"], -stage["rank"]))
    routed = sorted({_routing(note) for rank in ranks for note in rank.get("notes", ()) if _routing(note)})
    return {
        "capacity_bytes": card.capacity_bytes,
        "fits": all(stage["fits"] for stage in by_stage),
        "free_bytes": worst["free_bytes"],
        "verdict": verdict(worst["free_bytes"]),
        "worst_rank": worst["rank"],
        "routing": routed,
        "stages": by_stage,
    }


def _routing(note: str) -> str:
    """The kind of a rule that gave router logits, from its note."""
    start = "rule routing ("
    return note[len(start) :].partition(")")[0] if note.startswith(start) else ""


def to_meta(job: Mapping[str, Any]) -> str:
    """For the graph, so that an emulation of other ranks knows of it."""
    return json.dumps(job, sort_keys=True)


def from_meta(text: str) -> dict[str, Any] | None:
    """What [`to_meta`][] wrote; `None` for a graph without."""
    found: dict[str, Any] | None = json.loads(text) if text else None
    return found


def job_rows(job: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    """Lines of a report."""
    if job is None:
        return
    many = len(job["stages"]) > 1
    of = f" (worst of the ranks run: rank {job['worst_rank']}"
    of += f", routing {', '.join(job['routing'])})" if job["routing"] else ")"
    yield "memory", f"{job['verdict']} of {job['capacity_bytes'] / _GIB:.0f} GiB{of}"
    for stage in job["stages"]:
        if many:
            size = f"{stage['total_bytes'] / _GIB:.2f} GiB on rank {stage['rank']}"
            yield f"memory, stage {stage['stage']}", f"{verdict(stage['free_bytes'])}: {size}"


def rank_rows(name: str, memory: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Lines of a report about one rank, beside those of [`prism_core.memory`][]."""
    for part in memory["parts"][1:]:
        if part["bytes"] and part["name"] != "NCCL buffers":
            remark = f" ({part['remark']})" if part.get("remark") else ""
            yield f"{name} memory, {part['name']}", f"{part['bytes'] / _MIB:.2f} MiB, {part['basis']}{remark}"
    if memory["workspace_bytes"]:
        size = f"{memory['workspace_bytes'] / _MIB:.2f} MiB, recorded (inside the allocator's)"
        yield f"{name} memory, cuBLAS workspaces", size
    total = f"{memory['total_bytes'] / _GIB:.3f} GiB of {memory['capacity_bytes'] / _GIB:.0f}: {memory['verdict']}"
    yield f"{name} memory, of the card", total
