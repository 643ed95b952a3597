"""Programs on a real device, by ctypes, with the driver of ``c/fake_cuda.c``; ``test_real_device.py`` runs them."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from typing import Any

FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_uint8 * 128)]


class SimInfo(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("time", ctypes.c_float),
    ]  # fmt: skip


nccl = ctypes.CDLL("libnccl.so.2")
nccl.ncclGetLastError.restype = ctypes.c_char_p
nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
nccl.ncclAllReduce.argtypes = [
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
]  # fmt: skip
nccl.ncclAlltoAll.argtypes = [
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
]  # fmt: skip
nccl.ncclCommDestroy.argtypes = nccl.ncclCommAbort.argtypes = [ctypes.c_void_p]
nccl.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
rank, world = int(os.environ["PRISM_RANK"]), int(os.environ["PRISM_WORLD_SIZE"])
is_real = os.environ["PRISM_DEVICE"] == "real"
cuda: Any = ctypes.CDLL("libcuda.so.1") if is_real else None
if is_real:
    cuda.fake_begin()
    cuda.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
    cuda.fake_work.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    cuda.fake_capture.argtypes = [ctypes.c_void_p, ctypes.c_int]


def check(code: int) -> None:
    if code != 0:
        sys.exit(f"NCCL error {code}: {nccl.ncclGetLastError(None).decode()}")


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def new_stream() -> ctypes.c_void_p:
    stream = ctypes.c_void_p()
    if is_real:
        cuda.cuStreamCreate(ctypes.byref(stream), 0)
    return stream


def new_comm(nranks: int) -> ctypes.c_void_p:
    identifier, comm = UniqueId(), ctypes.c_void_p()
    check(nccl.ncclGetUniqueId(ctypes.byref(identifier)))
    check(nccl.ncclCommInitRank(ctypes.byref(comm), nranks, identifier, rank))
    return comm


def all_reduce(comm: ctypes.c_void_p, stream: ctypes.c_void_p, count: int, send: Any = 64, recv: Any = 64) -> int:
    """Addresses that nobody looks at are enough where a message is too large to be mirrored."""
    return int(nccl.ncclAllReduce(send, recv, count, FLOAT32, SUM, comm, stream))


def estimated_ns(comm: ctypes.c_void_p, stream: ctypes.c_void_p, count: int) -> float:
    info = SimInfo(24, 0x74685283, 23007, 0.0)
    check(nccl.ncclGroupStart())
    check(all_reduce(comm, stream, count))
    check(nccl.ncclGroupSimulateEnd(ctypes.byref(info)))
    return float(info.time) * 1_000


def timed() -> None:
    """Work of 2 ms, then an all-reduce of the world, five times for each size."""
    comm, stream = new_comm(world), new_stream()
    for count in (25_000_000, 400_000_000):
        expected = estimated_ns(comm, stream, count)
        for _ in range(5):
            start = time.monotonic_ns()
            if is_real:
                cuda.fake_work(stream, 2_000_000)
            check(all_reduce(comm, stream, count))
            if is_real:
                cuda.cuStreamSynchronize(stream)
            say(count=count, expected_ns=expected, took_ns=time.monotonic_ns() - start - 2_000_000)
    check(nccl.ncclCommDestroy(comm))


def marked() -> None:
    """Two iterations of one all-reduce each, marked as the framework's hook does."""
    library = ctypes.CDLL(None)
    comm, stream = new_comm(world), new_stream()
    say(expected_ns=estimated_ns(comm, stream, 8_000_000))
    library.prism_marker(1, stream)
    for _ in range(2):
        cuda.fake_work(stream, 3_000_000)
        check(all_reduce(comm, stream, 8_000_000))
        library.prism_marker(2, stream)
    cuda.cuStreamSynchronize(stream)
    library.prism_memory_stats(ctypes.c_uint64(123_456), ctypes.c_uint64(234_567))
    check(nccl.ncclCommDestroy(comm))


