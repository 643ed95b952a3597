"""Step time of a dense transformer from the operator models alone: for layouts nobody has a program of at hand.

The layer is a list of operators with their shapes; the engine gives each its duration (as it does for a program's own
calls), the reference schedule (`prism_core.synthetic.transformer_step`: 1F1B, tensor-, data- and pipeline-parallel
communication) is replayed on the profile's network. What it leaves out: overlap of communication with computing, and
everything a real program does besides. To answer for a real program, collect it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prism_core import _native
from prism_core.errors import ConfigError
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
    dp: int = 1
    dtype: str = "bf16"
    #: One fused attention kernel, or products, masks, softmax and dropout one by one.
    fused_attention: bool = True
    dropout: bool = False
    #: The forward pass of each layer is run again before its backward pass.
    recompute: bool = False
    gradient_bytes_per_parameter: int = 2

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each rank."""
        return self.global_batch // (self.micro_batch * self.dp)

    def check(self) -> None:
        """Raises ConfigError where the numbers do not fit together."""
        if self.global_batch % (self.micro_batch * self.dp):
            raise ConfigError("the global batch is no multiple of micro batch times data-parallel degree")
        if self.layers % self.pp:
            raise ConfigError(f"{self.layers} layers cannot be spread evenly over {self.pp} stages")
        if self.heads % self.tp:
            raise ConfigError(f"{self.heads} heads cannot be spread evenly over {self.tp} ranks")


#: One piece of device work, as `work_durations_json` takes it.
Work = dict[str, Any]


def _gemm(m: int, n: int, k: int, dtype: str, batch: int = 1) -> Work:
    return {"gemm": {"m": m, "n": n, "k": k, "batch": batch, "input": dtype, "compute": dtype}}


def _stream(bytes_moved: float) -> Work:
    return {"kernel": {"grid": [1, 1, 1], "threads": 128, "bytes": max(1, int(bytes_moved))}}


@dataclass(frozen=True, slots=True)
class Parts:
    """The operators of a layer and around it."""

    forward: list[Work]
    backward: list[Work]
    #: Logits and loss of one microbatch, both directions (last stage).
    head: list[Work]
    optimizer: list[Work]


def parts(layout: Layout) -> Parts:
    """What one rank computes."""
    size = 2 if layout.dtype in ("bf16", "fp16") else 1 if layout.dtype == "fp8" else 4
    tokens, depth = layout.micro_batch * layout.seq, layout.hidden // layout.heads
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
    attention_forward, attention_backward = _attention(layout, heads, depth)
    forward += attention_forward
    backward += attention_backward
    activation = 2 * tokens * width
    # Two norms, two residual sums (with bias and dropout: a mask as well), one activation function.
    streams = [2 * activation] * 2 + [(3.5 if layout.dropout else 3) * activation] * 2
    streams.append((3 if layout.gated else 2) * 2 * tokens * wide)
    forward += [_stream(item) for item in streams]
    backward += [_stream(1.5 * item) for item in streams]
    vocabulary = layout.vocab // layout.tp
    logits = [(tokens, vocabulary, width), (tokens, width, vocabulary), (vocabulary, width, tokens)]
    head = [_gemm(*shape, "bf16" if layout.dtype == "fp8" else layout.dtype) for shape in logits]
    # Softmax in single precision, forward and backward.
    head += [_stream(tokens * vocabulary * 4 * 2)] * 2
    parameters = parameters_per_rank(layout)
    # Gradients, master parameters and two moments are read, three of them and the parameters written.
    optimizer = [_stream(parameters * (layout.gradient_bytes_per_parameter + 12 + 12 + size))]
    return Parts(forward, backward, head, optimizer)


