"""Communicators that come and go, as programs of ``nccl_host.py``: splits, growth, non-blocking ones, aborts."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from nccl_binding import (
    ARGUMENT,
    IN_PROGRESS,
    REMOTE,
    SUCCESS,
    USAGE,
    UniqueId,
    address,
    check,
    config,
    fact,
    init,
    nccl,
    ok,
    other_id,
    pointer,
    split,
    unique_id,
)
from nccl_values import F32, INT32, INT64, SUM


def case_split(rank: int, n: int, identifier: UniqueId) -> None:
    """Colours, keys and none; the children communicate."""
    comm = init(n, identifier, rank)
    half = n // 2
    child = split(comm, rank // half, -rank)
    assert fact(nccl.ncclCommUserRank, child) == half - 1 - rank % half
    assert fact(nccl.ncclCommCount, child) == half
    value = np.array([rank], np.int64)
    ok(nccl.ncclAllReduce(pointer(value), pointer(value), 1, INT64, SUM, child, None))
    check(value, np.array([sum(r for r in range(n) if r // half == rank // half)], np.int64), "half")
    last = split(comm, -1 if rank == n - 1 else 0, 0)
    assert (last.value is None) == (rank == n - 1)
    if last.value is not None:
        assert (fact(nccl.ncclCommCount, last), fact(nccl.ncclCommUserRank, last)) == (n - 1, rank)
        gathered, mine = np.zeros(n - 1, np.int32), np.array([rank], np.int32)
        ok(nccl.ncclAllGather(pointer(mine), pointer(gathered), 1, INT32, last, None))
        check(gathered, np.arange(n - 1, dtype=np.int32), "without the last")
        ok(nccl.ncclCommDestroy(last))
    bad = split(comm, ctypes.c_int(3_000_000_000).value, 0, ARGUMENT)
    assert bad.value is None
    alone = split(comm, rank, 0)
    assert fact(nccl.ncclCommCount, alone) == 1
    for each in (alone, child, comm):
        ok(nccl.ncclCommDestroy(each))


def poll(comm: Any) -> int:
    """Waits until the communicator is no longer in progress."""
    while (state := fact(nccl.ncclCommGetAsyncError, comm)) == IN_PROGRESS:
        time.sleep(0.002)
    return state


def case_non_blocking(rank: int, n: int, identifier: UniqueId) -> None:
    comm, wanted = address(), config(blocking=0)
    value = np.array([rank + 1], np.int64)
    if rank == 0:
        time.sleep(0.3)
    ok(nccl.ncclCommInitRankConfig(ctypes.byref(comm), n, identifier, rank, ctypes.byref(wanted)), IN_PROGRESS)
    assert comm.value is not None
    ok(nccl.ncclAllReduce(pointer(value), pointer(value), 1, INT64, SUM, comm, None), ARGUMENT)
    assert poll(comm) == SUCCESS
    ok(nccl.ncclAllReduce(pointer(value), pointer(value), 1, INT64, SUM, comm, None), IN_PROGRESS)
    assert poll(comm) == SUCCESS
    check(value, np.array([n * (n + 1) // 2], np.int64), "non-blocking all-reduce")
    if rank == 0:
        time.sleep(0.3)
    child = address(1)
    ok(nccl.ncclCommSplit(comm, rank // (n // 2), -rank, ctypes.byref(child), None), IN_PROGRESS)
    ok(nccl.ncclAllReduce(pointer(value), pointer(value), 1, INT64, SUM, comm, None), ARGUMENT)
    assert rank == 0 or child.value is None
    assert poll(comm) == SUCCESS
    assert child.value is not None and fact(nccl.ncclCommCount, child) == n // 2
    assert fact(nccl.ncclCommUserRank, child) == n // 2 - 1 - rank % (n // 2)
    ok(nccl.ncclCommFinalize(comm), IN_PROGRESS)
    assert poll(comm) == SUCCESS
    ok(nccl.ncclCommDestroy(child))
    ok(nccl.ncclCommDestroy(comm))
    # Both kinds in one group are refused.
    one, two = init(n, other_id(identifier, 1), rank), address()
    other = other_id(identifier, 2)
    ok(nccl.ncclCommInitRankConfig(ctypes.byref(two), n, other, rank, ctypes.byref(wanted)), IN_PROGRESS)
    assert poll(two) == SUCCESS
    ok(nccl.ncclGroupStart())
    ok(nccl.ncclAllReduce(pointer(value), pointer(value), 1, INT64, SUM, one, None))
    ok(nccl.ncclAllReduce(pointer(value), pointer(value), 1, INT64, SUM, two, None), ARGUMENT)
    ok(nccl.ncclGroupEnd(), ARGUMENT)
    for each in (one, two):
        ok(nccl.ncclCommDestroy(each))


def case_membership(rank: int, n: int, identifier: UniqueId) -> None:
    """Four ranks; the last is lost, the others go on without it, and a new one joins in its place."""
    assert n == 4
    if rank == 3:
        comm = init(n, identifier, rank)
        ok(nccl.ncclCommAbort(comm))
        folder = Path(sys.argv[5])
        while not (folder / "id").exists():
            time.sleep(0.005)
        grown, joining = address(), unique_id((folder / "id").read_text())
        ok(nccl.ncclCommGrow(None, 4, ctypes.byref(joining), 3, ctypes.byref(grown), None))
    else:
        comm = init(n, identifier, rank)
        value = np.array([1], np.int64)
        code = nccl.ncclAllReduce(pointer(value), pointer(value), 1, INT64, SUM, comm, None)
        ok(code, REMOTE)
        assert fact(nccl.ncclCommGetAsyncError, comm) == REMOTE
        small, excluded = address(), np.array([3], np.int32)
        ok(nccl.ncclCommShrink(comm, pointer(excluded), 1, ctypes.byref(small), None, 0), REMOTE)
        ok(nccl.ncclCommShrink(comm, pointer(excluded), 1, ctypes.byref(small), None, 1))
        assert (fact(nccl.ncclCommCount, small), fact(nccl.ncclCommUserRank, small)) == (3, rank)
        value = np.array([10**rank], np.int64)
        ok(nccl.ncclAllReduce(pointer(value), pointer(value), 1, INT64, SUM, small, None))
        check(value, np.array([111], np.int64), "after the shrink")
        made = UniqueId()
        if rank == 0:
            ok(nccl.ncclCommGetUniqueId(small, ctypes.byref(made)))
            ok(nccl.ncclCommGetUniqueId(small, ctypes.byref(UniqueId())), USAGE)
            draft = Path(sys.argv[5]) / "draft"
            draft.write_text(bytes(made).hex())
            draft.rename(Path(sys.argv[5]) / "id")
        grown = address()
        ok(nccl.ncclCommGrow(small, 3, None, -1, ctypes.byref(grown), None), ARGUMENT)
        given = ctypes.byref(made) if rank == 0 else None
        ok(nccl.ncclCommGrow(small, 4, given, -1, ctypes.byref(grown), None))
        ok(nccl.ncclCommDestroy(small))
        ok(nccl.ncclCommAbort(comm))
    assert (fact(nccl.ncclCommCount, grown), fact(nccl.ncclCommUserRank, grown)) == (4, rank)
    value = np.array([10**rank], np.int64)
    ok(nccl.ncclAllReduce(pointer(value), pointer(value), 1, INT64, SUM, grown, None))
    check(value, np.array([1111], np.int64), "after the growth")
    # Revoked: no operations, but a shrink.
    ok(nccl.ncclCommRevoke(grown, 0))
    ok(nccl.ncclAllReduce(pointer(value), pointer(value), 1, INT64, SUM, grown, None), USAGE)
    if rank != 0:
        rest, excluded = address(), np.array([0], np.int32)
        ok(nccl.ncclCommShrink(grown, pointer(excluded), 1, ctypes.byref(rest), None, 0))
        assert (fact(nccl.ncclCommCount, rest), fact(nccl.ncclCommUserRank, rest)) == (3, rank - 1)
        ok(nccl.ncclCommDestroy(rest))
    ok(nccl.ncclCommDestroy(grown))


def aborted_in(blocked: Callable[[], int], comm: Any, end: Callable[[Any], int]) -> None:
    """A watchdog ends a communicator while the main thread is in a call with it: both come back."""
    took = []

    def watchdog() -> None:
        time.sleep(0.2)
        start = time.monotonic()
        ok(end(comm))
        took.append(time.monotonic() - start)

    thread = threading.Thread(target=watchdog)
    thread.start()
    code = blocked()
    thread.join()
    assert code != SUCCESS, "the peer never came"
    # Far above what is needed, far below a hang.
    assert took[0] < 30


def case_watchdog(rank: int, n: int, identifier: UniqueId) -> None:
    """Rank 1 never comes to what rank 0 waits in: initialisation, a collective, a group, a revoked one, a split."""
    ids = [other_id(identifier, k) for k in range(1, 6)]
    value = np.zeros(4 << 20, np.float32)
    if rank == 1:
        comms = [init(n, one, rank) for one in ids[1:]]
        folder = Path(sys.argv[5])
        while not (folder / "over").exists():
            time.sleep(0.005)
        for comm in comms:
            ok(nccl.ncclCommAbort(comm))
        return
    comm = address()
    aborted_in(lambda: int(nccl.ncclCommInitRank(ctypes.byref(comm), n, ids[0], 0)), comm, nccl.ncclCommAbort)

    def all_reduce(comm: Any) -> int:
        return int(nccl.ncclAllReduce(pointer(value), pointer(value), value.size, F32, SUM, comm, None))

    def group(comm: Any) -> int:
        ok(nccl.ncclGroupStart())
        ok(nccl.ncclSend(pointer(value), value.size, F32, 1, comm, None))
        ok(nccl.ncclRecv(pointer(value), value.size, F32, 1, comm, None))
        return int(nccl.ncclGroupEnd())

    def in_split(comm: Any) -> int:
        return int(nccl.ncclCommSplit(comm, 0, 0, ctypes.byref(address()), None))

    ends = [nccl.ncclCommAbort, nccl.ncclCommDestroy, lambda comm: nccl.ncclCommRevoke(comm, 0), nccl.ncclCommAbort]
    for one, call, end in zip(ids[1:], (all_reduce, group, all_reduce, in_split), ends, strict=True):
        comm = init(n, one, 0)
        aborted_in(lambda call=call, comm=comm: call(comm), comm, end)
    (Path(sys.argv[5]) / "over").touch()
