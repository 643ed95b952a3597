"""Step time of a dense transformer from the operator models alone: for layouts nobody has a program of at hand.

The layer is a list of operators with their shapes; the engine gives each its duration (as it does for a program's own
calls), the reference schedule (`prism_core.synthetic.transformer_step`: 1F1B, tensor-, data- and pipeline-parallel
communication) is replayed on the profile's network. Overlap is a rule, not a replay: tensor-parallel messages shrink by
the share that is hidden, data- and context-parallel communication by the computing it runs beside
(`prism_core.layout_comm`). To answer for a real program, collect it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prism_core import _native
from prism_core.errors import ConfigError
from prism_core.layout import ELEMENT, Layout, layer_parameters
from prism_core.layout_comm import attention_moves, busy_share, call_ns, context_parallel_ns, data_parallel
from prism_core.synthetic import transformer_step

__all__ = [
    "Layout",
    "Parts",
    "bubble",
    "estimate",
    "is_sharded",
    "layer_parameters",
    "parameters_per_rank",
    "parts",
    "state_bytes",
    "useful_flop",
]

#: One piece of device work, as `work_durations_json` takes it.
Work = dict[str, Any]

#: Bytes per element to make an 8-bit factor of a product: the largest value is looked for, 16 bits are read, 8 bits
#: written, and again in the other order. Assumed (2 + 2 + 1 + 2 + 2 + 1).
_QUANTISED_BYTES = 10
#: The same of a weight, in both orders at once: once a step, or whenever it has been gathered in 16 bits.
_QUANTISED_WEIGHT_BYTES = 6
#: Bytes per logit of an unfused loss, kernel by kernel (Megatron-core's `tensor_parallel/cross_entropy.py`): to single
#: precision, largest, difference, exponential, sum, quotient; backward the product and back to 16 bits.
_LOSS_BYTES = [6, 4, 8, 8, 4, 8, 8, 6]


def _gemm(m: int, n: int, k: int, dtype: str, batch: int = 1) -> Work:
    return {"gemm": {"m": m, "n": n, "k": k, "batch": batch, "input": dtype, "compute": dtype}}


def _stream(bytes_moved: float, name: str = "") -> Work:
    moved = max(1, int(bytes_moved))
    return {"kernel": {"name": name, "grid": [-(-moved // 4096), 1, 1], "threads": 256, "bytes": moved}}


@dataclass(frozen=True, slots=True)
class Parts:
    """The operators of a layer and around it."""

    forward: list[Work]
    backward: list[Work]
    #: Logits and loss of one microbatch, both directions (last stage).
    head: list[Work]
    optimizer: list[Work]
    #: Attention of one step of the context-parallel ring, in either direction; no ring: nothing.
    ring_steps: tuple[list[Work], list[Work]]


def parts(layout: Layout) -> Parts:
    """What one rank computes."""
    size = 2 if layout.dtype in ("bf16", "fp16") else 1 if layout.dtype == "fp8" else 4
    tokens, depth = layout.micro_batch * layout.seq // layout.cp, layout.hidden // layout.heads
    kv_heads, ffn = layout.kv_heads or layout.heads, layout.ffn or 4 * layout.hidden
    heads, width = layout.heads // layout.tp, layout.hidden
    wide = ffn // layout.tp
    shapes = [
        (tokens, (heads + 2 * kv_heads // layout.tp) * depth, width),
        (tokens, width, heads * depth),
        (tokens, wide * (2 if layout.gated else 1), width),
        (tokens, width, wide),
    ]
    forward = [_gemm(*shape, layout.dtype) for shape in shapes]
    backward = [_gemm(*swapped, layout.dtype) for m, n, k in shapes for swapped in ((m, k, n), (n, k, m))]
    if layout.dtype == "fp8":
        forward += [_stream(_QUANTISED_BYTES * m * k) for m, _, k in shapes]
        backward += [_stream(_QUANTISED_BYTES * m * n) for m, n, _ in shapes]
    attention_forward, attention_backward = _attention(layout, heads, depth)
    forward += attention_forward
    backward += attention_backward
    is_ring = layout.cp > 1 and layout.cp_comm_type == "p2p"
    ring_steps = (attention_forward[:1], attention_backward[:1]) if is_ring else ([], [])
    for group, moves in zip((forward, backward), attention_moves(layout), strict=True):
        group += [_stream(moved) for moved in moves]
    activation = 2 * tokens * width // (layout.tp if layout.sequence_parallel else 1)
    # Two norms, two residual sums (with bias and dropout: a mask as well), one activation function.
    norms = [_stream(2 * activation, "layer_norm")] * 2
    streams = [(3.5 if layout.dropout else 3) * activation] * 2
    streams.append((3 if layout.gated else 2) * 2 * tokens * wide)
    if layout.rotary:
        streams.append(2 * ELEMENT * tokens * (heads + kv_heads // layout.tp) * depth)
    forward += [*norms, *(_stream(item) for item in streams)]
    backward += [_stream(3 * activation, "layer_norm")] * 2 + [_stream(1.5 * item) for item in streams]
    weights = layout.stage_parameters if layout.dtype == "fp8" and layout.parameter_bytes > 1 else 0
    if weights and layout.fully_sharded:
        forward.append(_stream(_QUANTISED_WEIGHT_BYTES * weights / layout.layers))
    vocabulary = layout.vocab // layout.tp
    logits = [(tokens, vocabulary, width), (tokens, width, vocabulary), (vocabulary, width, tokens)]
    head = [_gemm(*shape, "bf16" if layout.dtype == "fp8" else layout.dtype) for shape in logits]
    # Softmax in single precision, forward and backward.
    moves = [8, 8] if layout.fused_loss else _LOSS_BYTES
    head += [_stream(tokens * vocabulary * moved, "softmax" if layout.fused_loss else "") for moved in moves]
    owned = parameters_per_rank(layout) / (layout.dp * layout.cp if is_sharded(layout) else 1)
    # Gradients, master parameters and two moments are read, three of them and the parameters written.
    optimizer = [_stream(owned * (layout.gradient_bytes_per_parameter + 12 + 12 + size))]
    if weights and not layout.fully_sharded:
        optimizer.append(_stream(_QUANTISED_WEIGHT_BYTES * weights))
    return Parts(forward, backward, head, optimizer, ring_steps)


def is_sharded(layout: Layout) -> bool:
    """Whether each data-parallel rank owns a part of the optimizer states."""
    return layout.distributed_optimizer or layout.fully_sharded


def _attention(layout: Layout, heads: int, depth: int) -> tuple[list[Work], list[Work]]:
    batch, seq = layout.micro_batch * heads, layout.seq
    dtype = "bf16" if layout.dtype == "fp8" else layout.dtype
    if layout.fused_attention:
        # Steps of a ring have equal work: a square of which the mask leaves half, or half a rectangle.
        steps = layout.cp if layout.cp_comm_type == "p2p" else 1
        flop = 4 * batch * seq * seq * depth // 2 // layout.cp // steps
        tensors = batch * seq * depth * ELEMENT // layout.cp

        def operator(name: str, times: float, moved: int) -> list[Work]:
            work = {"name": name, "flop": int(flop * times), "bytes": moved * tensors, "input": dtype}
            return [{"operator": work}] * steps

        return operator("cudnn.sdpa_forward", 1, 4), operator("cudnn.sdpa_backward", 2.5, 8)
    if layout.cp > 1:
        raise ConfigError("context parallelism needs fused attention")
    scores = batch * seq * seq
    products = [_gemm(seq, seq, depth, dtype, batch), _gemm(seq, depth, seq, dtype, batch)]
    # Masked softmax reads and writes the scores; dropout reads, writes and keeps a mask.
    softmax, dropout = 4 * scores, (5 * scores if layout.dropout else 0)
    forward = [*products, _stream(softmax, "softmax"), *([_stream(dropout)] if dropout else [])]
    backward = [*products, *products, _stream(1.5 * softmax, "softmax"), *([_stream(dropout)] if dropout else [])]
    return forward, backward


def parameters_per_rank(layout: Layout) -> int:
    """Parameters of the first stage's ranks (with the embedding)."""
    return layout.stage_parameters + layout.end_parameters


