"""A dense transformer and how it is spread over ranks, for `prism_core.estimate` and `prism_core.layout_comm`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from prism_core.errors import ConfigError

#: Bytes of an element of activations and their gradients: 16-bit floats, also where products are in 8 bits.
ELEMENT = 2
#: How context-parallel ranks exchange keys and values.
CP_COMM_TYPES = ("p2p", "all_gather", "a2a")
#: Types of matrix products.
DTYPES = ("bf16", "fp16", "fp32", "fp8")
#: Ranks at most, and passes of a layer on a rank in a step: they bound time and memory.
MAX_RANKS, MAX_PASSES = 1 << 20, 1 << 17
#: Of any number.
_MOST = 1 << 40
_FROM_ZERO = ("kv_heads", "ffn", "bucket_parameters", "dp_sms", "fixed_ns")


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
        """Raises ConfigError where a number cannot be, or the numbers do not fit together."""
        self._check_ranges()
        if self.global_batch % (self.micro_batch * self.dp):
            raise ConfigError("the global batch is no multiple of micro batch times data-parallel degree")
        if self.microbatches == 0:
            raise ConfigError(
                f"a global batch of {self.global_batch} leaves some of {self.dp} ranks without a sequence"
            )
        if self.microbatches * self.places // self.pp > MAX_PASSES:
            raise ConfigError(f"{self.microbatches:,} microbatches: with so many layers a step is too long to estimate")
        if self.places % self.pp:
            raise ConfigError(f"{self.places} layers cannot be spread evenly over {self.pp} stages")
        stage = self.places // self.pp
        if stage % self.vp:
            raise ConfigError(f"the {stage} layers of a stage cannot be spread evenly over {self.vp} blocks (vp)")
        if self.vp > 1 and self.microbatches % self.pp:
            raise ConfigError(f"with vp > 1 the microbatches, {self.microbatches}, must be a multiple of pp, {self.pp}")
        if self.hidden % self.heads:
            raise ConfigError(f"hidden, {self.hidden}, is no multiple of {self.heads} heads")
        if self.heads % self.tp:
            raise ConfigError(f"{self.heads} heads cannot be spread evenly over {self.tp} ranks")
        self._check_context()
        if self.fully_sharded and self.pp > 1:
            raise ConfigError("fully sharded parameters in a pipeline are not modelled")

    def _check_ranges(self) -> None:
        """Raises ConfigError for a number out of its range, by itself."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int):
                continue
            least = 0 if field.name in _FROM_ZERO else 1
            if not least <= value <= _MOST:
                raise ConfigError(f"{field.name} is {value}: it must be within {least} and {_MOST}")
        if not 0 <= self.tp_overlap <= 1:
            raise ConfigError(f"tp_overlap is {self.tp_overlap}: a share is within 0 and 1")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}: it must be one of {', '.join(DTYPES)}")
        ranks = self.tp * self.cp * self.dp * self.pp
        if ranks > MAX_RANKS:
            raise ConfigError(f"tp x cp x dp x pp is {ranks:,} ranks: more than {MAX_RANKS:,} are not estimated")

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


def layer_parameters(layout: Layout) -> int:
    """Parameters of a layer, of all tensor-parallel ranks."""
    depth, ffn = layout.hidden // layout.heads, layout.ffn or 4 * layout.hidden
    kv_heads = layout.kv_heads or layout.heads
    attention = layout.hidden * depth * (2 * layout.heads + 2 * kv_heads)
    return attention + layout.hidden * ffn * (3 if layout.gated else 2)
