"""Transformer Engine's modules, as its users call them: `te_layers.py [--steps N]`.

Prints a line per module with the peak of the allocator. It knows nothing of `prism_core`.
"""

import argparse

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

HIDDEN, SEQUENCE, BATCH, HEADS = 1024, 512, 2, 16


class Attention(torch.nn.Module):
    """Causal attention over the halves of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(HIDDEN, 3 * HIDDEN)
        self.attention = te.DotProductAttention(HEADS, HIDDEN // HEADS, attention_dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(SEQUENCE, BATCH, HEADS, -1).contiguous() for part in self.qkv(x).chunk(3, dim=-1))
        return self.attention(q, k, v, attn_mask_type="causal")


class Experts(torch.nn.Module):
    """Four experts with a share of the rows each."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = te.GroupedLinear(4, HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, HIDDEN)
        return self.experts(rows, [rows.shape[0] // 4] * 4).view_as(x)


def modules() -> dict[str, torch.nn.Module]:
    """The modules by name."""
    return {
        "linear": te.Linear(HIDDEN, HIDDEN),
        "mlp": te.LayerNormMLP(HIDDEN, 4 * HIDDEN),
        "attention": Attention(),
        "grouped": Experts(),
    }


def train(module: torch.nn.Module, recipe: object, steps: int) -> None:
    """A few steps with one recipe; `None` is bfloat16 throughout."""
    optimizer = te.optimizers.FusedAdam(module.parameters(), lr=1e-4)
    for _ in range(steps):
        x = torch.randn(SEQUENCE, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            y = module(x)
        y.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Every module with every recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2)
    steps = parser.parse_args().steps
    torch.set_default_dtype(torch.bfloat16)
    recipes = {
        "bf16": None,
        "delayed": DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4, amax_compute_algo="max"),
        "current": Float8CurrentScaling(fp8_format=Format.HYBRID),
    }
    for name, module in modules().items():
        module.cuda()
        for scaling, recipe in recipes.items():
            torch.cuda.reset_peak_memory_stats()
            train(module, recipe, steps)
            torch.cuda.synchronize()
            print(f"{name} {scaling} peak {torch.cuda.max_memory_allocated()}", flush=True)
    print("done")


if __name__ == "__main__":
    main()
