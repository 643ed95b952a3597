"""A program on the host device: ``python nccl_host.py CASE RANK RANKS UNIQUE_ID [FOLDER]``, one process per rank.

Plain pointers to numpy arrays, the NULL stream. Every ``case_`` function here and in ``nccl_lifecycle.py`` is a
program; it prints ``done`` at its end.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import nccl_lifecycle
import numpy as np
from nccl_binding import (
    ARGUMENT,
    REMOTE,
    SUCCESS,
    USAGE,
    UniqueId,
    address,
    check,
    fact,
    init,
    integer,
    make_operator,
    nccl,
    ok,
    other_id,
    pointer,
    size,
    split,
    unique_id,
)
from nccl_values import (
    AVG,
    BF16,
    F32,
    F64,
    INT8,
    INT32,
    INT64,
    MAX,
    MIN,
    PROD,
    SUM,
    UINT8,
    UINT64,
    contribution,
    encode,
    reduced,
)

# --- programs ---------------------------------------------------------------------------------------------------------


def check_reductions(comm: Any, rank: int, n: int, dtype: int, count: int) -> None:
    operations = (SUM, PROD, MAX, MIN, AVG)
    for op in operations:
        parts = [contribution(dtype, r, count * n, op) for r in range(n)]
        mine, what = parts[rank], (dtype, op, count)
        everything = reduced(parts, dtype, op)
        out = np.zeros_like(mine)
        ok(nccl.ncclAllReduce(pointer(mine), pointer(out), count * n, dtype, op, comm, None))
        check(out, everything, ("all-reduce", *what))
        place = mine.copy()
        ok(nccl.ncclAllReduce(pointer(place), pointer(place), count * n, dtype, op, comm, None))
        check(place, everything, ("all-reduce in place", *what))
        piece = np.zeros(count, mine.dtype)
        own = slice(rank * count, (rank + 1) * count)
        ok(nccl.ncclReduceScatter(pointer(mine), pointer(piece), count, dtype, op, comm, None))
        check(piece, everything[own], ("reduce-scatter", *what))
        place = mine.copy()
        ok(nccl.ncclReduceScatter(pointer(place), pointer(place, rank * count), count, dtype, op, comm, None))
        check(place[own], everything[own], ("reduce-scatter in place", *what))
        root = n - 1
        out = np.zeros_like(mine)
        ok(nccl.ncclReduce(pointer(mine), pointer(out), count * n, dtype, op, root, comm, None))
        check(out, everything if rank == root else np.zeros_like(mine), ("reduce", *what))


def check_moves(comm: Any, rank: int, n: int, dtype: int, count: int) -> None:
    parts = [contribution(dtype, r, count, 77) for r in range(n)]
    mine, root = parts[rank], n // 2
    gathered = np.concatenate(parts)
    out = np.zeros(n * count, mine.dtype)
    ok(nccl.ncclAllGather(pointer(mine), pointer(out), count, dtype, comm, None))
    check(out, gathered, ("all-gather", dtype))
    place = np.zeros(n * count, mine.dtype)
    place[rank * count : (rank + 1) * count] = mine
    ok(nccl.ncclAllGather(pointer(place, rank * count), pointer(place), count, dtype, comm, None))
    check(place, gathered, ("all-gather in place", dtype))
    out = np.zeros(count, mine.dtype)
    ok(nccl.ncclBroadcast(pointer(mine), pointer(out), count, dtype, root, comm, None))
    check(out, parts[root], ("broadcast", dtype))
    place = mine.copy()
    ok(nccl.ncclBcast(pointer(place), count, dtype, root, comm, None))
    check(place, parts[root], ("bcast", dtype))
    out = np.zeros(n * count, mine.dtype)
    ok(nccl.ncclGather(pointer(mine), pointer(out), count, dtype, root, comm, None))
    check(out, gathered if rank == root else np.zeros_like(out), ("gather", dtype))
    out = np.zeros(count, mine.dtype)
    ok(nccl.ncclScatter(pointer(gathered), pointer(out), count, dtype, root, comm, None))
    check(out, mine, ("scatter", dtype))
    whole = [contribution(dtype, r, n * count, 78) for r in range(n)]
    out = np.zeros(n * count, mine.dtype)
    ok(nccl.ncclAlltoAll(pointer(whole[rank]), pointer(out), count, dtype, comm, None))
    own = slice(rank * count, (rank + 1) * count)
    check(out, np.concatenate([part[own] for part in whole]), ("all-to-all", dtype))


def case_collectives(rank: int, n: int, identifier: UniqueId) -> None:
    comm = init(n, identifier, rank)
    for dtype in range(12):
        check_reductions(comm, rank, n, dtype, 37)
        check_moves(comm, rank, n, dtype, 41)
    ok(nccl.ncclCommDestroy(comm))


def case_large(rank: int, n: int, identifier: UniqueId) -> None:
    """Several pieces of several MiB, and sizes that do not divide."""
    comm = init(n, identifier, rank)
    for dtype, count in ((F32, (3 << 20) + 5), (BF16, 100_003), (INT8, (5 << 20) + 1)):
        parts = [contribution(dtype, r, count, 5) for r in range(n)]
        out = parts[rank].copy()
        ok(nccl.ncclAllReduce(pointer(out), pointer(out), count, dtype, SUM, comm, None))
        check(out, reduced(parts, dtype, SUM), ("large all-reduce", dtype))
        gathered = np.zeros(n * count, out.dtype)
        ok(nccl.ncclAllGather(pointer(parts[rank]), pointer(gathered), count, dtype, comm, None))
        check(gathered, np.concatenate(parts), ("large all-gather", dtype))
        share = count // n
        piece = np.zeros(share, out.dtype)
        ok(nccl.ncclReduceScatter(pointer(parts[rank]), pointer(piece), share, dtype, SUM, comm, None))
        own = slice(rank * share, (rank + 1) * share)
        check(piece, reduced([part[own] for part in parts], dtype, SUM), ("large reduce-scatter", dtype))
    ok(nccl.ncclCommDestroy(comm))


def case_mirrored(rank: int, n: int, identifier: UniqueId) -> None:
    """Ranks 1 and 3 of 6 run: ranks 0 and 2 are like rank 1, ranks 4 and 5 like rank 3."""
    comm = init(n, identifier, rank)
    like = [1, 1, 1, 3, 3, 3]
    for dtype in range(12):
        parts = [contribution(dtype, r, 33, 3) for r in like]
        out = np.zeros(n * 33, parts[0].dtype)
        ok(nccl.ncclAllGather(pointer(parts[rank]), pointer(out), 33, dtype, comm, None))
        check(out, np.concatenate(parts), ("mirrored all-gather", dtype))
        for op in (SUM, PROD, MAX, MIN, AVG):
            out = np.zeros_like(parts[0])
            ok(nccl.ncclAllReduce(pointer(parts[rank]), pointer(out), 33, dtype, op, comm, None))
            if dtype <= UINT64 or op in (MAX, MIN):
                check(out, reduced(parts, dtype, op), ("mirrored all-reduce", dtype, op))
            elif dtype in (F32, F64):
                # A product of equal factors, rounded once.
                np.testing.assert_allclose(out, reduced(parts, dtype, op), rtol=1e-4)
    # Large: nothing is known, and nothing is touched. What nobody who runs sends, neither.
    large = np.full(1 << 20, 7, np.float32)
    ok(nccl.ncclAllReduce(pointer(large), pointer(large), large.size, F32, SUM, comm, None))
    check(large, np.full(1 << 20, 7, np.float32), "large")
    ok(nccl.ncclBroadcast(pointer(large), pointer(large), 9, F32, 5, comm, None))
    ok(nccl.ncclRecv(pointer(large), 9, F32, 0, comm, None))
    check(large, np.full(1 << 20, 7, np.float32), "from a virtual rank")
    # Between the two that run all is real.
    token, peer = np.array([rank], np.int32), 4 - rank
    ok(nccl.ncclGroupStart())
    ok(nccl.ncclSend(pointer(token), 1, INT32, peer, comm, None))
    got = np.zeros(1, np.int32)
    ok(nccl.ncclRecv(pointer(got), 1, INT32, peer, comm, None))
    ok(nccl.ncclGroupEnd())
    check(got, np.array([peer], np.int32), "between running ranks")
    ok(nccl.ncclBroadcast(pointer(token), pointer(got), 1, INT32, 3, comm, None))
    check(got, np.array([3], np.int32), "from a running root")
    ok(nccl.ncclCommDestroy(comm))


def case_ruled(rank: int, n: int, identifier: UniqueId) -> None:
    """A split where virtual members have colours by a rule, and messages from them."""
    comm = init(n, identifier, rank)
    child = split(comm, rank % 2, -rank)
    members = [r for r in reversed(range(n)) if r % 2 == rank % 2]
    assert (fact(nccl.ncclCommCount, child), fact(nccl.ncclCommUserRank, child)) == (len(members), members.index(rank))
    mine, out = np.array([rank], np.int64), np.zeros(len(members), np.int64)
    ok(nccl.ncclAllGather(pointer(mine), pointer(out), 1, INT64, child, None))
    check(out, np.array(members, np.int64), "ranks by a rule")
    got = np.zeros(4, np.float32)
    for k in range(3):
        ok(nccl.ncclRecv(pointer(got), 4, F32, n - 1, comm, None))
        check(got, np.full(4, 100 * k + rank, np.float32), ("message by a rule", k))
    ok(nccl.ncclCommDestroy(child))
    ok(nccl.ncclCommDestroy(comm))


def case_sizes(rank: int, n: int, identifier: UniqueId) -> None:
    """One of 16 ranks runs: sizes of parts, exchanged, and then data of those sizes; reductions among equals."""
    comm, sizes = init(n, identifier, rank), np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], np.int64)
    got = np.full(n, -1, np.int64)
    ok(nccl.ncclAlltoAll(pointer(sizes), pointer(got), 1, INT64, comm, None))
    check(got, np.full(n, sizes[rank]), "sizes")
    source, out = np.arange(sizes.sum(), dtype=np.float32), np.zeros(got.sum(), np.float32)
    sent, received = np.cumsum([0, *sizes]), np.cumsum([0, *got])
    ok(nccl.ncclGroupStart())
    for peer in range(n):
        ok(nccl.ncclSend(pointer(source, int(sent[peer])), int(sizes[peer]), F32, peer, comm, None))
        ok(nccl.ncclRecv(pointer(out, int(received[peer])), int(got[peer]), F32, peer, comm, None))
    ok(nccl.ncclGroupEnd())
    print("received", len(out))
    value = np.full(3, 2.5, np.float32)
    for op, expected in ((SUM, 2.5 * n), (AVG, 2.5), (MAX, 2.5)):
        reduced_value = np.zeros_like(value)
        ok(nccl.ncclAllReduce(pointer(value), pointer(reduced_value), 3, F32, op, comm, None))
        check(reduced_value, np.full(3, expected, np.float32), ("among equals", op))
    ok(nccl.ncclCommDestroy(comm))


def case_stuck(rank: int, n: int, identifier: UniqueId) -> None:
    """Everybody receives first."""
    comm, value = init(n, identifier, rank), np.zeros(1, np.int32)
    code = nccl.ncclRecv(pointer(value), 1, INT32, (rank + 1) % n, comm, None)
    assert code in (REMOTE, USAGE), code


def case_premul(rank: int, n: int, identifier: UniqueId) -> None:
    """bfloat16 vectors of ones and twos; the factor in the right type, and four bytes where two are read."""
    comm = init(n, identifier, rank)
    mine = encode(np.full(5, float(rank + 1), np.float32), BF16)
    total = sum(range(1, n + 1))
    cases = [(encode(np.array([0.5], np.float32), BF16), 0.5)]
    cases += [(np.array([factor], np.float32), low) for factor, low in ((0.5, 0.0), (3.0, 0.0), (0.1, -107_479_040.0))]
    for scalar, factor in cases:
        for immediate in (True, False):
            op = make_operator(comm, BF16, scalar, immediate=immediate)
            out = np.zeros_like(mine)
            ok(nccl.ncclGroupStart())
            ok(nccl.ncclAllReduce(pointer(mine), pointer(out), 5, BF16, op, comm, None))
            # The state of the operator was taken at the call: it may be gone before the launch.
            ok(nccl.ncclRedOpDestroy(op, comm))
            ok(nccl.ncclGroupEnd())
            expected = encode(np.full(5, factor, np.float32) * total, BF16)
            check(out, expected, ("pre-multiplied sum", factor, immediate))
    op = make_operator(comm, F32, np.array([2.0], np.float32))
    ok(nccl.ncclAllReduce(pointer(mine), pointer(mine), 5, BF16, op, comm, None), ARGUMENT)
    ok(nccl.ncclRedOpDestroy(op, comm))
    ok(nccl.ncclRedOpDestroy(op, comm), ARGUMENT)
    ok(nccl.ncclCommDestroy(comm))


def case_uneven_all_to_all(rank: int, n: int, identifier: UniqueId) -> None:
    """Rows to some peers only: zero-size parts sent as such, and then skipped on both sides."""
    assert n == 2
    comm = init(n, identifier, rank)
    row = 24 * 2304 * 128
    # Rows that rank r sends to each.
    sends = [[1, 1], [0, 0]]
    source = np.arange(2 * row, dtype=np.uint32).astype(np.uint16) if rank == 0 else np.zeros(0, np.uint16)
    for skips in (False, True):
        out = np.zeros(row, np.uint16)
        ok(nccl.ncclGroupStart())
        for peer in range(2):
            count, received = sends[rank][peer] * row, sends[peer][rank] * row
            if count or not skips:
                ok(nccl.ncclSend(pointer(source, peer * count), count, BF16, peer, comm, None))
            if received or not skips:
                ok(nccl.ncclRecv(pointer(out), received, BF16, peer, comm, None))
        ok(nccl.ncclGroupEnd())
        check(out, np.arange(2 * row, dtype=np.uint32).astype(np.uint16)[rank * row : (rank + 1) * row], "row")
    ok(nccl.ncclCommDestroy(comm))


def case_messages(rank: int, n: int, identifier: UniqueId) -> None:
    comm = init(n, identifier, rank)
    # The k-th send of a pair meets its k-th receive, whatever lies between; messages to oneself too.
    outgoing = [np.full(3 + k, 100 * rank + k, np.int32) for k in range(4)]
    incoming = [[np.zeros(3 + k, np.int32) for k in range(4)] for _ in range(n)]
    ok(nccl.ncclGroupStart())
    for k in range(4):
        for peer in reversed(range(n)):
            ok(nccl.ncclRecv(pointer(incoming[peer][k]), 3 + k, INT32, peer, comm, None))
    for peer in range(n):
        for k in range(4):
            ok(nccl.ncclSend(pointer(outgoing[k]), 3 + k, INT32, peer, comm, None))
    ok(nccl.ncclGroupEnd())
    for peer in range(n):
        for k in range(4):
            check(incoming[peer][k], np.full(3 + k, 100 * peer + k, np.int32), ("message", peer, k))
    # Large both ways at once: neither side may wait for the other to receive first.
    big, got = np.full(3 << 20, rank, np.int32), np.zeros(3 << 20, np.int32)
    ok(nccl.ncclGroupStart())
    ok(nccl.ncclSend(pointer(big), big.size, INT32, (rank + 1) % n, comm, None))
    ok(nccl.ncclRecv(pointer(got), got.size, INT32, (rank - 1) % n, comm, None))
    ok(nccl.ncclGroupEnd())
    check(got, np.full(3 << 20, (rank - 1) % n, np.int32), "ring")
    # Without a group: even ranks send first.
    for sends in (rank % 2 == 0, rank % 2 == 1):
        peer = rank ^ 1
        if peer < n:
            call = nccl.ncclSend if sends else nccl.ncclRecv
            ok(call(pointer(big if sends else got), 10, INT32, peer, comm, None))
    # No bytes: nothing waits, with anybody.
    ok(nccl.ncclSend(None, 0, INT32, (rank + 1) % n, comm, None))
    ok(nccl.ncclAllReduce(None, None, 0, INT32, SUM, comm, None))
    ok(nccl.ncclSend(pointer(big), 1, INT32, rank, comm, None), USAGE)
    ok(nccl.ncclCommDestroy(comm))


def case_groups(rank: int, n: int, identifier: UniqueId) -> None:
    """Two communicators in one group, named in another order by every second rank; collectives and messages mixed."""
    ids = [identifier, other_id(identifier, 1)]
    order = [0, 1] if rank % 2 == 0 else [1, 0]
    comms = [address(), address()]
    ok(nccl.ncclGroupStart())
    for which in order:
        ok(nccl.ncclCommInitRank(ctypes.byref(comms[which]), n, ids[which], rank if which == 0 else n - 1 - rank))
    ok(nccl.ncclGroupEnd())
    assert [fact(nccl.ncclCommUserRank, comm) for comm in comms] == [rank, n - 1 - rank]
    values = [np.full(1000, 10**which * (rank + 1), np.int64) for which in (0, 1)]
    token, got = np.array([rank], np.int32), np.zeros(1, np.int32)
    ok(nccl.ncclGroupStart())
    ok(nccl.ncclSend(pointer(token), 1, INT32, (rank + 1) % n, comms[0], None))
    for which in order:
        ok(nccl.ncclAllReduce(pointer(values[which]), pointer(values[which]), 1000, INT64, SUM, comms[which], None))
    ok(nccl.ncclRecv(pointer(got), 1, INT32, (rank - 1) % n, comms[0], None))
    ok(nccl.ncclGroupEnd())
    for which in (0, 1):
        check(values[which], np.full(1000, 10**which * n * (n + 1) // 2, np.int64), ("group", which))
    check(got, np.array([(rank - 1) % n], np.int32), "token")
    # In a group a bad call spoils all of it, and the next group is well.
    ok(nccl.ncclGroupStart())
    ok(nccl.ncclAllReduce(pointer(values[0]), pointer(values[0]), 1, 99, SUM, comms[0], None), ARGUMENT)
    ok(nccl.ncclAllReduce(pointer(values[0]), pointer(values[0]), 1, INT64, SUM, comms[0], None))
    ok(nccl.ncclGroupEnd(), ARGUMENT)
    ok(nccl.ncclAllReduce(pointer(values[0]), pointer(values[0]), 1, INT64, MAX, comms[0], None))
    for comm in comms:
        ok(nccl.ncclCommDestroy(comm))


def case_mismatch(rank: int, n: int, identifier: UniqueId) -> None:
    """Members that call different things are told, instead of getting each other's bytes."""
    comm = init(n, identifier, rank)
    value = np.zeros(64, np.float32)
    ok(nccl.ncclAllReduce(pointer(value), pointer(value), 16 + rank, F32, SUM, comm, None), USAGE)
    text = nccl.ncclGetLastError(None).decode()
    assert f"AllReduce of {17 - rank} elements" in text and f"AllReduce of {16 + rank} elements" in text, text
    assert fact(nccl.ncclCommGetAsyncError, comm) == USAGE
    ok(nccl.ncclAllReduce(pointer(value), pointer(value), 1, F32, SUM, comm, None), USAGE)
    ok(nccl.ncclCommAbort(comm))


