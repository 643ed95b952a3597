"""Runs Megatron-LM's `pretrain_gpt.py` and prints what it writes for TensorBoard: `runner.py [--apex] SCRIPT ARGS`.

With `--apex` modules by the names of Apex's extensions are there. They allocate the same tensors as the real ones and
compute nothing of value, as no kernel is run in an emulation anyway.
"""

from __future__ import annotations

import runpy
import sys
from types import ModuleType
from typing import Any

import torch


class PrintingWriter:
    """Stands for TensorBoard's writer."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def add_scalar(self, name: str, value: Any, step: int, *_: Any, **__: Any) -> None:
        """Prints the memory figures."""
        if name.startswith("mem-"):
            print(f"scalar {name} {step} {value}", flush=True)

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


def module(name: str, **members: Any) -> None:
    """Makes a module importable."""
    made = ModuleType(name)
    made.__dict__.update(members)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, made)


class FusedAdam(torch.optim.Optimizer):
    """Apex's Adam: an overflow flag, and two float32 states per parameter."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, **more: Any
    ) -> None:
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": more.get("weight_decay", 0.0)})
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int32, device="cuda")

    @torch.no_grad()
    def step(self, closure: Any = None, *_: Any, **__: Any) -> None:
        """Makes the states and touches the parameters."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            updated = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter.data, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data, dtype=torch.float32)
                updated.append(parameter)
            if updated:
                torch._foreach_mul_(updated, 1.0)


class MultiTensorApply:
    """Apex's way to call a kernel on lists of tensors."""

    available = True

    def __init__(self, chunk_size: int = 2048 * 32) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop: Any, lists: Any, *args: Any) -> Any:
        return op(self.chunk_size, noop, lists, *args)


def l2norm(_chunk: int, _noop: Any, lists: Any, per_tensor: bool = False) -> tuple[Any, Any]:
    """The norm of all tensors: one block of partial sums, one result."""
    device = lists[0][0].device
    partial = torch.zeros(320, dtype=torch.float32, device=device)
    norms = torch.empty(len(lists[0]) if per_tensor else 0, dtype=torch.float32, device=device)
    result = torch.empty(1, dtype=torch.float32, device=device)
    del partial
    return result, norms


def scale(_chunk: int, _noop: Any, lists: Any, _factor: float) -> None:
    """Scales in place, or from one list to the other."""
    torch._foreach_copy_(lists[1], lists[0])


class LayerNorm(torch.autograd.Function):
    """Apex's layer norm with an affine part: output, mean and inverse deviation; partial sums in backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, shape: Any, eps: float, *_: Any) -> Any:
        rows = x.numel() // weight.numel()
        x = x.contiguous()
        mean, deviation = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        out = torch.empty_like(x)
        out.copy_(x)
        ctx.save_for_backward(x, weight, bias, mean, deviation)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, bias, _mean, _deviation = ctx.saved_tensors
        grad = grad.contiguous()
        parts = [torch.empty(16, weight.numel(), dtype=torch.float32, device=x.device) for _ in range(2)]
        grads = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
        grads[0].copy_(grad)
        del parts
        return *grads, None, None, None


def softmax_forward(x: Any, *_: Any) -> Any:
    """A result as large as the input."""
    return torch.empty_like(x).copy_(x)


def softmax_backward(grad: Any, result: Any, *_: Any) -> Any:
    """Apex writes into the gradient it is given."""
    return grad.mul_(result)


def batch_per_block(_sq: int, sk: int, *_: Any) -> int:
    """As in Apex's scaled_masked_softmax.h: warps of a block times rows of a warp."""
    power = 1 << (sk - 1).bit_length()
    return 128 // min(power, 32) * (2 if power <= 128 else 1)


def accumulate(_inputs: Any, _gradient: Any, main: Any) -> None:
    """Apex adds a weight's gradient to its sum without a tensor between."""
    main.mul_(1.0)


def install_gradient_accumulation() -> None:
    """Apex's module that Megatron's own linear layers call, beside Transformer Engine too."""
    module("fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)


def install_apex() -> None:
    """Makes modules by the names of Apex's importable."""
    for name in ("apex", "apex.contrib", "apex.contrib.layer_norm"):
        module(name, __path__=[])
    module("apex.optimizers", FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD)
    module("apex.multi_tensor_apply", multi_tensor_applier=MultiTensorApply())
    module("apex.normalization", __path__=[])
    module("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=LayerNorm)
    module("amp_C", multi_tensor_l2norm=l2norm, multi_tensor_scale=scale)
    softmax = {"forward": softmax_forward, "backward": softmax_backward, "get_batch_per_block": batch_per_block}
    for name in ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"):
        module(name, **softmax)


def keep_norms_healthy() -> None:
    """Gradients are noise, and so is the square of their norm: a negative one has no root. All is computed as ever."""
    from megatron.core.optimizer import clip_grads, optimizer

    original = clip_grads.get_grad_norm_fp32

    def norm(*args: Any, **kwargs: Any) -> float:
        original(*args, **kwargs)
        return 1.0

    clip_grads.get_grad_norm_fp32 = optimizer.get_grad_norm_fp32 = norm


def main() -> None:
    """Prepares and runs the script."""
    words = sys.argv[1:]
    module("torch.utils.tensorboard", SummaryWriter=PrintingWriter)
    install_gradient_accumulation()
    if words[0] == "--apex":
        install_apex()
        words = words[1:]
    folder = words[0].rpartition("/")[0]
    sys.path.insert(0, folder)
    keep_norms_healthy()
    from megatron.core.datasets import helpers_cpp, utils
    from megatron.legacy import fused_kernels

    # These would be compiled for the machine's GPU, and there is none.
    fused_kernels.load = lambda args: None
    assert helpers_cpp, "it is there, so it need not be compiled"
    utils.compile_helpers = lambda: None
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
