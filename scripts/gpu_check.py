"""The checks of `gpu_check.sh`. The parent holds the engine and judges; children run on the GPU under the preload."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHIMS = ROOT / "python" / "prism_core" / "_shim"
WORLD = 8
#: How far a collective's time by CUDA events may be from the engine's.
TOLERANCE = 0.01
#: Burns cycles in every thread, so that its duration tells how many multiprocessors it had.
BURN_PTX = b"""
.version 6.3
.target sm_70
.address_size 64
.visible .entry burn(.param .u64 out, .param .u32 rounds)
{
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .f32 %f<3>; .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out]; cvta.to.global.u64 %rd2, %rd1;
    ld.param.u32 %r1, [rounds];
    mov.u32 %r2, 0; mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f3F7FFFFF;
AGAIN:
    fma.rn.f32 %f1, %f1, %f2, %f2;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p1, %r2, %r1;
    @%p1 bra AGAIN;
    st.global.f32 [%rd2], %f1;
    ret;
}
\0"""


class Cuda:
    """The driver, by ctypes, with the first device's primary context."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name} answered {code}")

    def handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        value = ctypes.c_void_p()
        self.call(name, ctypes.byref(value), *arguments)
        return value

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    def elapsed_ms(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        value = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(value), start, end)
        return value.value


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_uint8 * 128)]


class SimInfo(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("time", ctypes.c_float),
    ]  # fmt: skip


def on_device() -> None:
    """In a child: the times of held streams by CUDA events, and of compute beside a held stream."""
    cuda, nccl = Cuda(), ctypes.CDLL("libnccl.so.2")
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
    nccl.ncclAllReduce.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    ]  # fmt: skip

    def check(code: int) -> None:
        if code != 0:
            raise RuntimeError(f"NCCL error {code}")

    identifier, comm = UniqueId(), ctypes.c_void_p()
    check(nccl.ncclGetUniqueId(ctypes.byref(identifier)))
    check(nccl.ncclCommInitRank(ctypes.byref(comm), WORLD, identifier, 0))
    stream, other = cuda.handle("cuStreamCreate", 1), cuda.handle("cuStreamCreate", 1)
    start, end = cuda.handle("cuEventCreate", 0), cuda.handle("cuEventCreate", 0)

    def all_reduce(count: int) -> None:
        check(nccl.ncclAllReduce(1 << 40, 1 << 40, count, 7, 0, comm, stream))

    for count in (25_000_000, 400_000_000):
        info = SimInfo(24, 0x74685283, 23007, 0.0)
        check(nccl.ncclGroupStart())
        all_reduce(count)
        check(nccl.ncclGroupSimulateEnd(ctypes.byref(info)))
        times = []
        for _ in range(30):
            cuda.call("cuEventRecord", start, stream)
            all_reduce(count)
            cuda.call("cuEventRecord", end, stream)
            cuda.call("cuStreamSynchronize", stream)
            times.append(cuda.elapsed_ms(start, end))
        median = sorted(times)[len(times) // 2]
        say("held stream", expected_us=info.time, measured_us=median * 1_000, error=abs(median * 1_000 / info.time - 1))
    burn_beside(cuda, other, (start, end), lambda: all_reduce(400_000_000), stream)


def burn_beside(
    cuda: Cuda,
    stream: ctypes.c_void_p,
    events: tuple[ctypes.c_void_p, ctypes.c_void_p],
    hold: Any,
    held: ctypes.c_void_p,
) -> None:
    """Compute that needs every multiprocessor, alone and beside a held stream."""
    module = cuda.handle("cuModuleLoadData", BURN_PTX)
    burn = cuda.handle("cuModuleGetFunction", module, b"burn")
    out = ctypes.c_uint64()
    cuda.call("cuMemAlloc_v2", ctypes.byref(out), 4)
    rounds = ctypes.c_uint32(200_000)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(out), ctypes.addressof(rounds))
    # 16: multiprocessors, 39: threads of one. One wave fills the card.
    blocks = cuda.attribute(16) * (cuda.attribute(39) // 1024)

    def burnt_ms() -> float:
        cuda.call("cuEventRecord", events[0], stream)
        cuda.call("cuLaunchKernel", burn, blocks, 1, 1, 1024, 1, 1, 0, stream, values, None)
        cuda.call("cuEventRecord", events[1], stream)
        cuda.call("cuStreamSynchronize", stream)
        return cuda.elapsed_ms(*events)

    alone = min(burnt_ms() for _ in range(5))
    hold()
    beside = burnt_ms()
    cuda.call("cuStreamSynchronize", held)
    say("compute beside a held stream", alone_ms=alone, beside_ms=beside, slow_down=beside / alone)


def say(check: str, **facts: Any) -> None:
    print(json.dumps({"check": check, **facts}), flush=True)


def preloaded(socket: str, world_size: int) -> dict[str, str]:
    """What a child of a session on the real device finds in its environment."""
    return {
        "PRISM_SESSION": socket,
        "PRISM_RANK": "0",
        "PRISM_WORLD_SIZE": str(world_size),
        "PRISM_DEVICE": "real",
        "LD_PRELOAD": f"{SHIMS / 'libprism_gpu.so'}:{SHIMS / 'libprism_nccl.so'}",
        "LD_AUDIT": str(SHIMS / "libprism_audit.so"),
    }


def held_streams() -> bool:
    """Runs the child with an engine, and judges what it and the engine say."""
    from prism_core import _native

    options = {"mode": "collect", "world_size": WORLD, "live": [0], "profile": _native.profile_toml("h100-sxm")}
    engine = _native.Session(json.dumps(options))
    with tempfile.TemporaryDirectory(prefix="prism-") as folder:
        environment = os.environ | preloaded(engine.listen(folder), WORLD)
        child = [sys.executable, __file__, "on-device"]
        done = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=120)
        (rank,) = json.loads(engine.finish())["ranks"]
    sys.stdout.write(done.stdout)
    if done.returncode != 0:
        say("held streams", result="failed", stderr=done.stderr[-2_000:])
        return False
    said = [json.loads(line) for line in done.stdout.splitlines()]
    errors = [facts["error"] for facts in said if facts["check"] == "held stream"]
    slow_down = next(facts["slow_down"] for facts in said if facts["check"] == "compute beside a held stream")
    good = len(errors) == 2 and max(errors) <= TOLERANCE and slow_down > 1.0
    say("held streams", result="passed" if good else "failed", release_errors_ns=rank["release_errors"])
    return good