def state_bytes(layout: Layout) -> int:
    """Weights in 16 bits, gradients, master weights and two moments of the fullest rank: activations left out.

    Sharded with the optimizer's states where the layout says so; with `fully_sharded` everything is.
    """
    each, stage = layer_parameters(layout) // layout.tp, layout.places // layout.pp
    ends = (1 if layout.pp > 1 else 2) if layout.ends_are_layers else 0
    first = each * (stage - ends) + layout.end_parameters
    parameters = max(first, each * stage) if layout.pp > 2 else first
    owners = layout.dp * layout.cp
    states = 12 / (owners if is_sharded(layout) else 1)
    rest = (2 + layout.gradient_bytes_per_parameter) / (owners if layout.fully_sharded else 1)
    return round(parameters * (states + rest))


def useful_flop(layout: Layout) -> float:
    """FLOP of a step that the model needs, recomputation left out: six per parameter and token, and attention."""
    tokens = layout.global_batch * layout.seq
    dense = 6 * (layer_parameters(layout) * layout.layers + layout.vocab * layout.hidden) * tokens
    return float(dense + 6 * layout.layers * layout.hidden * layout.seq * tokens)


def bubble(layout: Layout) -> float:
    """Idle share of a pipeline, relative to its work: what the textbook formula says of (interleaved) 1F1B."""
    return (layout.pp - 1) / (layout.vp * layout.microbatches)


