"""A training loop on megatron-core, as its users write one: GPT or a mixture of experts, every way to parallelise.

    torchrun ... megatron_gpt.py --tp 8 --pp 8 --vpp 2 --cp 2 --distributed-optimizer
    torchrun ... megatron_gpt.py --tp 2 --ep 4 --experts 8

It knows nothing of `prism_core`. Needs no Apex, and Transformer Engine only with `--te`.
"""

import argparse
import os
import time
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches, init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank


def parse_arguments() -> argparse.Namespace:
    """Command line of the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tp", 1), ("pp", 1), ("vpp", 0), ("cp", 1), ("ep", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--dispatcher", default="alltoall", choices=["alltoall", "allgather"])
    parser.add_argument("--capacity", type=float, default=0.0, help="drop and pad tokens to this capacity factor")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--te", action="store_true", help="layers of Transformer Engine")
    parser.add_argument("--fp8", action="store_true", help="with --te: delayed scaling")
    parser.add_argument("--layers", type=int, default=0, help="default: two per pipeline stage")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, default=0, help="default: twice the pipeline stages")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples of a micro-batch")
    parser.add_argument("--iters", type=int, default=3)
    return parser.parse_args()


class SequenceNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with gradients that megatron-core reduces over the tensor-parallel group where it has to."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


class HeadExchangeAttention(torch.nn.Module):
    """Attention over a sequence that is split among the context-parallel ranks: heads are exchanged for positions."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: object, **__: object) -> None:
        super().__init__()
        self.group = mpu.get_context_parallel_group()
        self.size = mpu.get_context_parallel_world_size()

    def _exchange(self, x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        if self.size == 1:
            return x
        pieces = torch.cat([piece.contiguous() for piece in x.chunk(self.size, dim=scatter)])
        pieces = _AllToAll.apply(pieces, self.group)
        return torch.cat(pieces.chunk(self.size, dim=0), dim=gather)

    def forward(self, query, key, value, attention_mask=None, **_):
        # [sequence, batch, heads, width] -> whole sequence, some heads
        parts = [self._exchange(x, 2, 0).permute(1, 2, 0, 3) for x in (query, key, value)]
        out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        out = self._exchange(out.permute(2, 0, 1, 3), 0, 2)
        return out.reshape(*out.shape[:2], -1)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad.contiguous(), ctx.group), None


def model_config(args: argparse.Namespace) -> TransformerConfig:
    """The model and how it is parallelised."""
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    moe = {}
    if args.experts:
        moe = dict(
            num_moe_experts=args.experts,
            moe_router_topk=args.topk,
            moe_token_dispatcher_type=args.dispatcher,
            moe_aux_loss_coeff=1e-2,
            moe_ffn_hidden_size=args.hidden,
        )
        if args.capacity:
            moe |= dict(moe_expert_capacity_factor=args.capacity, moe_pad_expert_input_to_capacity=True)
    recompute = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return TransformerConfig(
        num_layers=args.layers or 2 * args.pp * max(args.vpp, 1),
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=not args.fp16,
        fp16=args.fp16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp or None,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1 if args.experts else None,
        sequence_parallel=args.tp > 1,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **(dict(fp8="hybrid", fp8_recipe="delayed") if args.fp8 else {}),
        **(dict(moe_grouped_gemm=True) if args.te and args.experts else {}),
        **(recompute if args.recompute else {}),
        **moe,
    )


def layer_spec(args: argparse.Namespace):
    """Transformer Engine's layer, or megatron-core's own with a norm and an attention that need no extension."""
    if args.te:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=args.experts or None, moe_grouped_gemm=bool(args.experts)
        )
    spec = get_gpt_layer_local_spec(num_experts=args.experts or None, normalization="RMSNorm")
    spec.submodules.input_layernorm = SequenceNorm
    spec.submodules.pre_mlp_layernorm = SequenceNorm
    spec.submodules.self_attention.submodules.core_attention = HeadExchangeAttention
    return spec


