"""Fault tolerance of a collected job: its step, memory and checkpoint, and its steps after failures."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prism_core import _native
from prism_core.config import device_entry
from prism_core.errors import ConfigError
from prism_core.perturb import Perturb
from prism_core.replay import ReplayResult, open_graph, replay
from prism_core.spare.laws import PlacementLike
from prism_core.spare.layout import Layout
from prism_core.spare.planning import plan

_GIB = 1 << 30
#: Most iterations of a replay with failures.
_MOST_ITERATIONS = 10_000
#: Longest time until a failure is noticed, and to shrink communicators, seconds: eleven days.
_LONGEST_S = 1e6


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What a graph says about a job of groups; `None` is what it does not say.

    Attributes:
        groups: Model-parallel groups: ranks of each.
        step_ns: A step without failures, ns, replayed.
        entry_ns: What one more stack entry adds to it, ns, replayed.
        rest_ns: The part that is done once: the reduction, as far as nothing hides it, and the optimiser, ns.
        reduction_ns: The reduction alone, ns.
        provenance: Device time of computing by what its durations rest on, ns.
        gradient_elements: Elements a group reduces in a step: its trained parameters, if each is reduced once.
        gradient_bytes: The same in bytes.
        gathers: Gathers between groups in a step of one rank.
        peak_bytes: Most device memory a rank's allocator takes, bytes.
        peak_rank: That rank.
        card_bytes: Memory of the card, bytes.
        notes: What to know about these numbers.
    """

    groups: Sequence[Sequence[int]]
    step_ns: int
    entry_ns: int
    rest_ns: int
    reduction_ns: int
    provenance: Mapping[str, int]
    gradient_elements: int
    gradient_bytes: int
    gathers: int
    peak_bytes: int | None
    peak_rank: int | None
    card_bytes: int | None
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def gpus_per_group(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0])

    def to_dict(self) -> dict[str, Any]:
        """All of it, the groups as their number and size."""
        document = asdict(self) | {"gpus_per_group": self.gpus_per_group}
        return document | {"groups": len(self.groups), "notes": list(self.notes)}


def _steps(*steps: Mapping[str, Any]) -> str:
    return json.dumps(list(steps))


def _replay(graph: _native.Graph, steps: Sequence[Mapping[str, Any]], groups: int | None, **how: Any) -> ReplayResult:
    """The job with these steps, replayed."""
    return replay(_native.spare_stacked(graph, _steps(*steps), groups), **how)


def read_job(graph_or_path: _native.Graph | str | os.PathLike[str], groups: int | None = None, **how: Any) -> JobFacts:
    """Replays a collected job with one and two stack entries per step, and says what its graph knows.

    Args:
        graph_or_path: The graph, or the path of its file.
        groups: How many groups there must be.
        **how: As for `prism_core.replay`: `contention`, `nccl`, `profile`, ...

    Raises:
        ConfigError: The job is not one of groups that train the same model, or has other groups.
    """
    graph = graph_or_path if isinstance(graph_or_path, _native.Graph) else open_graph(graph_or_path)
    anatomy = json.loads(_native.spare_anatomy_json(graph, groups))
    # The last of three equal steps: what warms up is over then.
    one, two, reduction = ({"entries": entries} for entries in (1, 2, 0))
    times = _replay(graph, [one, one, one, two, two, two, reduction], groups, **how).iteration_time_ns
    provenance = _replay(graph, [one], groups, **how).device_time["by_provenance"]
    step_ns, entry_ns = times[2], times[5] - times[2]
    notes = []
    if anatomy["gathers"]:
        notes.append(
            f"a rank gathers {anatomy['gathers']} times per step between groups: parameters or optimiser states are"
            " sharded over groups, and a group that fails takes its share along; SPARe needs groups that hold all of it"
        )
    shown = sum(provenance.values())
    if guessed := sum(provenance.get(name, 0) for name in ("default", "modelled")):
        notes.append(f"{guessed / shown:.0%} of the computing has modelled or default durations, not measured ones")
    if drift := max(abs(times[a] / max(times[b], 1) - 1) for a, b in ((1, 2), (4, 5))):
        notes.append(f"equal steps differ in time by {drift:.2%}; the last of three counts")
    peak = anatomy["peak_reserved"]
    profile = graph.meta.get("profile")
    card = None if profile is None else device_entry(profile, "memory_bytes")
    return JobFacts(
        groups=anatomy["groups"], step_ns=step_ns, entry_ns=entry_ns, rest_ns=step_ns - entry_ns,
        reduction_ns=times[6], provenance=provenance, gradient_elements=anatomy["gradient_elements"],
        gradient_bytes=anatomy["gradient_bytes"], gathers=anatomy["gathers"],
        peak_bytes=None if peak is None else peak[0], peak_rank=None if peak is None else peak[1], card_bytes=card,
        notes=notes,
    )  # fmt: skip


