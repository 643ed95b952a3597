"""Workloads made up by formula: to measure replay on, and to compare with other simulators."""

from __future__ import annotations

import json

from prism_core import _native
from prism_core.errors import ConfigError

MIB = 1 << 20


def transformer_step(
    dp: int,
    tp: int,
    pp: int,
    microbatches: int,
    layers: int,
    ep: int = 1,
    interleave: int = 1,
    *,
    iterations: int = 1,
    forward_ns: int = 1_000_000,
    backward_ns: int = 2_000_000,
    tensor_bytes: int = 32 * MIB,
    activation_bytes: int = 32 * MIB,
    gradient_bytes: int = 512 * MIB,
    expert_bytes: int = 32 * MIB,
    latency_ns: int = 5_000,
    bytes_per_s: int = 50_000_000_000,
) -> _native.Graph:
    """One training step of a transformer with tensor, data, pipeline and expert parallelism.

    Rank `tp + TP * (dp + DP * pp)`. The pipeline schedule is 1F1B. Forward of a microbatch: receive the activation,
    then twice per layer compute and a tensor-parallel all-reduce, then send without waiting. Backward the same with
    gradients. At the end one data-parallel all-reduce. With experts, the second half of a layer stands between two
    all-to-alls.

    Args:
        dp: Data-parallel degree.
        tp: Tensor-parallel degree.
        pp: Pipeline stages.
        microbatches: Microbatches of a step; with `interleave` a multiple of `pp`.
        layers: Layers of a stage.
        ep: Expert-parallel degree, a divisor of `dp`: that many neighbouring data-parallel ranks share experts.
        interleave: Blocks of consecutive layers that a stage has, a divisor of `layers` (interleaved 1F1B).
        iterations: Steps in a row.
        forward_ns: Compute of half a layer in the forward pass, ns.
        backward_ns: Compute of half a layer in the backward pass, ns.
        tensor_bytes: Size of a tensor-parallel all-reduce, bytes.
        activation_bytes: Size of the message between two stages, bytes.
        gradient_bytes: Size of the data-parallel all-reduce of one rank, bytes.
        expert_bytes: What a rank sends in an all-to-all between experts, its own share included, bytes.
        latency_ns: Latency of a rank's network card, ns.
        bytes_per_s: Bandwidth of a rank's network card in one direction, bytes per second.

    Returns:
        The graph. Unless a profile is given, it is replayed on the flat network of `latency_ns` and `bytes_per_s`:
        every rank is a node with one card, and collectives are plain rings.

    Raises:
        ConfigError: A number is out of range or degrees do not fit together; the message names it.
    """
    options = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "microbatches": microbatches,
        "layers": layers,
        "ep": ep,
        "interleave": interleave,
        "iterations": iterations,
        "forward": forward_ns * 1000,
        "backward": backward_ns * 1000,
        "tensor_bytes": tensor_bytes,
        "activation_bytes": activation_bytes,
        "gradient_bytes": gradient_bytes,
        "expert_bytes": expert_bytes,
        "latency_ns": latency_ns,
        "bytes_per_s": bytes_per_s,
    }
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name} is {value!r}: it must be a whole number that is not negative")
    if bytes_per_s == 0:
        raise ConfigError("bytes_per_s is 0: nothing would ever arrive")
    return _native.transformer_step(json.dumps(options))