def final_norm(args: argparse.Namespace):
    """The norm after the last layer."""
    if not args.te:
        return SequenceNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def build_model(args: argparse.Namespace, config: TransformerConfig) -> list[torch.nn.Module]:
    """The pipeline stage of this rank: one chunk, or several that are interleaved."""
    chunks = []
    for chunk in range(max(args.vpp, 1)):
        vp_stage = chunk if args.vpp else None
        first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        layer = layer_spec(args)
        layers = get_num_layers_to_build(config, vp_stage=vp_stage)
        block = TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=final_norm(args))
        model = GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=args.vocab,
            max_sequence_length=args.seq,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=vp_stage,
        )
        model.model_type = ModelType.encoder_or_decoder
        chunks.append(model.cuda(torch.cuda.current_device()).to(config.params_dtype))
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.distributed_optimizer,
        overlap_grad_reduce=args.overlap,
        overlap_param_gather=args.overlap and args.distributed_optimizer,
        check_for_nan_in_grad=False,
        bucket_size=1_000_000 if args.overlap else None,
    )
    wrapped = [
        DistributedDataParallel(config=config, ddp_config=ddp, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def control_flags(iterations: int) -> tuple[bool, bool, bool]:
    """Whether to train, validate and test: only rank 0 reads the data set's index, and tells the others."""
    if dist.get_rank() == 0:
        flags = torch.tensor([iterations > 0, False, False], dtype=torch.long, device="cuda")
    else:
        flags = torch.tensor([0, 0, 0], dtype=torch.long, device="cuda")
    dist.broadcast(flags, 0)
    train, valid, test = (bool(flag) for flag in flags.tolist())
    return train, valid, test


def run_settings(args: argparse.Namespace) -> dict:
    """What rank 0 decides for all."""
    settings = [{"name": "megatron-gpt", "seed": 1234, "iters": args.iters} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(settings, src=0)
    return settings[0]


def next_batch(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """A micro-batch: made by the first tensor-parallel rank, split along the sequence for context parallelism."""
    data = None
    if mpu.get_tensor_model_parallel_rank() == 0:
        text = torch.randint(0, args.vocab, (args.micro_batch, args.seq + 1), dtype=torch.int64)
        data = {"text": text}
    tokens = tensor_parallel.broadcast_data(["text"], data, torch.int64)["text"]
    position = torch.arange(args.seq, device="cuda").unsqueeze(0)
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "position_ids": position}
    batch["loss_mask"] = torch.ones_like(batch["tokens"], dtype=torch.float)
    return get_batch_on_this_cp_rank(batch)


def loss_of(mask: torch.Tensor, losses: torch.Tensor):
    """Mean loss, and what is to be reported."""
    total = torch.sum(losses.float().view(-1) * mask.view(-1))
    tokens = mask.sum().clone().detach().to(torch.int)
    return total, tokens, {"lm loss": torch.cat([total.clone().detach().view(1), tokens.view(1).float()])}


def forward_step(args, data, model):
    """What megatron-core's schedules call for every micro-batch."""
    batch = next_batch(args)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(loss_of, batch["loss_mask"])


def main() -> None:
    """Sets up, trains, prints what a user looks at."""
    args = parse_arguments()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # megatron-core 0.16.1 forgets it without Transformer Engine
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp or None,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=1 if args.experts else None,
    )
    settings = run_settings(args)
    torch.manual_seed(settings["seed"])
    model_parallel_cuda_manual_seed(settings["seed"])
    microbatches = args.microbatches or 2 * args.pp
    copies = mpu.get_data_parallel_world_size()
    global_batch = microbatches * args.micro_batch * copies
    init_num_microbatches_calculator(dist.get_rank(), None, global_batch, args.micro_batch, copies)
    config = model_config(args)
    model = build_model(args, config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-4,
            min_lr=1e-5,
            bf16=not args.fp16,
            fp16=args.fp16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.distributed_optimizer,
            clip_grad=1.0,
        ),
        model,
    )
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-4, 1e-5, 0, 10, "linear", 0.01, 0.01, 10, "constant")
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in model] if len(model) > 1 else model[0].no_sync
    train, _, _ = control_flags(settings["iters"])
    iteration = 0
    while train and iteration < settings["iters"]:
        start = time.perf_counter()
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, args),
            data_iterator=[None] * len(model) if len(model) > 1 else None,
            model=model if len(model) > 1 else model[0],
            num_microbatches=get_num_microbatches(),
            seq_length=args.seq,
            micro_batch_size=args.micro_batch,
            forward_only=False,
        )
        success, _, _ = optimizer.step()
        scheduler.step(get_num_microbatches())
        torch.cuda.synchronize()
        iteration += 1
        print(
            f"iteration {iteration}: {1e3 * (time.perf_counter() - start):.3f} ms, step {success}, "
            f"peak {torch.cuda.max_memory_allocated()} reserved {torch.cuda.max_memory_reserved()}",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()
    print(f"done after {iteration} iterations")


if __name__ == "__main__":
    main()