def two_streams() -> None:
    """Operations of one communicator on two streams follow each other, and a group holds both of its streams."""
    comm, first, second = new_comm(world), new_stream(), new_stream()
    one = estimated_ns(comm, first, 100_000_000)
    start = time.monotonic_ns()
    cuda.fake_work(first, 20_000_000)
    check(all_reduce(comm, first, 100_000_000))
    check(all_reduce(comm, second, 100_000_000))
    cuda.cuStreamSynchronize(second)
    say(one_ns=one, took_ns=time.monotonic_ns() - start)
    start = time.monotonic_ns()
    cuda.fake_work(first, 20_000_000)
    check(nccl.ncclGroupStart())
    for stream in (first, second):
        check(all_reduce(comm, stream, 100_000_000))
    check(nccl.ncclGroupEnd())
    cuda.cuStreamSynchronize(second)
    say(one_ns=one, took_ns=time.monotonic_ns() - start)


def mirrored() -> None:
    """A small payload of virtual members is this rank's own, times the number of members; in place as well."""
    comm, stream = new_comm(world), new_stream()
    send, recv = (ctypes.c_float * 4)(1, 2, 3, 0.5), (ctypes.c_float * 4)()
    check(all_reduce(comm, stream, 4, ctypes.addressof(send), ctypes.addressof(recv)))
    check(all_reduce(comm, stream, 4, ctypes.addressof(send), ctypes.addressof(send)))
    cuda.cuStreamSynchronize(stream)
    say(recv=list(recv), send=list(send))


def captured() -> None:
    """A stream that is being captured cannot be held."""
    comm, stream = new_comm(world), new_stream()
    cuda.fake_capture(stream, 1)
    code = all_reduce(comm, stream, 8)
    say(code=code, text=nccl.ncclGetLastError(None).decode())
    cuda.fake_capture(stream, 0)


def aborted() -> None:
    """A watchdog's abort lets a held stream go on though the engine would hold it for hours."""
    comm, stream = new_comm(world), new_stream()
    check(all_reduce(comm, stream, 1 << 50))
    threading.Timer(0.2, lambda: check(nccl.ncclCommAbort(comm))).start()
    cuda.cuStreamSynchronize(stream)
    say(done=True)


def passed() -> None:
    """All members run: the real library's result, not a mirrored one."""
    comm, stream = new_comm(world), new_stream()
    real = ctypes.CDLL(os.environ["PRISM_REAL_NCCL"])
    send, recv = (ctypes.c_float * 3)(rank + 1, 10 * rank, 0.25), (ctypes.c_float * 3)()
    check(all_reduce(comm, stream, 3, ctypes.addressof(send), ctypes.addressof(recv)))
    check(nccl.ncclGroupStart())
    check(all_reduce(comm, stream, 3, ctypes.addressof(send), ctypes.addressof(send)))
    check(nccl.ncclGroupEnd())
    error = ctypes.c_int(-1)
    check(nccl.ncclCommGetAsyncError(comm, ctypes.byref(error)))
    cuda.cuStreamSynchronize(stream)
    say(
        recv=list(recv),
        send=list(send),
        calls=real.fake_nccl_calls(),
        groups=real.fake_nccl_groups(),
        error=error.value,
    )
    check(nccl.ncclCommDestroy(comm))
    say(live=real.fake_nccl_live(), holds=cuda.fake_holds())


def alone() -> None:
    """A communicator of one rank is the real library's too; an all-to-all consists of messages."""
    comm, stream = new_comm(1), new_stream()
    send, recv = (ctypes.c_float * 2)(4, 5), (ctypes.c_float * 2)()
    check(nccl.ncclAlltoAll(ctypes.addressof(send), ctypes.addressof(recv), 2, FLOAT32, comm, stream))
    say(recv=list(recv))


if __name__ == "__main__":
    {f.__name__: f for f in (timed, marked, two_streams, mirrored, captured, aborted, passed, alone)}[sys.argv[1]]()