def estimate(layout: Layout, profile: str, kernels: Sequence[str] = ()) -> dict[str, Any]:
    """Step time of a layout on a device.

    Args:
        layout: The model and its layout.
        profile: Device profile, TOML text.
        kernels: Kernel tables, TOML texts.

    Returns:
        `iteration_time_ns`, and what it is made of: the replayed schedule, logits and loss, the optimizer, exposed
        data-parallel communication where it is not part of the schedule (`exposed_ns`), and how much longer computing
        takes beside what is not exposed (`slowed_ns`); forward and backward pass of a layer, and what of them is
        exposed context-parallel communication (`context_layer_ns`). `device_time`: computing of a rank of the last
        stage, ns, by what its durations rest on.
    """
    layout.check()
    sums = _sums(layout, profile, kernels)
    forward, backward, head, optimizer = sums.forward, sums.backward, sums.head, sums.optimizer
    gradients = layout.gradient_bytes_per_parameter * parameters_per_rank(layout) if layout.dp * layout.cp > 1 else 0
    exposed = slowed = 0.0
    if layout.fully_sharded:
        forward, backward, exposed = _fully_sharded(layout, profile, forward, backward)
    elif layout.dp_overlap:
        stage = layout.places // layout.pp
        found = data_parallel(layout, profile, stage * forward, stage * backward)
        exposed, slowed = found.exposed_ns, found.slowed_ns
    recomputed = 1.5 if layout.recompute else 1.0
    activation = 2 * layout.micro_batch * layout.seq * layout.hidden // layout.cp
    graph = transformer_step(
        dp=layout.dp * layout.cp, tp=layout.tp, pp=layout.pp, microbatches=layout.microbatches,
        layers=layout.places // layout.pp, interleave=layout.vp,
        forward_ns=round(forward / 2), backward_ns=round(backward / 2),
        tensor_bytes=round(activation * recomputed * (1 - layout.tp_overlap)) if layout.tp > 1 else 0,
        # Each of the tensor-parallel ranks sends its part (Megatron gathers them within the node).
        activation_bytes=activation // layout.tp,
        gradient_bytes=0 if layout.dp_overlap or layout.fully_sharded else gradients,
    )  # fmt: skip
    replayed = json.loads(_native.replay_json(graph, json.dumps({"profile": profile})))
    schedule = replayed["iteration_time_ns"][0]
    if layout.ends_are_layers:
        head = max(0.0, head - forward - backward)
    total = round(schedule + head * layout.microbatches + optimizer + exposed + slowed + layout.fixed_ns)
    return {
        "iteration_time_ns": total,
        "schedule_ns": schedule,
        "head_ns": round(head * layout.microbatches),
        "optimizer_ns": round(optimizer),
        "exposed_ns": round(exposed),
        "slowed_ns": round(slowed),
        "forward_layer_ns": round(forward),
        "backward_layer_ns": round(backward),
        "context_layer_ns": [round(part) for part in sums.context],
        "device_time": {"by_provenance": sums.by_provenance},
    }


