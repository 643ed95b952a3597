"""Trains a stack of mixture-of-experts layers: `torchrun ... examples/moe/train.py --capacity 1.5`.

How tokens are spread over experts decides how much memory a rank needs. Without a GPU there are no logits; a rule says
how popular experts are (`skewed.toml`), and the rank of the popular one runs out of memory, or not.
"""

import argparse
import os

import torch
import torch.distributed as dist
from layer import Experts

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--tokens", type=int, default=163840, help="of a rank and step")
parser.add_argument("--hidden", type=int, default=4096)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--experts", type=int, default=4, help="one on each of so many neighbouring ranks")
parser.add_argument("--capacity", type=float, default=0.0)
arguments = parser.parse_args()

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
group = dist.new_subgroups(arguments.experts)[0]
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    layers = torch.nn.Sequential(
        *(Experts(arguments.hidden, group, arguments.capacity) for _ in range(arguments.layers))
    )
optimizer = torch.optim.AdamW(layers.parameters())
for _ in range(3):
    layers(torch.randn(arguments.tokens, arguments.hidden, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
dist.destroy_process_group()
