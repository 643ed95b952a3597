"""NCCL by ctypes, for the programs of ``nccl_host.py``: signatures, structures, and what all of them do."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

SUCCESS, CUDA, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE, IN_PROGRESS = range(8)

address, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_uint8 * 128)]


class Config(ctypes.Structure):
    """``ncclConfig_t`` of 2.18: enough to say non-blocking."""

    _fields_ = [
        ("size", size), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", integer),
        ("cga", integer), ("min_ctas", integer), ("max_ctas", integer), ("net", address), ("share", integer),
        ("pad", integer),
    ]  # fmt: skip


def config(*, blocking: int) -> Config:
    unset = -(2**31)
    return Config(48, 0xCAFEBEEF, 21803, blocking, unset, unset, unset, None, unset, 0)


nccl = ctypes.CDLL(os.environ["NCCL_UNDER_TEST"])

nccl.ncclGetLastError.restype = ctypes.c_char_p

SIGNATURES: dict[str, list[Any]] = {
    "ncclCommInitRank": [address, integer, UniqueId, integer],
    "ncclCommInitRankConfig": [address, integer, UniqueId, integer, address],
    "ncclCommSplit": [address, integer, integer, address, address],
    "ncclCommShrink": [address, address, integer, address, address, integer],
    "ncclCommGrow": [address, integer, address, integer, address, address],
    "ncclCommGetUniqueId": [address, address],
    "ncclAllReduce": [address, address, size, integer, integer, address, address],
    "ncclReduce": [address, address, size, integer, integer, integer, address, address],
    "ncclReduceScatter": [address, address, size, integer, integer, address, address],
    "ncclAllGather": [address, address, size, integer, address, address],
    "ncclBroadcast": [address, address, size, integer, integer, address, address],
    "ncclBcast": [address, size, integer, integer, address, address],
    "ncclAlltoAll": [address, address, size, integer, address, address],
    "ncclGather": [address, address, size, integer, integer, address, address],
    "ncclScatter": [address, address, size, integer, integer, address, address],
    "ncclSend": [address, size, integer, integer, address, address],
    "ncclRecv": [address, size, integer, integer, address, address],
    "ncclRedOpCreatePreMulSum": [address, address, integer, integer, address],
    "ncclRedOpDestroy": [integer, address],
    "ncclCommGetAsyncError": [address, address],
    "ncclCommCount": [address, address],
    "ncclCommUserRank": [address, address],
    "ncclCommDestroy": [address],
    "ncclCommFinalize": [address],
    "ncclCommAbort": [address],
    "ncclCommRevoke": [address, integer],
    "ncclCommMemStats": [address, integer, address],
    "ncclMemAlloc": [address, size],
    "ncclMemFree": [address],
    "ncclGroupSimulateEnd": [address],
}

for name, arguments in SIGNATURES.items():
    getattr(nccl, name).argtypes = arguments


def ok(code: int, expected: int = SUCCESS) -> None:
    assert code == expected, f"{code} instead of {expected}: {nccl.ncclGetLastError(None).decode()}"


def unique_id(text: str) -> UniqueId:
    return UniqueId.from_buffer_copy(bytes.fromhex(text))


def fact(call: Any, comm: Any) -> int:
    value = integer(-7)
    ok(call(comm, ctypes.byref(value)))
    return value.value


def init(ranks: int, identifier: UniqueId, rank: int) -> ctypes.c_void_p:
    comm = address()
    ok(nccl.ncclCommInitRank(ctypes.byref(comm), ranks, identifier, rank))
    return comm


def split(comm: Any, color: int, key: int, expected: int = SUCCESS) -> ctypes.c_void_p:
    child = address(1)
    ok(nccl.ncclCommSplit(comm, color, key, ctypes.byref(child), None), expected)
    return child


def other_id(identifier: UniqueId, number: int) -> UniqueId:
    """Another id that all ranks agree on, as if one of them had made it and told the others."""
    changed = UniqueId.from_buffer_copy(bytes(identifier))
    changed.internal[40] = number
    return changed


def pointer(array: np.ndarray, offset: int = 0) -> int:
    return int(array.ctypes.data) + offset * array.itemsize


def check(got: np.ndarray, expected: np.ndarray, what: object) -> None:
    assert got.dtype == expected.dtype and np.array_equal(got, expected), f"{what}: {got[:8]} instead of {expected[:8]}"


def make_operator(comm: Any, dtype: int, scalar: np.ndarray, *, immediate: bool = True) -> int:
    op = integer()
    ok(nccl.ncclRedOpCreatePreMulSum(ctypes.byref(op), pointer(scalar), dtype, int(immediate), comm))
    return op.value