@dataclass(frozen=True, slots=True)
class _Sums:
    """Both passes of a layer (the backward pass with what is run again), head and optimizer, ns."""

    forward: float
    backward: float
    head: float
    optimizer: float
    #: Exposed context-parallel communication of the passes, part of them.
    context: tuple[float, float]
    #: Device time of a rank of the last stage in a step, by what it rests on.
    by_provenance: dict[str, int]


def _sums(layout: Layout, profile: str, kernels: Sequence[str]) -> _Sums:
    """Kernels are launched no faster than the host can."""
    found = parts(layout)
    groups = [found.forward, found.backward, found.head, found.optimizer, *found.ring_steps]
    works = json.dumps([work for group in groups for work in group])
    durations = iter(json.loads(_native.work_durations_json(profile, list(kernels), works)))
    timed = [[next(durations) for _ in group] for group in groups]
    host = float(tomllib.loads(profile)["host"]["kernel_launch_ns"])
    times = [max(sum(float(one["ns"]) for one in group), len(group) * host) for group in timed]
    forward, backward, head, optimizer, *ring_steps = times
    context = context_parallel_ns(layout, profile, (ring_steps[0], ring_steps[1]))
    forward, backward = forward + context[0], backward + context[1]
    layers = layout.microbatches * layout.places // layout.pp
    runs = (layers * (2 if layout.recompute else 1), layers, layout.microbatches, 1)
    return _Sums(
        forward, backward + (forward if layout.recompute else 0.0), head, optimizer, context,
        _by_provenance(timed[:4], runs),
    )  # fmt: skip


def _by_provenance(groups: Sequence[Sequence[Work]], runs: Sequence[int]) -> dict[str, int]:
    """Device time by what it rests on, ns, of groups of kernels that are run so many times."""
    found: dict[str, float] = {}
    for group, times in zip(groups, runs, strict=True):
        for one in group:
            found[one["provenance"]] = found.get(one["provenance"], 0.0) + times * float(one["ns"])
    return {name: round(found[name]) for name in sorted(found)}


def _fully_sharded(layout: Layout, profile: str, forward: float, backward: float) -> tuple[float, float, float]:
    """Passes of a layer whose parameters are gathered beside the one before it, and what nothing hides, ns."""
    parameters, ranks = layer_parameters(layout) // layout.tp, layout.dp * layout.cp
    gather = call_ns(profile, "AllGather", ranks, layout.tp, layout.parameter_bytes * parameters)
    # Gradients are scattered in their own type.
    scatter = call_ns(profile, "ReduceScatter", ranks, layout.tp, layout.gradient_bytes_per_parameter * parameters)
    share = busy_share(layout, profile)

    def beside(compute: float, communication: float) -> float:
        slowed = share * min(communication, compute / (1 - share))
        return max(compute + slowed, communication)

    return beside(forward, gather), beside(backward, gather + scatter), gather + scatter
