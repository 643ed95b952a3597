"""CPU time of the host per step of a model as deep as Llama 3 405B: 128 layers, forward, backward, AdamW, all eager.

`.venv/bin/python benches/step_host.py` collects one rank of eight and prints what the program measured of itself:
`time.process_time` of all its threads, PyTorch's own work included. The width is a tensor-parallel slice's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS, WIDTH, WIDE, HEADS, TOKENS, STEPS = 128, 2048, 6656, 16, 1024, 5


def train() -> None:
    """The program: what PyTorch alone would run."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
            shapes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * WIDE), (WIDE, WIDTH)]
            self.linears = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            into, out, up, down = self.linears
            shape = (1, TOKENS, 3, HEADS, WIDTH // HEADS)
            query, key, value = into(self.norms[0](data)).view(shape).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            mixed = out(seen.transpose(1, 2).reshape(data.shape))
            dist.all_reduce(mixed.detach())
            data = data + mixed
            gate, wide = up(self.norms[1](data)).chunk(2, -1)
            more = down(functional.silu(gate) * wide)
            dist.all_reduce(more.detach())
            return data + more

    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.zeros(1, TOKENS, WIDTH, device="cuda")
    for step in range(STEPS):
        start = time.process_time()
        model(data).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        print(f"step {step}: {time.process_time() - start:.3f} s of CPU time", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Collects the program and shows its output."""
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "job.prism"
        program = [sys.executable, __file__]
        command = [
            sys.executable,
            "-m",
            "prism_core.cli",
            "collect",
            "--world-size",
            "8",
            "--ranks",
            "0",
            "--verify",
            "0",
        ]
        subprocess.run([*command, "-o", str(graph), "--", *program], check=True)
        lines = (graph.with_suffix(".logs") / "rank-0.log").read_text().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == STEPS, lines[-5:]
    print("\n".join(steps))


if __name__ == "__main__":
    train() if os.environ.get("PRISM_SESSION") else main()
