"""Durations of PyTorch's memory-bound kernels: as long as the bytes of their tensors take, views included."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from prism_core import _native

pytestmark = [pytest.mark.torch, pytest.mark.slow]

ROWS, WIDTH, VOCABULARY = 8192, 4096, 50_000
#: Bytes of a matrix of 16-bit floats.
MATRIX = ROWS * WIDTH * 2
PROGRAM = f"""
    import torch
    import torch.nn.functional as F
    kind = dict(device="cuda", dtype=torch.bfloat16)
    matrix = torch.zeros({ROWS}, {WIDTH}, requires_grad=True, **kind)
    # Views into larger memory: what they are views of must not count.
    pool = torch.zeros(1 << 28, **kind)
    weight = pool[4096 : 4096 + {WIDTH}]
    table = pool[1 << 20 :][: {VOCABULARY} * {WIDTH}].view({VOCABULARY}, {WIDTH})
    tokens = torch.zeros({ROWS}, dtype=torch.long, device="cuda")

    F.layer_norm(matrix, ({WIDTH},), weight, weight).backward(torch.zeros({ROWS}, {WIDTH}, **kind))
    with torch.no_grad():
        torch.softmax(matrix, 1)
        matrix.sum(0)
        torch.cat([matrix, matrix], 1)
        F.embedding(tokens, table)
        F.dropout(matrix)
        matrix[tokens]
        torch._foreach_mul_([matrix[:4096], matrix[4096:], weight], 2.0)
    torch.cuda.synchronize()
"""
#: Part of a kernel's name, and the bytes it moves.
EXPECTED = {
    "vectorized_layer_norm_kernel": 2 * MATRIX,
    "layer_norm_grad_input_kernel": 3 * MATRIX,
    "SoftMaxForward": 2 * MATRIX,
    "sum_functor": MATRIX,
    "CatArrayBatchedCopy": 4 * MATRIX,
    "vectorized_gather_kernel|indexSelect": 2 * MATRIX,
    "dropout": 2.5 * MATRIX,
    "index_elementwise_kernel|gather_kernel": 2 * MATRIX,
    "multi_tensor_apply_kernel": 2 * MATRIX,
}
#: Bytes per second of the profile's memory.
PEAK = 3.35232e12


@pytest.fixture(scope="module")
def kernels(
    torch_program: list[str], prism: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[str, float, str]]:
    """Name, seconds and provenance of every launch."""
    del torch_program
    folder = tmp_path_factory.mktemp("bytes")
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    graph = folder / "job.prism"
    prism("collect", "--world-size", 1, "-o", graph, "--", sys.executable, program).document  # noqa: B018
    line = re.compile(r'compute (\d+) Kernel (\w+) "(.*)"')
    found = line.findall(_native.Graph.open(graph).to_text())
    return [(name, int(ps) / 1e12, provenance) for ps, provenance, name in found]


@pytest.mark.parametrize("part", EXPECTED)
def test_a_kernel_takes_as_long_as_its_bytes(part: str, kernels: list[tuple[str, float, str]]) -> None:
    """Not faster than the memory, and not slower than its slowest pattern."""
    launches = [(seconds, provenance) for name, seconds, provenance in kernels if re.search(part, name)]
    assert launches, f"no kernel is called {part}"
    seconds, provenance = max(launches)
    assert provenance == "Modelled"
    least = EXPECTED[part] / PEAK
    assert 0.85 * least < seconds < 1.5 * least + 6e-6, f"{seconds * 1e6:.1f} us for {EXPECTED[part]:.3g} B"


def test_no_kernel_is_a_guess(kernels: list[tuple[str, float, str]]) -> None:
    """Launch geometry alone decides no more than a twentieth of the time."""
    guessed = sum(seconds for _, seconds, provenance in kernels if provenance == "Default")
    assert guessed < 0.05 * sum(seconds for _, seconds, _ in kernels)