def _attention(layout: Layout, heads: int, depth: int) -> tuple[list[Work], list[Work]]:
    batch, seq = layout.micro_batch * heads, layout.seq
    dtype = "bf16" if layout.dtype == "fp8" else layout.dtype
    if layout.fused_attention:
        flop = 4 * batch * seq * seq * depth // 2
        tensors = batch * seq * depth * 2

        def operator(name: str, times: float, moved: int) -> Work:
            return {"operator": {"name": name, "flop": int(flop * times), "bytes": moved * tensors, "input": dtype}}

        return [operator("cudnn.sdpa_forward", 1, 4)], [operator("cudnn.sdpa_backward", 2.5, 8)]
    scores = batch * seq * seq
    products = [_gemm(seq, seq, depth, dtype, batch), _gemm(seq, depth, seq, dtype, batch)]
    # Masked softmax reads and writes the scores; dropout reads, writes and keeps a mask.
    softmax, dropout = 4 * scores, (5 * scores if layout.dropout else 0)
    forward = [*products, _stream(softmax), *([_stream(dropout)] if dropout else [])]
    backward = [*products, *products, _stream(1.5 * softmax), *([_stream(dropout)] if dropout else [])]
    return forward, backward


def parameters_per_rank(layout: Layout) -> int:
    """Parameters of the first stage's ranks (with the embedding)."""
    depth, ffn = layout.hidden // layout.heads, layout.ffn or 4 * layout.hidden
    kv_heads = layout.kv_heads or layout.heads
    attention = layout.hidden * depth * (2 * layout.heads + 2 * kv_heads)
    layer = attention + layout.hidden * ffn * (3 if layout.gated else 2)
    return (layer * layout.layers // layout.pp + layout.vocab * layout.hidden) // layout.tp


def estimate(layout: Layout, profile: str, kernels: Sequence[str] = ()) -> dict[str, Any]:
    """Step time of a layout on a device.

    Args:
        layout: The model and its layout.
        profile: Device profile, TOML text.
        kernels: Kernel tables, TOML texts.

    Returns:
        `iteration_time_ns`, and what it is made of: the replayed schedule, logits and loss, the optimizer; forward and
        backward pass of a layer.
    """
    layout.check()
    found = parts(layout)
    groups = [found.forward, found.backward, found.head, found.optimizer]
    works = [work for group in groups for work in group]
    durations = json.loads(_native.work_durations_json(profile, list(kernels), json.dumps(works)))
    sums, launches, at = [], [], 0
    for group in groups:
        sums.append(sum(item["ns"] for item in durations[at : at + len(group)]))
        launches.append(len(group))
        at += len(group)
    host = _host_ns_per_launch(profile)
    # A layer's kernels are launched no faster than the host launches them.
    forward, backward = (max(sums[index], launches[index] * host) for index in (0, 1))
    backward += forward if layout.recompute else 0.0
    activation = 2 * layout.micro_batch * layout.seq * layout.hidden
    graph = transformer_step(
        dp=layout.dp, tp=layout.tp, pp=layout.pp, microbatches=layout.microbatches, layers=layout.layers // layout.pp,
        interleave=layout.vp,
        forward_ns=round(forward / 2), backward_ns=round(backward / 2),
        tensor_bytes=activation if layout.tp > 1 else 0, activation_bytes=activation,
        gradient_bytes=layout.gradient_bytes_per_parameter * parameters_per_rank(layout) if layout.dp > 1 else 0,
    )  # fmt: skip
    replayed = json.loads(_native.replay_json(graph, json.dumps({"profile": profile})))
    schedule = replayed["iteration_time_ns"][0]
    total = round(schedule + sums[2] * layout.microbatches + sums[3])
    return {
        "iteration_time_ns": total,
        "schedule_ns": schedule,
        "head_ns": round(sums[2] * layout.microbatches),
        "optimizer_ns": round(sums[3]),
        "forward_layer_ns": round(forward),
        "backward_layer_ns": round(backward),
    }


def _host_ns_per_launch(profile: str) -> float:
    import tomllib

    return float(tomllib.loads(profile)["host"]["kernel_launch_ns"])