def losses() -> None:
    """In a child: five steps of DDP in a world of one, which prints every loss as it is."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 16)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(64, 256, device="cuda")
    for _ in range(5):
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), flush=True)
    dist.destroy_process_group()


def same_loss() -> bool:
    """A world of one is the real NCCL's: its losses are those without us, to the bit."""
    from prism_core import _native
    from prism_core.real import real_nccl

    child = [sys.executable, __file__, "losses"]
    base = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    plain = subprocess.run(child, env=base, capture_output=True, text=True, timeout=120)
    options = {"mode": "collect", "world_size": 1, "live": [0], "profile": _native.profile_toml("h100-sxm")}
    engine = _native.Session(json.dumps(options))
    with tempfile.TemporaryDirectory(prefix="prism-") as folder:
        environment = base | preloaded(engine.listen(folder), 1) | {"PRISM_REAL_NCCL": real_nccl() or ""}
        ours = subprocess.run(child, env=environment, capture_output=True, text=True, timeout=120)
        engine.finish()
    good = plain.returncode == ours.returncode == 0 and plain.stdout == ours.stdout != ""
    result = "passed" if good else "failed"
    say("loss in a world of one", result=result, plain=plain.stdout.split(), ours=ours.stdout.split())
    if not good:
        sys.stderr.write(plain.stderr[-2_000:] + ours.stderr[-2_000:])
    return good


def training() -> bool:
    """DDP and FSDP as rank 0 of 8,192, and one rank's loss with and without us."""
    if importlib.util.find_spec("torch") is None:
        say("training", result="not run", reason="PyTorch is not installed")
        return True
    asked = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    if subprocess.run(asked, capture_output=True).returncode != 0:
        say("training", result="not run", reason="this PyTorch has no CUDA libraries (slim), or sees no GPU")
        return True
    prism, good = [sys.executable, "-m", "prism_core.cli"], same_loss()
    program = ["python", "examples/train_gpt.py", "--layers", "4", "--hidden", "512", "--heads", "8", "--seq", "512"]
    program += ["--batch", "4", "--iters", "4"]
    with tempfile.TemporaryDirectory(prefix="prism-") as folder:
        for mode in ("ddp", "fsdp2"):
            graph, run, argv = f"{folder}/{mode}.prism", f"{folder}/{mode}", [*program, "--mode", mode]
            commands = [
                [*prism, "collect", "--world-size", "8192", "--ranks", "0", "--verify", "0", "-o", graph, "--", *argv],
                [*prism, "emulate", graph, "--sandbox", "0", "--device", "real", "-o", run, "--json", "--", *argv],
            ]
            for command in commands:
                done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
                if done.returncode != 0:
                    break
            good = good and done.returncode == 0
            facts: dict[str, Any] = {"stderr": done.stderr[-2_000:]}
            with contextlib.suppress(ValueError, KeyError, IndexError):
                rank = json.loads(done.stdout)["ranks"][0]
                facts = {key: rank[key] for key in ("iteration_time_ns", "peak_allocated_bytes", "release_errors")}
            say(f"{mode} as rank 0 of 8192", result="passed" if done.returncode == 0 else "failed", **facts)
    return good


if __name__ == "__main__":
    if sys.argv[1:] == ["on-device"]:
        on_device()
    elif sys.argv[1:] == ["losses"]:
        losses()
    else:
        raise SystemExit(not all([held_streams(), training()]))