def stacking_memory(facts: JobFacts, data_bytes_per_type: float | None = None) -> dict[str, Any]:
    """Whether the memory of a card allows stacks.

    The entries of a stack are computed one after the other, with the activations of one at a time. What grows with `r`
    is the data of the types, if it is kept on the card.

    Args:
        facts: The job.
        data_bytes_per_type: Data of one type on one card, bytes; 0 if it stays on the host.

    Returns:
        `peak_bytes`, `card_bytes`, `fits_memory` (largest `r`; `None` if unknown or unlimited), `all_at_once` (largest
        `r` whose entries could surely be computed at once: everything doubled, trebled, ...), `verdict` in words.
    """
    peak, card = facts.peak_bytes, facts.card_bytes
    result: dict[str, Any] = {"peak_bytes": peak, "card_bytes": card, "fits_memory": None, "all_at_once": None}
    if peak is None or card is None:
        missing = "the memory of the ranks" if peak is None else "the card"
        return result | {"verdict": f"unknown: the graph does not say {missing}"}
    if peak > card:
        raise ConfigError(
            f"rank {facts.peak_rank} needs {peak / _GIB:.2f} GiB of a card with {card / _GIB:.2f} GiB: the job does not"
            " fit even without redundancy"
        )
    result["all_at_once"] = card // peak if peak else None
    left = f"{peak / _GIB:.2f} GiB of {card / _GIB:.2f} GiB at r = 1"
    if data_bytes_per_type is None:
        return result | {"verdict": f"{left}; what the data of a type takes is unknown (data_bytes_per_type)"}
    if data_bytes_per_type < 0:
        raise ConfigError(f"data_bytes_per_type is {data_bytes_per_type}: it must be at least 0")
    if data_bytes_per_type == 0:
        return result | {"verdict": f"{left}; more types take no more of it"}
    result["fits_memory"] = 1 + int((card - peak) // data_bytes_per_type)
    return result | {"verdict": f"{left}; data of r = {result['fits_memory']} types fits"}


def plan_job(
    graph_or_path: _native.Graph | str | os.PathLike[str],
    *,
    groups: int | None = None,
    checkpoint_s: float | None = None,
    checkpoint_bytes: float | None = None,
    bytes_per_parameter: float | None = None,
    storage_bytes_per_s: float | None = None,
    data_bytes_per_type: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """`plan` with what a collected graph says: groups, step, reduction, memory, and the size of a checkpoint.

    The time to save is `checkpoint_s`; or the size of a checkpoint (`checkpoint_bytes`, or `bytes_per_parameter` times
    the elements of the gradients: 14 for bf16 weights with fp32 weights and two moments) over `storage_bytes_per_s`.

    Args:
        graph_or_path: The graph, or the path of its file.
        groups: How many groups there must be.
        checkpoint_s: Time to write a checkpoint, seconds.
        checkpoint_bytes: Its size.
        bytes_per_parameter: Bytes it has for every parameter.
        storage_bytes_per_s: Bandwidth to the storage, bytes per second.
        data_bytes_per_type: Data of one type on a card, bytes; 0 if it stays on the host.
        **options: As for `plan`: `restart_s`, `system_mtbf_s`, `steps`, ...

    Returns:
        The document of `plan`, with `job` (`JobFacts`), `memory` (`stacking_memory`) and `checkpoint`.
    """
    facts = read_job(graph_or_path, groups)
    memory = stacking_memory(facts, data_bytes_per_type)
    checkpoint = _checkpoint(facts, checkpoint_s, checkpoint_bytes, bytes_per_parameter, storage_bytes_per_s)
    if memory["fits_memory"] is not None and memory["fits_memory"] < 2:
        raise ConfigError(f"no second type fits: {memory['verdict']}")
    found = plan(
        len(facts.groups), save_s=checkpoint["save_s"], compute_s=facts.entry_ns / 1e9,
        all_reduce_s=facts.rest_ns / 1e9, gpus_per_group=facts.gpus_per_group, fits_memory=memory["fits_memory"],
        **options,
    )  # fmt: skip
    unknown = [name for name in found["unknown"] if name != "fits_memory" or data_bytes_per_type != 0]
    unknown += [name for name in ("size_bytes",) if checkpoint[name] is None]
    return found | {"job": facts.to_dict(), "memory": memory, "checkpoint": checkpoint, "unknown": unknown}


def _checkpoint(
    facts: JobFacts, time_s: float | None, size: float | None, per_parameter: float | None, rate: float | None
) -> dict[str, Any]:
    """Size and time of a checkpoint, and what they rest on."""
    basis = "given"
    if size is None and per_parameter is not None:
        size, basis = per_parameter * facts.gradient_elements, "gradient elements of the graph x bytes_per_parameter"
        if size <= 0:
            raise ConfigError("the graph has no gradient elements: give checkpoint_bytes")
    if time_s is None:
        if size is None:
            raise ConfigError(
                "checkpoint_s is missing: the graph does not say what a checkpoint holds. Give it, or checkpoint_bytes"
                " or bytes_per_parameter together with storage_bytes_per_s"
            )
        if rate is None or rate <= 0:
            raise ConfigError("storage_bytes_per_s is missing: how fast is a checkpoint written?")
        time_s = size / rate
    return {"save_s": time_s, "size_bytes": size, "basis": basis if size is not None else "time given, size unknown"}


def replayed(
    graph_or_path: _native.Graph | str | os.PathLike[str],
    failures: Mapping[int, Sequence[int]],
    *,
    r: int,
    placement: PlacementLike = "golomb",
    iterations: int | None = None,
    groups: int | None = None,
    detection_s: float = 0.0,
    shrink_s: float = 0.0,
    perturb: Perturb | None = None,
) -> dict[str, Any]:
    """Replays a job of which groups die: the reordered steps, with their longer stacks and without the dead ranks.

    In the iteration of a failure the survivors compute their entries, notice it after half of the reduction and
    `detection_s`, compute what was moved to them, shrink (`shrink_s`) and sum all gradients.

    Args:
        graph_or_path: The graph, or the path of its file.
        failures: Groups that die, by iteration (from 0).
        r: Types of a group.
        placement: A name or offsets.
        iterations: Iterations to replay; by default two more than the last failure.
        groups: How many groups there must be.
        detection_s: Until a failure is noticed, seconds, on top of the step.
        shrink_s: To shrink communicators, seconds.
        perturb: Further changes to the job, as for `prism_core.replay`.

    Returns:
        `iterations`: for each `time_ns` (replayed), `closed_form_ns` (entries times the time of one, plus the rest;
        without perturbations), `stacks`, `live`, `failed`, `action`, `moves`; and `job`.

    Raises:
        ConfigError: A failure wipes a type out: the job restarts from a checkpoint, there is nothing to replay.
    """
    document: dict[str, Any] = replay_failures(
        graph_or_path, failures, r=r, placement=placement, iterations=iterations, groups=groups,
        detection_s=detection_s, shrink_s=shrink_s, perturb=perturb,
    ).group_failures  # fmt: skip
    return document


def replay_failures(
    graph_or_path: _native.Graph | str | os.PathLike[str],
    failures: Mapping[int, Sequence[int]],
    *,
    r: int,
    placement: PlacementLike = "golomb",
    iterations: int | None = None,
    groups: int | None = None,
    detection_s: float = 0.0,
    shrink_s: float = 0.0,
    slow: Mapping[int, float] | None = None,
    perturb: Perturb | None = None,
    **how: Any,
) -> ReplayResult:
    """The replay behind `replayed`, which is its entry `group_failures`.

    Args:
        graph_or_path: As for `replayed`, and all that follows.
        failures: See there.
        r: See there.
        placement: See there.
        iterations: See there.
        groups: See there.
        detection_s: See there.
        shrink_s: See there.
        slow: Slow-down of single ranks' compute, as for `prism_core.replay`.
        perturb: See there.
        **how: What else `prism_core.replay` takes. The closed form counts with it, but with no perturbation.
    """
    start = time.monotonic_ns()
    graph = graph_or_path if isinstance(graph_or_path, _native.Graph) else open_graph(graph_or_path)
    for name, value in (("detection_s", detection_s), ("shrink_s", shrink_s)):
        if not 0 <= value <= _LONGEST_S:
            raise ConfigError(f"{name} is {value}: it must be 0 to {_LONGEST_S:g} seconds")
    count = _iterations(failures, iterations)
    facts = read_job(graph, groups, **how)
    delay_ns = round((detection_s + shrink_s) * 1e9) + facts.reduction_ns // 2
    layout = Layout(len(facts.groups), r, placement)
    steps: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for iteration in range(count):
        step, row = _iteration(layout, facts, iteration, list(failures.get(iteration, ())), delay_ns)
        steps.append(step)
        rows.append(row)
    result = _replay(graph, steps, groups, slow=slow, perturb=perturb, **how).to_dict()
    for row, time_ns in zip(rows, result["iteration_time_ns"], strict=True):
        row["time_ns"] = time_ns
    document = {"job": facts.to_dict(), "r": r, "delay_ns": delay_ns, "iterations": rows}
    return ReplayResult(result | {"group_failures": document, "wall_ns": time.monotonic_ns() - start})


def _iterations(failures: Mapping[int, Sequence[int]], iterations: int | None) -> int:
    """How many iterations to replay, all failures among them."""
    for iteration, dead in failures.items():
        if iteration < 0:
            raise ConfigError(f"a failure is in iteration {iteration}: they count from 0")
        if any(group < 0 for group in dead):
            raise ConfigError(f"the groups {list(dead)} fail in iteration {iteration}: they count from 0")
    count = iterations if iterations is not None else max(failures, default=0) + 3
    if late := [iteration for iteration in failures if iteration >= count]:
        raise ConfigError(f"a failure is in iteration {late[0]}, but only {count} are replayed")
    if not 1 <= count <= _MOST_ITERATIONS:
        raise ConfigError(f"iterations would be {count}: there must be 1 to {_MOST_ITERATIONS}")
    return count


def _iteration(
    layout: Layout, facts: JobFacts, iteration: int, dead: Sequence[int], delay_ns: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One step of the graph to be, and its row; the layout goes on."""
    step: dict[str, Any] = {"entries": layout.stacks}
    row: dict[str, Any] = {"iteration": iteration, "failed": dead, "action": "train", "moves": 0}
    closed_ns = layout.stacks * facts.entry_ns + facts.rest_ns
    if dead:
        plan_ = layout.fail(dead)
        if plan_.action == "wipe-out":
            raise ConfigError(
                f"the failure in iteration {iteration} leaves no host for type {plan_.lost[0]}: the job restarts"
                " from a checkpoint, there is nothing to replay (a larger r masks more)"
            )
        patches: dict[int, int] = {}
        for group, _ in plan_.moves:
            patches[group] = patches.get(group, 0) + 1
        step |= {"failed": dead, "patches": patches, "delay_ns": delay_ns}
        row |= {"action": plan_.action, "moves": len(plan_.moves)}
        closed_ns += delay_ns + max(patches.values(), default=0) * facts.entry_ns
    return step, row | {"stacks": layout.stacks, "live": len(layout.live), "closed_form_ns": closed_ns}
