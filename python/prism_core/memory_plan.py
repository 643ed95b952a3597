"""Memory of a transformer from its arguments: parameters, gradients, optimizer states and activations.

Closed forms, with their assumptions in the answer: parameters are divided by what holds them (sharded ones by TP,
routed experts by expert-TP times EP, the rest by nothing), optimizer states by the ranks that share them when the
optimizer is distributed, and a stage of a 1F1B pipeline keeps the activations of as many microbatches as are in flight.
Activations of sequence parallelism with selective recomputation follow Korthikanti et al. 2022 (section 4, 34 s b h per
layer; 18 s b h and 4 s b per intermediate value with fused attention), as Megatron-LM's own report does.
To know instead of estimating, collect the program: `prism collect` reports its allocator's peak to the byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prism_core.errors import ConfigError

_GIB = 1 << 30
#: bf16 weights, fp32 gradients; fp32 weights and two fp32 moments.
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """What is trained. Zero experts: a dense model."""

    layers: int
    hidden: int
    ffn: int
    vocab: int
    #: Groups of keys and values over heads: 1 with as many as heads.
    kv_share: float = 1.0
    #: SwiGLU: a third matrix.
    gated: bool = True
    tied: bool = False
    experts: int = 0
    #: Width of an expert; every layer has experts.
    expert_ffn: int = 0

    def check(self) -> None:
        """Raises ConfigError for a model that is none."""
        for name in ("layers", "hidden", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a model has {name} >= 1, not {getattr(self, name)}")
        if self.experts and self.expert_ffn < 1:
            raise ConfigError("a model with experts says how wide they are (expert_ffn)")
        if not self.experts and self.ffn < 1:
            raise ConfigError("a dense model says how wide its MLP is (ffn)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How it is spread over ranks."""

    world: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    #: Tensor parallelism of experts; default: as `tp`.
    etp: int | None = None
    cp: int = 1
    distributed_optimizer: bool = False

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.tp if self.etp is None else self.etp

    @property
    def data_parallel(self) -> int:
        """Ranks that hold the same dense parameters."""
        return self._divided("world size", self.world, self.tp * self.pp)

    @property
    def expert_data_parallel(self) -> int:
        """Ranks that hold the same experts."""
        return self._divided("world size", self.world, self.expert_tp * self.ep * self.pp)

    @staticmethod
    def _divided(what: str, whole: int, parts: int) -> int:
        if parts < 1 or whole % parts:
            raise ConfigError(f"{what} {whole} is no multiple of {parts} (the product of the degrees)")
        return whole // parts


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters of the whole model, by who holds them."""

    tensor_sharded: int
    replicated: int
    routed: int


def parameters(model: Transformer) -> Parameters:
    """Counts RMSNorms (two per layer and one at the end), no biases, an output layer of its own unless tied."""
    model.check()
    width = model.hidden
    attention = int(2 * width * width * (1 + model.kv_share))
    matrices = 3 if model.gated else 2
    dense = 0 if model.experts else matrices * width * model.ffn
    embeddings = (1 if model.tied else 2) * model.vocab * width
    routed = model.layers * model.experts * matrices * width * model.expert_ffn
    norms = 2 * width * model.layers + width
    return Parameters(
        tensor_sharded=model.layers * (attention + dense) + embeddings,
        replicated=norms + model.layers * model.experts * width,
        routed=routed,
    )


@dataclass(frozen=True, slots=True)
class States:
    """Parameters of one rank and what they cost in weights, gradients and optimizer states."""

    parameters: int
    total_bytes: int


def states(model: Transformer, spread: Spread) -> States:
    """For a rank of a pipeline that is one stage deep, or an average one of several."""
    counted = parameters(model)
    dense = counted.tensor_sharded / spread.tp + counted.replicated
    routed = counted.routed / (spread.expert_tp * spread.ep)
    holders = (spread.data_parallel, spread.expert_data_parallel)
    sharers = holders if spread.distributed_optimizer else (1, 1)
    size = sum(
        count * (WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES / ranks)
        for count, ranks in zip((dense, routed), sharers, strict=True)
    )
    return States(round((dense + routed) / spread.pp), round(size / spread.pp))


def in_flight(stages: int, microbatches: int) -> list[int]:
    """Microbatches whose activations each stage of a 1F1B pipeline keeps at its peak."""
    if stages < 1 or microbatches < 1:
        raise ConfigError("a pipeline has at least one stage and one microbatch")
    return [min(microbatches, stages - stage) for stage in range(stages)]


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Peak activations by pipeline stage, in units of one layer's of one microbatch, and what that means."""

    units: list[int]
    #: The stage that runs out of memory first.
    candidate: int
    verdict: str


