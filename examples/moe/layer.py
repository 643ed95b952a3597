"""A mixture-of-experts layer, one expert per rank of the group; tokens travel in two all-to-alls."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F


class Router(nn.Linear):
    """Logits of every token for every expert."""


class Experts(nn.Module):
    """Sends every token to its expert and back.

    Args:
        hidden: Width of a token.
        group: The ranks that share the experts.
        capacity: An expert takes this many times its fair share of each rank's tokens, and drops the others; 0: all.
    """

    def __init__(self, hidden: int, group: dist.ProcessGroup, capacity: float) -> None:
        super().__init__()
        self.group, self.capacity, self.size = group, capacity, group.size()
        self.router = Router(hidden, self.size)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The same shape; dropped tokens pass by."""
        expert = self.router(tokens).argmax(-1)
        order, counts = expert.argsort(), torch.bincount(expert, minlength=self.size)
        if self.capacity:
            most = int(self.capacity * len(tokens) / self.size)
            place = torch.arange(len(tokens), device=tokens.device) - (counts.cumsum(0) - counts)[expert[order]]
            order, counts = order[place < most], counts.clamp(max=most)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = counts.tolist(), arriving.tolist()
        inside = all_to_all_single_autograd(tokens[order].contiguous(), received, sent, self.group)
        inside = self.down(F.gelu(self.up(inside)))
        back = all_to_all_single_autograd(inside, sent, received, self.group)
        return tokens.index_add(0, order, back)
