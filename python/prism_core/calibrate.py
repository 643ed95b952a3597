"""`prism calibrate compute`: a kernel table from a real GPU.

The script runs the matrix products, attention and memory-bound operators of a transformer of given sizes under
`torch.profiler` and reads the kernels' durations from the profile. It needs a GPU and PyTorch, nothing else of this
package's machinery: on a machine without the package, profile the training program itself and import the trace.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError
from prism_core.kernels import _write, collect_samples

#: Times every operator is run after the first, which is not counted.
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """A layer of a dense transformer on one GPU."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    tokens: int = 8192
    seq: int = 8192
    tp: int = 1


def products(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """m, n and k of the layer's matrix products: forward, and both gradients of each."""
    queries = sizes.heads * sizes.head_dim // sizes.tp
    keys = sizes.kv_heads * sizes.head_dim // sizes.tp
    forward = [
        (sizes.tokens, queries + 2 * keys, sizes.hidden),
        (sizes.tokens, sizes.hidden, queries),
        (sizes.tokens, 2 * sizes.ffn // sizes.tp, sizes.hidden),
        (sizes.tokens, sizes.hidden, sizes.ffn // sizes.tp),
        (sizes.tokens, sizes.vocab // sizes.tp, sizes.hidden),
    ]
    for m, n, k in forward:
        yield from ((m, n, k), (m, k, n), (n, k, m))


def calibrate_compute(output: Path, sizes: Sizes, dtypes: Sequence[str] = ("bf16",)) -> dict[str, Any]:
    """Measures a table on this machine's GPU; returns what `prism calibrate compute --json` prints."""
    torch = _real_torch()
    operators = list(_operators(torch, sizes, dtypes))
    for operator in operators:
        operator()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for operator in operators:
            for _ in range(REPEATS):
                operator()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="prism-") as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        samples = collect_samples([trace], torch.cuda.get_device_name())
    return _write(samples, output, "measured", f"prism calibrate compute, PyTorch {torch.__version__}")


def _real_torch() -> Any:
    if os.environ.get("PRISM_SESSION"):
        raise ConfigError("this process runs on the emulated device: measure a table on a real GPU")
    try:
        import torch
    except ImportError as error:
        raise ConfigError("PyTorch is not installed here") from error
    if not torch.cuda.is_available():
        raise ConfigError("there is no GPU here: measure a table where one is, or import traces (prism import)")
    return torch


def _operators(torch: Any, sizes: Sizes, dtypes: Sequence[str]) -> Iterator[Callable[[], Any]]:
    known = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for name in dtypes:
        if name not in known:
            raise ConfigError(f"type '{name}' is not measured: choose among {', '.join(known)}")
        dtype = known[name]
        for m, n, k in products(sizes):
            left = torch.randn(m, k, device="cuda", dtype=dtype)
            right = torch.randn(k, n, device="cuda", dtype=dtype)
            yield partial(torch.matmul, left, right)
        yield from _rest_of_layer(torch, sizes, dtype)


def _rest_of_layer(torch: Any, sizes: Sizes, dtype: Any) -> Iterator[Callable[[], Any]]:
    heads, sequences = sizes.heads // sizes.tp, max(1, sizes.tokens // sizes.seq)
    shape = (sequences, heads, sizes.seq, sizes.head_dim)
    query, key, value = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    functional = torch.nn.functional

    def attention() -> None:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    yield attention
    hidden = torch.randn(sizes.tokens, sizes.hidden, device="cuda", dtype=dtype)
    wide = torch.randn(sizes.tokens, sizes.ffn // sizes.tp, device="cuda", dtype=dtype)
    weight = torch.ones(sizes.hidden, device="cuda", dtype=dtype)
    yield lambda: hidden + hidden
    yield lambda: hidden.float()
    yield lambda: functional.silu(wide) * wide
    yield lambda: functional.layer_norm(hidden, (sizes.hidden,), weight, weight)
    yield lambda: functional.rms_norm(hidden, (sizes.hidden,), weight)
    yield lambda: functional.gelu(wide)
    yield lambda: functional.softmax(hidden, -1)