def stage_activations(layers: Sequence[int], microbatches: int) -> StageActivations:
    """Layers of each stage times microbatches in flight."""
    units = [count * kept for count, kept in zip(layers, in_flight(len(layers), microbatches), strict=True)]
    candidate = units.index(max(units))
    falls = all(before >= after for before, after in itertools.pairwise(units))
    order = "it falls from stage to stage, as the schedule has it" if falls else "it follows layers times microbatches"
    verdict = f"expected by the schedule: stage {candidate} is the OOM candidate; {order}"
    return StageActivations(units, candidate, verdict)


def activation_bytes(model: Transformer, seq: int, micro_batch: int, tp: int = 1) -> int:
    """With fused attention, sequence parallelism and selective recomputation, one pipeline stage, bf16."""
    tokens = seq * micro_batch
    layer = tokens * model.hidden * 18 + tokens * 4 * model.ffn
    embedding = 8 * tokens + tokens * model.hidden
    output = 4 * tokens * (model.hidden + model.vocab)
    return (model.layers * layer + embedding + output) // tp


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it fits, and by how much."""

    total_bytes: int
    capacity_bytes: int
    #: What is left; less than nothing where it does not fit.
    free_bytes: int
    fits: bool
    text: str


def verdict(total_bytes: int, capacity_bytes: int, context_bytes: int) -> Verdict:
    """Compares with a card whose driver keeps `context_bytes` for itself; NCCL and fragmentation come on top."""
    free = capacity_bytes - context_bytes - total_bytes
    amount = f"{abs(free) / _GIB:.2f} GiB"
    if free < 0:
        text = f"does not fit: {amount} too much"
    elif free < capacity_bytes // 10:
        text = f"fits by {amount} only without fragmentation and NCCL buffers: use a smaller micro batch"
    else:
        text = f"fits, {amount} to spare"
    return Verdict(total_bytes, capacity_bytes, free, free >= 0, text)


def plan(
    model: Transformer,
    spread: Spread,
    *,
    seq: int,
    micro_batch: int,
    capacity_bytes: int,
    context_bytes: int,
) -> dict[str, Any]:
    """All of it as one document, with the assumptions it rests on.

    Raises:
        ConfigError: The numbers do not fit together, or the closed form does not cover them.
    """
    if model.experts or spread.pp > 1:
        raise ConfigError("activations in closed form are those of a dense model with one pipeline stage: collect it")
    own = states(model, spread)
    activations = activation_bytes(model, seq, micro_batch, spread.tp)
    found = verdict(own.total_bytes + activations, capacity_bytes, context_bytes)
    shared = f"shared by {spread.data_parallel} ranks" if spread.distributed_optimizer else "on every rank"
    return {
        "parameters": own.parameters,
        "states_bytes": own.total_bytes,
        "activation_bytes": activations,
        "total_bytes": found.total_bytes,
        "capacity_bytes": capacity_bytes,
        "context_bytes": context_bytes,
        "free_bytes": found.free_bytes,
        "fits": found.fits,
        "verdict": found.text,
        "assumptions": [
            f"vocabulary {model.vocab}, embeddings {'tied' if model.tied else 'untied'}, RMSNorm, no biases",
            f"bf16 weights, fp32 gradients; fp32 weights and Adam's moments {shared}",
            "fused attention, sequence parallelism, selective recomputation, dropout only in the embedding",
            "not counted: NCCL's buffers, library workspaces, fragmentation of the allocator",
        ],
    }