def case_far_offsets(rank: int, n: int, identifier: UniqueId) -> None:
    """An all-gather whose second half lies beyond 2^31; the buffer is one piece mapped over and over."""
    comm = init(n, identifier, rank)
    count = (1 << 31) + (1 << 22)
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = address, [address, size, integer, integer, integer, ctypes.c_long]
    unit = 64 << 20
    descriptor = os.memfd_create("page")
    os.ftruncate(descriptor, 2 * unit)
    # Reserved, then filled with views of one piece; the last unit of each half is its own.
    base = libc.mmap(None, n * count, 0, 0x4022, -1, 0)
    for at in range(0, n * count, unit):
        length = min(unit, n * count - at)
        shared = 0 if at + length < n * count else unit
        assert libc.mmap(base + at, length, 3, 0x11, descriptor, shared) == base + at
    mine = libc.mmap(None, count, 0, 0x4022, -1, 0)
    fill = np.full(4 << 20, rank + 1, np.uint8)
    own = os.memfd_create("own")
    os.ftruncate(own, unit)
    for at in range(0, unit, fill.size):
        os.pwrite(own, fill.tobytes(), at)
    for at in range(0, count, unit):
        length = min(unit, count - at)
        assert libc.mmap(mine + at, length, 3, 0x11, own, 0) == mine + at
    ok(nccl.ncclAllGather(mine, base, count, UINT8, comm, None))
    last = ctypes.string_at(base + n * count - 8, 8)
    assert last == bytes([n]) * 8, last
    assert ctypes.string_at(base + (n - 1) * count + count // 2, 1)[0] in (1, 2)
    ok(nccl.ncclCommDestroy(comm))


def case_fork(rank: int, n: int, identifier: UniqueId) -> None:
    """A forked child has none of its parent's communicators, and the parent goes on."""
    comm = init(n, identifier, rank)
    child = os.fork()
    if child == 0:
        count = integer()
        code = nccl.ncclCommCount(comm, ctypes.byref(count))
        os._exit(0 if code == ARGUMENT and nccl.ncclGetUniqueId(ctypes.byref(UniqueId())) == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    value = np.array([rank], np.int64)
    ok(nccl.ncclAllReduce(pointer(value), pointer(value), 1, INT64, MAX, comm, None))
    check(value, np.array([n - 1], np.int64), "after the fork")
    ok(nccl.ncclCommDestroy(comm))


def case_alone(rank: int, n: int, identifier: UniqueId) -> None:
    """A communicator of one: copies and multiplications."""
    comm = init(1, other_id(identifier, 10 + rank), 0)
    mine, out = np.arange(5, dtype=np.float32), np.zeros(5, np.float32)
    ok(nccl.ncclAllReduce(pointer(mine), pointer(out), 5, F32, AVG, comm, None))
    check(out, mine, "copy")
    op = make_operator(comm, F32, np.array([0.5], np.float32))
    ok(nccl.ncclAllReduce(pointer(mine), pointer(out), 5, F32, op, comm, None))
    check(out, mine / 2, "half")
    child = split(comm, 3, 0)
    assert fact(nccl.ncclCommCount, child) == 1
    ok(nccl.ncclCommDestroy(child))
    ok(nccl.ncclCommDestroy(comm))


def case_refused(rank: int, n: int, identifier: UniqueId) -> None:
    """One-sided calls and the device side: NCCL's code for what is malformed, else refused by name."""
    comm, data, out = init(n, identifier, rank), np.zeros(4, np.float32), address(1)
    requirements = (ctypes.c_uint64 * 32)(256, 0xCAFEBEEF)
    nothing, garbage, buffer = None, address(0xDEAD), address(pointer(data))
    put = [buffer, size(4), F32, 0, buffer, size(0), 0, 0, 0, comm, None]

    def changed(**places: Any) -> list[Any]:
        return [places.get(f"_{at}", value) for at, value in enumerate(put)]

    cases: list[tuple[str, list[Any], int]] = [
        ("ncclPutSignal", put, USAGE),
        ("ncclPutSignal", changed(_9=nothing), ARGUMENT),
        ("ncclPutSignal", changed(_9=garbage), ARGUMENT),
        ("ncclPutSignal", changed(_3=n), ARGUMENT),
        ("ncclPutSignal", changed(_2=99), ARGUMENT),
        ("ncclPutSignal", changed(_8=1), ARGUMENT),
        ("ncclPutSignal", changed(_4=nothing), ARGUMENT),
        ("ncclPutSignal", changed(_0=nothing), ARGUMENT),
        ("ncclSignal", [0, 0, 0, 0, comm, None], USAGE),
        ("ncclSignal", [-1, 0, 0, 0, comm, None], ARGUMENT),
        ("ncclSignal", [0, 0, 0, 0, nothing, None], ARGUMENT),
        ("ncclWaitSignal", [1, buffer, comm, None], USAGE),
        ("ncclWaitSignal", [0, buffer, comm, None], ARGUMENT),
        ("ncclWaitSignal", [1, nothing, comm, None], ARGUMENT),
        ("ncclWaitSignal", [1, buffer, nothing, None], ARGUMENT),
        ("ncclDevCommCreate", [comm, requirements, buffer], USAGE),
        ("ncclDevCommCreate", [comm, (ctypes.c_uint64 * 32)(256), buffer], USAGE),
        ("ncclDevCommCreate", [comm, nothing, buffer], ARGUMENT),
        ("ncclDevCommCreate", [nothing, requirements, buffer], ARGUMENT),
        ("ncclDevCommDestroy", [comm, buffer], USAGE),
        ("ncclDevCommDestroy", [comm, nothing], ARGUMENT),
        ("ncclDevCommDestroy", [garbage, buffer], ARGUMENT),
        ("ncclGetLsaDevicePointer", [buffer, size(0), 0, ctypes.byref(out)], USAGE),
        ("ncclGetLsaDevicePointer", [nothing, size(0), 0, ctypes.byref(out)], ARGUMENT),
        ("ncclGetPeerDevicePointer", [buffer, size(0), 0, nothing], ARGUMENT),
        ("ncclGetPeerDevicePointer", [buffer, size(0), 0, ctypes.byref(out)], USAGE),
        ("ncclGetLsaMultimemDevicePointer", [buffer, size(0), ctypes.byref(out)], USAGE),
        ("ncclGetLsaMultimemDevicePointer", [nothing, size(0), ctypes.byref(out)], ARGUMENT),
    ]
    for function, arguments, code in cases:
        ok(getattr(nccl, function)(*arguments), code)
        said = nccl.ncclGetLastError(None).decode()
        assert function in said, (function, said)
    # A refused call spoils its group, like any other that fails.
    ok(nccl.ncclGroupStart())
    ok(nccl.ncclSignal(0, 0, 0, 0, comm, None), USAGE)
    ok(nccl.ncclGroupEnd(), USAGE)
    ok(nccl.ncclCommDestroy(comm))


def case_cffi(rank: int, n: int, identifier: UniqueId) -> None:
    """A client that uses no ctypes; the linker's twin names too."""
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(
        "typedef struct { char internal[128]; } ncclUniqueId; typedef void *comm;"
        "int pncclCommInitRank(comm *, int, ncclUniqueId, int); int ncclCommDestroy(comm);"
        "int ncclAllReduce(const void *, void *, size_t, int, int, comm, void *);"
    )
    library: Any = ffi.dlopen(os.environ["NCCL_UNDER_TEST"])
    own, comm = ffi.new("ncclUniqueId *"), ffi.new("comm *")
    ffi.memmove(own.internal, bytes(identifier), 128)
    assert library.pncclCommInitRank(comm, n, own[0], rank) == SUCCESS
    values = ffi.new("double[3]", [rank, 1.5, -rank])
    assert library.ncclAllReduce(values, values, 3, F64, SUM, comm[0], ffi.NULL) == SUCCESS
    total = sum(range(n))
    assert list(values) == [total, 1.5 * n, -total]
    assert library.ncclCommDestroy(comm[0]) == SUCCESS


def case_lost(rank: int, n: int, identifier: UniqueId) -> None:
    """A process that dies is a remote error of those that wait for it, not a hang."""
    comm = init(n, identifier, rank)
    if rank == n - 1:
        print("done", flush=True)
        os._exit(0)
    value = np.zeros(1 << 20, np.float32)
    code = nccl.ncclAllReduce(pointer(value), pointer(value), value.size, F32, SUM, comm, None)
    assert code == REMOTE, code
    assert f"rank {n - 1}" in nccl.ncclGetLastError(None).decode() or n > 2
    ok(nccl.ncclCommAbort(comm))


class SimInfo(ctypes.Structure):
    _fields_ = [("size", size), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("time", ctypes.c_float)]


def case_memory(rank: int, n: int, identifier: UniqueId) -> None:
    """NCCL's buffers appear with the first use of an algorithm; an estimate uses nothing."""
    comm = init(n, identifier, rank)
    value = np.zeros(1 << 20, np.float32)

    def stat(which: int) -> int:
        number = ctypes.c_uint64(99)
        ok(nccl.ncclCommMemStats(comm, which, ctypes.byref(number)))
        return number.value

    assert [stat(which) for which in range(4)] == [0, 0, 0, 0]
    info, times = SimInfo(24, 0x74685283, 23007, -1.0), []
    for count in (1 << 10, 1 << 20):
        ok(nccl.ncclGroupStart())
        ok(nccl.ncclAllGather(pointer(value), pointer(value), count, F32, comm, None))
        ok(nccl.ncclGroupSimulateEnd(ctypes.byref(info)))
        times.append(info.time)
    assert 0 < times[0] < times[1], times
    assert stat(3) == 0
    out = np.zeros(n << 10, np.float32)
    ok(nccl.ncclAllGather(pointer(value), pointer(out), 1 << 10, F32, comm, None))
    ring = stat(3)
    connection = (4 << 20) + (512 << 10) + 4_915_200
    assert ring > 0 and ring % connection == 0
    ok(nccl.ncclAllGather(pointer(value), pointer(out), 1 << 10, F32, comm, None))
    assert (stat(3), stat(0), stat(2)) == (ring, ring, 0)
    memory = address()
    ok(nccl.ncclMemAlloc(ctypes.byref(memory), 100))
    ctypes.memset(memory, 1, 2 << 20)
    assert stat(3) == ring, "what the program allocates is not the communicator's"
    ok(nccl.ncclMemFree(memory))
    ok(nccl.ncclCommDestroy(comm))


if __name__ == "__main__":
    case, own_rank, ranks, text = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    program = globals().get(f"case_{case}") or getattr(nccl_lifecycle, f"case_{case}")
    program(own_rank, ranks, unique_id(text))
    print("done")
