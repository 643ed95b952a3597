"""A program with a mistake that one rank in thousands makes.

Under `prism` it needs no cluster to be found:

    prism collect --world-size 8192 --ranks 0,4097,8191 --verify 0 -o desync.prism -- python examples/desync.py
    prism diagnose desync.prism

Every rank sums its gradients over its node, then their norm over the job. In the third iteration rank 4097 has an empty
batch, takes a branch nobody tested, and reduces the norm first: the same collectives in another order, on one rank.
"""

import os

import torch
import torch.distributed as dist

PER_NODE, BAD_RANK = 8, 4097

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
node = dist.new_subgroups(PER_NODE)[0]

model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for iteration in range(3):
    batch = torch.randn(8, 1024, device="cuda")
    model(batch).sum().backward()
    norm = torch.linalg.vector_norm(model.weight.grad)
    if rank == BAD_RANK and iteration == 2:
        dist.all_reduce(norm)
        dist.all_reduce(model.weight.grad, group=node)
    else:
        dist.all_reduce(model.weight.grad, group=node)
        dist.all_reduce(norm)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
