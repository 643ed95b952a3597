"""Cost of one NCCL call in the shim, without synchronisation (goal: at most 150 ns median).

The calls are made by a plain C loop; the session owner behind the shim only copies the record, so the figure is the
shim's own share.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CALLS = 100_000
GOAL_NS = 150

#: One thread that never waits: its CPU time is what an idle machine needs.
pytestmark = pytest.mark.benchmark(timer=time.process_time)


def shim() -> Path:
    """The built library: ``PRISM_SHIM_DIR``, the installed package, or cargo's release folder."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    folders = [ROOT / "python/prism_core/_shim", target / "release"]
    if "PRISM_SHIM_DIR" in os.environ:
        folders = [Path(os.environ["PRISM_SHIM_DIR"])]
    for folder in folders:
        if (folder / "libprism_nccl.so").exists():
            return folder / "libprism_nccl.so"
    pytest.fail(f"libprism_nccl.so is in none of {', '.join(map(str, folders))}: build the shims first")


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The C loops, with a communicator of 8 ranks."""
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "libnccl.so.2").symlink_to(shim())
    library = folder / "libnccl_call.so"
    source = ROOT / "benches/nccl_call.c"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared"]
    link = [str(folder / "libnccl.so.2"), f"-Wl,-rpath,{folder}"]
    subprocess.run(["cc", *flags, str(source), "-o", str(library), *link], check=True)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    for name in ("bench_all_reduce", "bench_send_recv"):
        getattr(loaded, name).argtypes = [ctypes.c_long, ctypes.c_size_t]
    assert loaded.bench_setup(8, 0) == 0
    return loaded


def measure(benchmark: Any, loaded: ctypes.CDLL, loop: Callable[[int, int], int], count: int, records: int) -> None:
    """Checks that ``loop`` sends ``records`` records a turn, then times it against the goal per record."""
    sent = ctypes.c_uint.in_dll(loaded, "prism_test_num_records")
    before = sent.value
    assert loop(10, count) == 0
    assert sent.value - before == 10 * records
    benchmark.pedantic(loop, args=(CALLS, count), rounds=20, warmup_rounds=2)
    if benchmark.enabled:
        stats, scale = benchmark.stats.stats, 1e9 / CALLS / records
        benchmark.extra_info["ns_per_record"] = round(stats.median * scale, 1)
        # The first quartile: what the code costs also while other programs use the machine.
        assert stats.q1 * scale <= GOAL_NS


def test_all_reduce_of_a_gradient(benchmark: Any, loops: ctypes.CDLL) -> None:
    """A large payload, which is left alone."""
    measure(benchmark, loops, loops.bench_all_reduce, 32 << 20, records=1)


def test_all_reduce_of_a_flag(benchmark: Any, loops: ctypes.CDLL) -> None:
    """A small payload, which is mirrored."""
    measure(benchmark, loops, loops.bench_all_reduce, 1, records=1)


def test_group_of_send_and_receive(benchmark: Any, loops: ctypes.CDLL) -> None:
    """Four calls that send three records."""
    measure(benchmark, loops, loops.bench_send_recv, 1 << 20, records=3)
