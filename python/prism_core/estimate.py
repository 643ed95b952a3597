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
from prism_core.layout_comm import (
    CP_COMM_TYPES,
    ELEMENT,
    attention_moves,
    busy_share,
    call_ns,
    context_parallel_ns,
    data_parallel,
)
from prism_core.synthetic import transformer_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A dense transformer and how it is spread over ranks."""

    layers: int
    hidden: int
    heads: int
    seq: int
    global_batch: int
    micro_batch: int = 1
    kv_heads: int = 0
    ffn: int = 0
    #: SwiGLU: two input matrices.
    gated: bool = False
    vocab: int = 51200
    tp: int = 1
    pp: int = 1
    #: Blocks of layers of a stage (interleaved 1F1B).
    vp: int = 1
    #: Ranks that share a sequence.
    cp: int = 1
    #: How they exchange keys and values: "p2p" (a ring beside the attention), "all_gather", or "a2a" (by heads).
    cp_comm_type: str = "p2p"
    dp: int = 1
    dtype: str = "bf16"
    #: One fused attention kernel, or products, masks, softmax and dropout one by one.
    fused_attention: bool = True
    dropout: bool = False
    #: One kernel for loss and gradient of the logits, or a dozen.
    fused_loss: bool = True
    #: The forward pass of each layer is run again before its backward pass.
    recompute: bool = False
    #: Embedding and head are matrices of their own.
    untied_embeddings: bool = False
    gradient_bytes_per_parameter: int = 2
    #: What is gathered of a layer's parameter: 1 with `fp8_param_gather`. Embedding and head stay in 16 bits.
    parameter_bytes: int = 2
    #: Embedding and head take the place of a layer each in the first and the last stage.
    ends_are_layers: bool = False
    #: Queries and keys are rotated by their positions (RoPE).
    rotary: bool = False
    #: Norms and residual sums are spread over the tensor-parallel ranks as well.
    sequence_parallel: bool = False
    #: Share of the tensor-parallel communication that is hidden behind the products.
    tp_overlap: float = 0.0
    #: Gradients are reduced beside the last backward pass of a stage, parameters gathered beside the next forward pass.
    dp_overlap: bool = False
    #: Parameters of a bucket; 0: Megatron-core's, 1 million per data-parallel rank and at least 40 million.
    bucket_parameters: int = 0
    #: Multiprocessors that data-parallel communication beside computing takes from it: NCCL's blocks of threads.
    dp_sms: int = 16
    #: Optimizer states are spread over the data-parallel ranks.
    distributed_optimizer: bool = False
    #: Parameters of each layer are gathered before it is used, its gradients scattered after its backward pass (FSDP).
    fully_sharded: bool = False
    #: Time of a step in which no rank computes: data, logging, launches around the layers, ns.
    fixed_ns: int = 0

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each rank."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def places(self) -> int:
        """Layers, and the ends where they take the place of one."""
        return self.layers + (2 if self.ends_are_layers else 0)

    @property
    def stage_parameters(self) -> int:
        """Parameters of a stage's layers on each rank."""
        return layer_parameters(self) * self.layers // self.pp // self.tp

    @property
    def end_parameters(self) -> int:
        """Parameters of embedding and head on each rank of the first stage (of a pipeline, the last has as many)."""
        return self.vocab * self.hidden * (2 if self.untied_embeddings and self.pp == 1 else 1) // self.tp

    def check(self) -> None:
        """Raises ConfigError where the numbers do not fit together."""
        if self.global_batch % (self.micro_batch * self.dp):
            raise ConfigError("the global batch is no multiple of micro batch times data-parallel degree")
        if self.places % self.pp:
            raise ConfigError(f"{self.places} layers cannot be spread evenly over {self.pp} stages")
        if self.heads % self.tp:
            raise ConfigError(f"{self.heads} heads cannot be spread evenly over {self.tp} ranks")
        self._check_context()
        if self.fully_sharded and self.pp > 1:
            raise ConfigError("fully sharded parameters in a pipeline are not modelled")
        if not 0 <= self.tp_overlap <= 1:
            raise ConfigError(f"tp_overlap is {self.tp_overlap}: a share is within 0 and 1")
        for name in ("bucket_parameters", "dp_sms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must not be negative")

    def _check_context(self) -> None:
        """Raises ConfigError where a sequence cannot be spread as is asked for."""
        if self.cp_comm_type not in CP_COMM_TYPES:
            raise ConfigError(f"cp_comm_type is {self.cp_comm_type!r}: it must be one of {', '.join(CP_COMM_TYPES)}")
        if self.cp == 1:
            return
        # A rank has one block from the front and one from the back: the mask leaves each as much to do.
        if self.seq % (2 * self.cp):
            raise ConfigError(f"sequences of {self.seq} cannot be spread evenly over {self.cp} ranks, two blocks each")
        kv_heads = (self.kv_heads or self.heads) // self.tp
        if self.cp_comm_type == "a2a" and kv_heads % self.cp:
            raise ConfigError(f"a2a: {kv_heads} heads of keys and values cannot be spread evenly over {self.cp} ranks")


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


def layer_parameters(layout: Layout) -> int:
    """Parameters of a layer, of all tensor-parallel ranks."""
    depth, ffn = layout.hidden // layout.heads, layout.ffn or 4 * layout.hidden
    kv_heads = layout.kv_heads or layout.heads
    attention = layout.hidden * depth * (2 * layout.heads + 2 * kv_heads)
    return attention + layout.hidden * ffn * (3 if layout.gated else 2)


def parameters_per_rank(layout: Layout) -> int:
    """Parameters of the first stage's ranks (with the embedding)."""
    return layout.stage_parameters + layout.end_parameters


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
        exposed context-parallel communication (`context_layer_ns`).
    """
    layout.check()
    forward, backward, head, optimizer, context = _sums(layout, profile, tuple(kernels))
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
        "context_layer_ns": [round(part) for part in context],
    }


def _sums(
    layout: Layout, profile: str, kernels: tuple[str, ...]
) -> tuple[float, float, float, float, tuple[float, float]]:
    """Both passes of a layer, head and optimizer, exposed context parallelism of the passes (part of them), ns.

    Kernels are launched no faster than the host can.
    """
    found = parts(layout)
    groups = [found.forward, found.backward, found.head, found.optimizer, *found.ring_steps]
    works = [work for group in groups for work in group]
    durations = json.loads(_native.work_durations_json(profile, list(kernels), json.dumps(works)))
    host = float(tomllib.loads(profile)["host"]["kernel_launch_ns"])
    sums, at = [], 0
    for group in groups:
        device = sum(float(item["ns"]) for item in durations[at : at + len(group)])
        sums.append(max(device, len(group) * host))
        at += len(group)
    forward, backward, head, optimizer, *ring_steps = sums
    context = context_parallel_ns(layout, profile, (ring_steps[0], ring_steps[1]))
    forward, backward = forward + context[0], backward + context[1]
    return forward, backward + (forward if layout.recompute else 0.0), head, optimizer, context


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
