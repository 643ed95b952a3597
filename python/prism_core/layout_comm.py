"""Communication of a layout beside its computing: context-parallel attention and data-parallel buckets.

Every duration is the engine's, of the one call on the profile's network, among ranks that lie as the layout has them:
tensor-parallel ranks are neighbours, context-parallel ones come next, then data-parallel ones (Megatron-core's order).
What runs beside what is a rule:

* context parallelism as Transformer Engine's `context_parallel.py` (2.20) has it. `p2p`: a ring; each of `cp` steps
  computes on the keys and values at hand while those of the next step are under way, in the backward pass together
  with the gradients of the step before. `all_gather`: keys and values are gathered before the attention, their
  gradients scattered after it. `a2a`: heads instead of positions are spread within the attention; the exchanges run
  before and after it;
* data parallelism as Megatron-core's `distributed_data_parallel.py` has it: gradients are reduced in buckets beside the
  last backward pass, parameters gathered in buckets beside the next forward pass. The last and the first bucket are
  not hidden.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass
from functools import lru_cache

from prism_core import _native
from prism_core.layout import ELEMENT, Layout

#: Megatron-core's parameters of a bucket: at least, and per data-parallel rank.
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000


@lru_cache(maxsize=4096)
def call_ns(profile: str, op: str, members: int, stride: int, size: int) -> float:
    """An NCCL call among `members` ranks `stride` apart, each of the ranks between with a group of its own, ns.

    Args:
        profile: Device profile, TOML text.
        op: `AllReduce`, `ReduceScatter`, `AllGather`, `AllToAll`, or `Ring`: everyone sends to the next and receives
            from the one before.
        members: Ranks of a group.
        stride: Distance of two of them.
        size: Bytes of the whole tensor: what an all-reduce reduces, a gather ends with, a scatter begins with, an
            all-to-all has on each rank, and a rank sends in a ring.
    """
    if members == 1 or size == 0:
        return 0.0
    count = size if op in ("AllReduce", "Ring") else -(-size // members)
    begin, end = "  +0 s0 training_begin", "  +0 s0 iteration_end"
    lines = ["prism-graph 1", f"world {members * stride}"]
    lines += [f"comm {_run(first, members, stride)}" for first in range(stride)]
    if op == "Ring":
        for place in range(members):
            to, source = (place + 1) % members, (place - 1) % members
            send = f"  +0 s0 Send c0 Uint8 {count} peer {to} group 1"
            lines += [f'template "{place}"', begin, send, f"  +0 s0 Recv c0 Uint8 {count} peer {source} group 1", end]
        lines += [f"rank {p * stride + t} template {p} comms {t}" for p in range(members) for t in range(stride)]
    else:
        lines += ['template "all"', begin, f"  +0 s0 {op} c0 Uint8 {count} Sum", end]
        lines += [f"rank {rank} template 0 comms {rank % stride}" for rank in range(members * stride)]
    graph = _native.Graph.from_text("\n".join(lines) + "\n")
    return float(json.loads(_native.replay_json(graph, json.dumps({"profile": profile})))["iteration_time_ns"][0])


def _run(first: int, members: int, stride: int) -> str:
    last = first + (members - 1) * stride
    return f"{first}-{last}" + (f"/{stride}" if stride > 1 else "")


def key_value_bytes(layout: Layout) -> int:
    """Keys and values of a layer that a rank has, of one microbatch, bytes."""
    tokens, depth = layout.micro_batch * layout.seq // layout.cp, layout.hidden // layout.heads
    return 2 * ELEMENT * tokens * depth * (layout.kv_heads or layout.heads) // layout.tp


def query_bytes(layout: Layout) -> int:
    """Queries of a layer that a rank has (and as much output), of one microbatch, bytes."""
    return ELEMENT * layout.micro_batch * (layout.seq // layout.cp) * layout.hidden // layout.tp


def attention_moves(layout: Layout) -> tuple[list[int], list[int]]:
    """Bytes that a context-parallel rank moves in its memory besides attention, forward and backward, kernel by kernel.

    Of the ring only: keys and values are copied to where they are sent from, the parts of the output (backward: of the
    gradients) of each step are added to those before.
    """
    if layout.cp == 1 or layout.cp_comm_type != "p2p":
        return [], []
    query, both = query_bytes(layout), key_value_bytes(layout)
    later = layout.cp - 1
    return [2 * both, 2 * query] + [3 * query] * later, [2 * both, 2 * query, 2 * both] + [3 * query, 3 * both] * later


def context_parallel_ns(layout: Layout, profile: str, step: tuple[float, float]) -> tuple[float, float]:
    """What nothing hides of the context-parallel communication of a layer, forward and backward, ns.

    Args:
        layout: The layout.
        profile: Device profile, TOML text.
        step: Attention of one of the ring's `cp` steps, forward and backward, ns.
    """
    both, cp = key_value_bytes(layout), layout.cp
    if cp == 1:
        return 0.0, 0.0

    def call(op: str, size: int) -> float:
        return call_ns(profile, op, cp, layout.tp, size)

    if layout.cp_comm_type == "all_gather":
        gathers = 2 * call("AllGather", cp * both // 2)
        return gathers, gathers + 2 * call("ReduceScatter", cp * both // 2)
    if layout.cp_comm_type == "a2a":
        exchanges = 2 * call("AllToAll", query_bytes(layout)) + 2 * call("AllToAll", both // 2)
        return exchanges, exchanges
    one, two = call("Ring", both), call("Ring", 2 * both)
    forward, backward = step
    # Keys and values go with the first step, both they and their gradients with those between, gradients with the last.
    return (cp - 1) * max(0.0, one - forward), 2 * max(0.0, one - backward) + (cp - 2) * max(0.0, two - backward)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Data-parallel communication of a step beside computing, ns."""

    #: What nothing hides.
    exposed_ns: float
    #: How much longer computing takes because communication has multiprocessors.
    slowed_ns: float


