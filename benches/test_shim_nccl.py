"""Cost of one NCCL call in the shim, without synchronisation (goal: at most 150 ns median).

The calls are made by a plain C loop; the session owner behind the shim only copies the record, so the figure is the
shim's own share.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CALLS = 100_000
GOAL_NS = 150
GOAL_SYNCHRONOUS_US = 15

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
    for name in ("bench_all_reduce", "bench_send_recv", "bench_sends", "bench_threads"):
        getattr(loaded, name).argtypes = [ctypes.c_long, ctypes.c_size_t]
    loaded.bench_function.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_size_t]
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


#: By their number in nccl_call.c; the last three send nothing.
FUNCTIONS = [
    "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "send", "receive",
    "get-async-error", "count", "empty group",
]  # fmt: skip
NUM_SILENT = 3


@pytest.mark.parametrize("function", FUNCTIONS)
def test_function(benchmark: Any, loops: ctypes.CDLL, function: str) -> None:
    """Every function a training program calls often."""
    which = FUNCTIONS.index(function)
    is_silent = which >= len(FUNCTIONS) - NUM_SILENT

    def loop(calls: int, count: int) -> int:
        return int(loops.bench_function(which, calls, count))

    if not is_silent:
        measure(benchmark, loops, loop, 32 << 20, records=1)
        return
    assert loop(10, 0) == 0
    benchmark.pedantic(loop, args=(CALLS, 0), rounds=20, warmup_rounds=2)
    if benchmark.enabled:
        benchmark.extra_info["ns_per_call"] = round(benchmark.stats.stats.median * 1e9 / CALLS, 1)
        assert benchmark.stats.stats.q1 * 1e9 / CALLS <= GOAL_NS


def test_group_of_64_sends(benchmark: Any, loops: ctypes.CDLL) -> None:
    """The goal is per send; the end of the group is one more record."""
    sent = ctypes.c_uint.in_dll(loops, "prism_test_num_records")
    before, groups = sent.value, CALLS // 64
    assert loops.bench_sends(10, 1 << 20) == 0
    assert sent.value - before == 650
    benchmark.pedantic(loops.bench_sends, args=(groups, 1 << 20), rounds=20, warmup_rounds=2)
    if benchmark.enabled:
        per_send = benchmark.stats.stats.q1 * 1e9 / groups / 64
        benchmark.extra_info["ns_per_send"] = round(per_send, 1)
        assert per_send <= GOAL_NS


def test_eight_threads_with_eight_communicators(benchmark: Any, loops: ctypes.CDLL) -> None:
    """CPU time of a call while eight threads call; the session owner of this benchmark has one counter for all."""
    sent = ctypes.c_uint.in_dll(loops, "prism_test_num_records")
    before, calls = sent.value, CALLS // 8
    assert loops.bench_threads(10, 32 << 20) == 0
    assert sent.value - before == 80
    benchmark.pedantic(loops.bench_threads, args=(calls, 32 << 20), rounds=20, warmup_rounds=2)
    if benchmark.enabled:
        per_call = benchmark.stats.stats.q1 * 1e9 / calls / 8
        benchmark.extra_info["cpu_ns_per_call"] = round(per_call, 1)
        assert per_call <= GOAL_NS


HOST_PROGRAM = """
import ctypes, re, sys

def pss_kib():
    return int(re.search(r"Pss: +(\\d+)", open("/proc/self/smaps_rollup").read())[1])

class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_uint8 * 128)]

address = ctypes.c_void_p
id, comms, many = UniqueId(), [], int(sys.argv[2])
before = pss_kib()
nccl = ctypes.CDLL(sys.argv[1])
nccl.ncclCommInitRank.argtypes = [address, ctypes.c_int, UniqueId, ctypes.c_int]
nccl.ncclAllReduce.argtypes = [address, address, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, address, address]
assert nccl.ncclGetUniqueId(ctypes.byref(id)) == 0

def make():
    comm = address()
    assert nccl.ncclCommInitRank(ctypes.byref(comm), 8192, id, 0) == 0
    comms.append(comm)

make()
value = ctypes.c_float(1)
def call():
    assert nccl.ncclAllReduce(ctypes.byref(value), ctypes.byref(value), 1, 7, 2, comms[0], None) == 0
for _ in range(100):
    call()
one = pss_kib()
for _ in range(many):
    make()
all = pss_kib()
loop = ctypes.CDLL(sys.argv[3]).bench_synchronous
figures = (ctypes.c_double * 4)()
assert loop(comms[0], 10_000, figures) == 0
print(one - before, (all - one) / many, *figures)
"""


def test_memory_and_synchronous_call(benchmark: Any, tmp_path: Path) -> None:
    """Host device, communicators of 8,192 ranks: memory of the library (goals: 4 MiB, and 64 KiB a communicator).

    And a call that returns when it is done, in a C loop: wall time (goal on free cores: 15 us) beside the CPU time that
    program and engine spend on it, which other programs on the machine do not change much.
    """
    native = pytest.importorskip("prism_core._native")
    many = 200
    (tmp_path / "libnccl.so.2").symlink_to(shim())
    loop = tmp_path / "libloop.so"
    source = ROOT / "benches/nccl_synchronous.c"
    link = [str(tmp_path / "libnccl.so.2"), f"-Wl,-rpath,{tmp_path}"]
    subprocess.run(["cc", "-O2", "-fPIC", "-shared", str(source), "-o", str(loop), *link], check=True)

    def run() -> list[float]:
        options = {"mode": "collect", "world_size": 8192, "live": [0], "profile": native.profile_toml("h100-sxm")}
        session = native.Session(json.dumps(options))
        with tempfile.TemporaryDirectory(prefix="prism-") as folder:
            variables = {
                "PRISM_SESSION": session.listen(str(Path(folder) / "s")),
                "PRISM_RANK": "0",
                "PRISM_WORLD_SIZE": "8192",
                "PRISM_DEVICE": "host",
            }
            command = [sys.executable, "-c", HOST_PROGRAM, str(tmp_path / "libnccl.so.2"), str(many), str(loop)]
            before = time.process_time()
            output = subprocess.run(command, env=os.environ | variables, check=True, capture_output=True, text=True)
            engine_s = time.process_time() - before
            session.finish()
        return [*(float(number) for number in output.stdout.split()), engine_s]

    process_kib, comm_kib, fast_us, median_us, slow_us, program_us, engine_s = benchmark.pedantic(run, rounds=1)
    assert process_kib <= 4096 and comm_kib <= 64
    if benchmark.enabled:
        # As for the other calls: what it takes also while other programs use the machine.
        assert fast_us <= GOAL_SYNCHRONOUS_US
    benchmark.extra_info |= {
        "process_kib": process_kib, "communicator_kib": round(comm_kib, 2),
        "synchronous_call_us": {"first_quartile": fast_us, "median": median_us, "ninth_decile": slow_us},
        "program_cpu_us": program_us, "engine_cpu_us_at_most": round(engine_s * 1e6 / 10_000, 2),
    }  # fmt: skip
