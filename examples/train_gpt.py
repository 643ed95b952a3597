"""Trains a small GPT on random tokens: a plain PyTorch program, one process per GPU.

    torchrun --nproc-per-node 8 examples/train_gpt.py --mode fsdp2 --layers 12 --hidden 1024 --iters 5

Modes: `ddp`, `fsdp2` (fully sharded), `hsdp` (sharded inside a node, replicated across nodes) and `pipeline` (1F1B over
`--stages` consecutive ranks, gradients averaged across replicas). Each rank prints the time of every iteration and its
peak memory.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """Attention and MLP with residuals."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        split = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, hidden // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The layers `first` to `last - 1` of a GPT, with the embedding and the head if it has the ends."""

    def __init__(self, args: argparse.Namespace, first: int, last: int) -> None:
        super().__init__()
        self.is_first, self.is_last = first == 0, last == args.layers
        if self.is_first:
            self.tokens = nn.Embedding(args.vocab, args.hidden)
            self.positions = nn.Parameter(torch.zeros(args.seq, args.hidden))
        self.blocks = nn.ModuleList(Block(args.hidden, args.heads) for _ in range(first, last))
        if self.is_last:
            self.norm = nn.LayerNorm(args.hidden)
            self.head = nn.Linear(args.hidden, args.vocab, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if self.is_first:
            x = self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        if not self.is_last or targets is None:
            return x
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Pipeline:
    """One stage of a 1F1B pipeline. Stages of a replica are consecutive ranks."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        if world % args.stages or args.layers < args.stages:
            raise SystemExit(f"--stages {args.stages} must divide {world} ranks and not exceed {args.layers} layers")
        self.args, self.device = args, device
        self.stage, replica = rank % args.stages, rank // args.stages
        for first in range(0, world, args.stages):
            group = dist.new_group(list(range(first, first + args.stages)))
            self.group = group if first // args.stages == replica else getattr(self, "group", None)
        for stage in range(args.stages):
            group = dist.new_group(list(range(stage, world, args.stages)))
            self.replicas = group if stage == self.stage else getattr(self, "replicas", None)
        bounds = [args.layers * stage // args.stages for stage in range(args.stages + 1)]
        self.model = GPT(args, bounds[self.stage], bounds[self.stage + 1]).to(device)
        self.previous = rank - 1 if self.stage > 0 else None
        self.next = rank + 1 if self.stage < args.stages - 1 else None
        self.waiting: list[tuple[torch.Tensor | None, torch.Tensor]] = []

    def exchange(
        self,
        *,
        forward: torch.Tensor | None = None,
        backward: torch.Tensor | None = None,
        want_forward: bool = False,
        want_backward: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """Sends to and receives from both neighbours in one go."""
        shape = (self.args.batch, self.args.seq, self.args.hidden)
        ops, received = [], []
        for send, peer in ((forward, self.next), (backward, self.previous)):
            if send is not None and peer is not None:
                ops.append(dist.P2POp(dist.isend, send.contiguous(), peer, self.group))
        for wanted, peer in ((want_forward, self.previous), (want_backward, self.next)):
            buffer = None
            if wanted and peer is not None:
                buffer = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
                ops.append(dist.P2POp(dist.irecv, buffer, peer, self.group))
            received.append(buffer)
        for request in dist.batch_isend_irecv(ops) if ops else []:
            request.wait()
        return tuple(received)

    def forward(self, x: torch.Tensor | None, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Runs the stage on one microbatch and keeps what its backward needs."""
        if x is not None:
            x.requires_grad_()
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            y = self.model(tokens if x is None else x, targets)
        y = y if self.next is None else y.to(torch.bfloat16)
        self.waiting.append((x, y))
        return y.detach()

    def backward(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Runs the backward of the oldest microbatch; gives the gradient of the stage's input."""
        x, y = self.waiting.pop(0)
        if self.next is None:
            (y / self.args.microbatches).backward()
        else:
            y.backward(gradient)
        return None if x is None else x.grad

    def run(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """One iteration: warm-up forwards, one forward and one backward in turn, cool-down backwards."""
        count = len(batches)
        warmup = min(self.args.stages - self.stage - 1, count)
        for index in range(warmup):
            (x, _) = self.exchange(want_forward=True)
            self.exchange(forward=self.forward(x, *batches[index]))
        (x, _) = self.exchange(want_forward=warmup < count)
        for index in range(warmup, count):
            y = self.forward(x, *batches[index])
            (_, gradient) = self.exchange(forward=y, want_backward=True)
            gradient = self.backward(gradient)
            (x, _) = self.exchange(backward=gradient, want_forward=index + 1 < count)
        for _ in range(warmup):
            (_, gradient) = self.exchange(want_backward=True)
            self.exchange(backward=self.backward(gradient))

    def reduce_and_clip(self) -> None:
        """Averages gradients over the replicas and clips them by the norm over all stages."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for work in [dist.all_reduce(g, group=self.replicas, async_op=True) for g in gradients]:
            work.wait()
        torch._foreach_div_(gradients, dist.get_world_size() // self.args.stages)
        squares = torch.stack([g.float().square().sum() for g in gradients]).sum()
        dist.all_reduce(squares, group=self.group)
        scale = (self.args.clip / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)


def shard(model: GPT, args: argparse.Namespace, device: torch.device) -> GPT:
    """FSDP2 over all ranks, or HSDP: sharded over the ranks of a node, replicated over nodes."""
    world = dist.get_world_size()
    if args.mode == "hsdp":
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        mesh = init_device_mesh(device.type, (world // per_node, per_node), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def data_parallel_iteration(model: nn.Module, args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """One iteration's forwards, backwards and clipping for the modes without a pipeline."""
    is_ddp = args.mode == "ddp"
    text = RandomText(args, dist.get_rank(), device)

    def run() -> None:
        for step in range(args.accumulate):
            is_last = step == args.accumulate - 1
            tokens, targets = text.batch()
            if not is_ddp:
                model.set_requires_gradient_sync(is_last)
            with nullcontext() if is_last or not is_ddp else model.no_sync():
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_ddp):
                    loss = model(tokens, targets)
                (loss / args.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)

    return run


def pipeline_iteration(pipeline: Pipeline, args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """One iteration's microbatches, gradient reduction and clipping for the pipeline."""
    text = RandomText(args, dist.get_rank() // args.stages, device)

    def run() -> None:
        for _ in range(args.accumulate):
            pipeline.run([text.batch() for _ in range(args.microbatches)])
        pipeline.reduce_and_clip()

    return run


class RandomText:
    """Batches of tokens and the tokens that follow them; every replica has its own text."""

    def __init__(self, args: argparse.Namespace, replica: int, device: torch.device) -> None:
        self.args, self.device = args, device
        self.generator = torch.Generator().manual_seed(replica)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.args.batch, self.args.seq + 1)
        text = torch.randint(0, self.args.vocab, shape, generator=self.generator)
        return text[:, :-1].to(self.device), text[:, 1:].to(self.device)


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Builds the model for the mode and trains it."""
    if args.mode == "pipeline":
        pipeline = Pipeline(args, device)
        model: nn.Module = pipeline.model
        iteration = pipeline_iteration(pipeline, args, device)
    else:
        gpt = GPT(args, 0, args.layers).to(device)
        model = DistributedDataParallel(gpt) if args.mode == "ddp" else shard(gpt, args, device)
        iteration = data_parallel_iteration(model, args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    is_cuda = device.type == "cuda"
    for index in range(args.iters):
        start = time.perf_counter()
        iteration()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if is_cuda:
            torch.cuda.synchronize()
        milliseconds = (time.perf_counter() - start) * 1e3
        peak = torch.cuda.max_memory_allocated() / 2**20 if is_cuda else 0.0
        print(f"iter {index}: {milliseconds:.3f} ms, peak {peak:.2f} MiB", flush=True)


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("ddp", "fsdp2", "hsdp", "pipeline"), default="ddp")
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "seq": 512, "batch": 4, "vocab": 32000, "iters": 3}
    sizes |= {"stages": 4, "microbatches": 8, "accumulate": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="bind the process group to the device at once")
    return parser.parse_args()


def main() -> None:
    """Joins the process group, trains, leaves."""
    args = parse_args()
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", "0")) if args.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=device if args.eager else None)
    torch.manual_seed(0)
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
