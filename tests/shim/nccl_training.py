"""A training program without CUDA: numpy computes, NCCL (by its C ABI, through cffi) communicates.

A two-layer network; the ranks of a row (eight, or fewer) hold a shard of the first layer each, rows are replicas: every
step has an all-gather and reduce-scatters in the row, an all-reduce over the column, a message around the world, a
broadcast, and an all-to-all, and branches on a value that was reduced. Ranks come from the environment, as under
torchrun. At the end it prints a digest of what it has learnt. With ``FOLDER LIMIT`` it makes sure that never more than
so many ranks compute at a time.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cffi
import numpy as np

RANK, RANKS = int(os.environ["PRISM_RANK"]), int(os.environ["PRISM_WORLD_SIZE"])
WIDTH, HIDDEN, BATCH = 12, 64, 16
FLOAT, DOUBLE, SUM, MAX, AVG = 7, 8, 0, 2, 4

ffi = cffi.FFI()
ffi.cdef(
    "typedef struct { char internal[128]; } ncclUniqueId; typedef void *comm;"
    "int ncclCommInitRank(comm *, int, ncclUniqueId, int); int ncclCommSplit(comm, int, int, comm *, void *);"
    "int ncclCommDestroy(comm); int ncclGroupStart(void); int ncclGroupEnd(void);"
    "int ncclAllReduce(const void *, void *, size_t, int, int, comm, void *);"
    "int ncclReduceScatter(const void *, void *, size_t, int, int, comm, void *);"
    "int ncclAllGather(const void *, void *, size_t, int, comm, void *);"
    "int ncclAlltoAll(const void *, void *, size_t, int, comm, void *);"
    "int ncclBroadcast(const void *, void *, size_t, int, int, comm, void *);"
    "int ncclSend(const void *, size_t, int, int, comm, void *); int ncclRecv(void *, size_t, int, int, comm, void *);"
)
nccl: Any = ffi.dlopen(os.environ.get("NCCL_UNDER_TEST", "libnccl.so.2"))


def ok(code: int) -> None:
    assert code == 0, f"NCCL says {code}"


def at(array: np.ndarray) -> Any:
    return ffi.cast("void *", array.ctypes.data)


@contextmanager
def computing() -> Iterator[None]:
    """While this rank computes: its mark lies in the folder, beside those of others that compute."""
    if len(sys.argv) < 4:
        yield
        return
    mark = Path(sys.argv[2]) / str(RANK)
    mark.touch()
    running = sum(1 for _ in mark.parent.iterdir())
    assert running <= int(sys.argv[3]), f"{running} ranks run at a time"
    yield
    mark.unlink()


def train(steps: int) -> np.ndarray:
    """The parameters after so many steps."""
    identifier = ffi.new("ncclUniqueId *")
    ffi.memmove(identifier.internal, bytes([42]) * 128, 128)
    world, row, column = ffi.new("comm *"), ffi.new("comm *"), ffi.new("comm *")
    ok(nccl.ncclCommInitRank(world, RANKS, identifier[0], RANK))
    shards = min(8, RANKS)
    ok(nccl.ncclCommSplit(world[0], RANK // shards, RANK, row, ffi.NULL))
    ok(nccl.ncclCommSplit(world[0], RANK % shards, RANK, column, ffi.NULL))
    random = np.random.default_rng(RANK // shards)
    teacher = np.random.default_rng(7).normal(size=(WIDTH, 1)).astype(np.float32)
    # Everybody begins with what rank 0 draws.
    start = np.random.default_rng(RANK).normal(0, 0.3, WIDTH * HIDDEN + HIDDEN).astype(np.float32)
    ok(nccl.ncclBroadcast(at(start), at(start), start.size, FLOAT, 0, world[0], ffi.NULL))
    own = WIDTH * HIDDEN // shards
    place = RANK % shards
    shard, last = start[place * own : (place + 1) * own].copy(), start[WIDTH * HIDDEN :].reshape(HIDDEN, 1).copy()
    rate = np.float32(0.05)
    for _ in range(steps):
        first = np.zeros(own * shards, np.float32)
        ok(nccl.ncclAllGather(at(shard), at(first), own, FLOAT, row[0], ffi.NULL))
        with computing():
            layer = first.reshape(WIDTH, HIDDEN)
            inputs = random.normal(size=(BATCH, WIDTH)).astype(np.float32)
            hidden = np.maximum(inputs @ layer, 0)
            error = hidden @ last - np.sin(inputs @ teacher)
            last_gradient = hidden.T @ error / BATCH
            gradient = np.ascontiguousarray(inputs.T @ ((error @ last.T) * (hidden > 0)) / BATCH, np.float32)
        mine = np.zeros(own, np.float32)
        ok(nccl.ncclReduceScatter(at(gradient), at(mine), own, FLOAT, AVG, row[0], ffi.NULL))
        ok(nccl.ncclGroupStart())
        ok(nccl.ncclAllReduce(at(mine), at(mine), own, FLOAT, AVG, column[0], ffi.NULL))
        ok(nccl.ncclAllReduce(at(last_gradient), at(last_gradient), HIDDEN, FLOAT, AVG, world[0], ffi.NULL))
        ok(nccl.ncclGroupEnd())
        # A control value: all ranks take the same branch.
        loss = np.array([float(np.mean(error**2))])
        ok(nccl.ncclAllReduce(at(loss), at(loss), 1, DOUBLE, MAX, world[0], ffi.NULL))
        rate = np.float32(rate * 0.9) if loss[0] > 3 else rate
        shard -= rate * mine
        last -= rate * last_gradient
        # Around the world: a little of the neighbour's.
        given, got = shard[:4].copy(), np.zeros(4, np.float32)
        ok(nccl.ncclGroupStart())
        ok(nccl.ncclSend(at(given), 4, FLOAT, (RANK + 1) % RANKS, world[0], ffi.NULL))
        ok(nccl.ncclRecv(at(got), 4, FLOAT, (RANK - 1) % RANKS, world[0], ffi.NULL))
        ok(nccl.ncclGroupEnd())
        shard[:4] += np.float32(0.001) * got
        pieces, swapped = shard[:shards].copy(), np.zeros(shards, np.float32)
        ok(nccl.ncclAlltoAll(at(pieces), at(swapped), 1, FLOAT, row[0], ffi.NULL))
        shard[:shards] = 0.999 * shard[:shards] + np.float32(0.001) * swapped
    for one in (row, column, world):
        ok(nccl.ncclCommDestroy(one[0]))
    return np.concatenate([shard, last.ravel()])


if __name__ == "__main__":
    learnt = train(int(sys.argv[1]))
    assert np.isfinite(learnt).all() and learnt.std() > 0
    print("parameters", RANK, hashlib.sha256(learnt.tobytes()).hexdigest())
    print("done")