def data_parallel(layout: Layout, profile: str, forward_ns: float, backward_ns: float) -> DataParallel:
    """Gradients beside a stage's last backward pass, parameters beside its first forward pass.

    Args:
        layout: The layout.
        profile: Device profile, TOML text.
        forward_ns: Forward pass of one microbatch through a stage, ns.
        backward_ns: Backward pass, ns.
    """
    ranks = layout.dp * layout.cp
    if ranks == 1:
        return DataParallel(0.0, 0.0)
    parameters, ends = layout.stage_parameters, layout.end_parameters
    size = layout.bucket_parameters or max(_BUCKET, _BUCKET_PER_RANK * ranks)
    blocks = layout.vp
    buckets = blocks * max(1, math.ceil((parameters + ends) / blocks / size))

    def each(op: str, whole: int) -> float:
        return call_ns(profile, op, ranks, layout.tp, whole // buckets)

    reduced = layout.gradient_bytes_per_parameter * (parameters + ends)
    share = busy_share(layout, profile)
    # Interleaved, a block of layers is done with as many microbatches as there are stages before the next has its turn.
    turns = layout.pp if blocks > 1 else 1
    forward_ns, backward_ns = turns * forward_ns, turns * backward_ns
    if not layout.distributed_optimizer:
        return _beside(each("AllReduce", reduced), buckets, backward_ns, share)
    # Embedding and head stay in 16 bits.
    gathered = layout.parameter_bytes * parameters + max(ELEMENT, layout.parameter_bytes) * ends
    gradients = _beside(each("ReduceScatter", reduced), buckets, backward_ns, share)
    weights = _beside(each("AllGather", gathered), buckets, forward_ns, share)
    return DataParallel(gradients.exposed_ns + weights.exposed_ns, gradients.slowed_ns + weights.slowed_ns)


def busy_share(layout: Layout, profile: str) -> float:
    """Share of the multiprocessors that data-parallel communication has while it is under way."""
    return min(0.9, layout.dp_sms / int(tomllib.loads(profile)["device"]["sm_count"]))


def _beside(each: float, buckets: int, window: float, share: float) -> DataParallel:
    """Buckets that become ready one after the other within a window of computing (or are needed in it, one by one)."""
    hidden = min((buckets - 1) * each, window / (1 - share))
    slowed = share * hidden
    # Computing is over when the last bucket is ready, the others run beside it; or the buckets queue from the first on.
    ready = (window + slowed) * (buckets - 1) / buckets
    return DataParallel(max(each, buckets * each - ready), slowed)
