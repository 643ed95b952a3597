"""A Python client of the NCCL stand-in, as vLLM or CuPy are: ctypes, buffers by address.

``shim/nccl/tests/c/session.h`` plays the emulated device; the program runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nccl_support
import pytest

PROGRAM = """
import ctypes, struct, sys

session = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
nccl = ctypes.CDLL("libnccl.so.2" if sys.argv[2] == "soname" else sys.argv[2])


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


address, size = ctypes.c_void_p, ctypes.c_size_t
nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(address), ctypes.c_int, UniqueId, ctypes.c_int]
nccl.ncclAllReduce.argtypes = [address, address, size, ctypes.c_int, ctypes.c_int, address, address]
nccl.ncclAllGather.argtypes = [address, address, size, ctypes.c_int, address, address]
nccl.ncclCommCount.argtypes = [address, ctypes.POINTER(ctypes.c_int)]
nccl.ncclCommDestroy.argtypes = [address]
session.prism_test_alloc.restype = address
session.prism_test_alloc.argtypes = [size]

unique_id, comm, count = UniqueId(), address(), ctypes.c_int()
assert nccl.ncclGetUniqueId(ctypes.byref(unique_id)) == 0
assert nccl.ncclCommInitRank(ctypes.byref(comm), 4, unique_id, 2) == 0
assert nccl.ncclCommCount(comm, ctypes.byref(count)) == 0 and count.value == 4

# An object of 16 bytes, gathered: what every rank pickled is taken to be what this one did.
send, recv = session.prism_test_alloc(16), session.prism_test_alloc(64)
ctypes.memmove(send, b"pickled object!!", 16)
assert nccl.ncclAllGather(send, recv, 16, 1, comm, None) == 0
assert ctypes.string_at(recv, 64) == b"pickled object!!" * 4

ctypes.memmove(send, struct.pack("<2d", 1.25, -3.0), 16)
assert nccl.ncclAllReduce(send, recv, 2, 8, 0, comm, None) == 0
assert struct.unpack("<2d", ctypes.string_at(recv, 16)) == (5.0, -12.0)

records = ctypes.c_uint.in_dll(session, "prism_test_num_records")
assert records.value == 2
assert nccl.ncclCommDestroy(comm) == 0
assert nccl.ncclCommCount(comm, ctypes.byref(count)) == 4
assert records.value == 3
print("done")
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session owner as a library."""
    folder = tmp_path_factory.mktemp("session")
    source, library = folder / "session.c", folder / "libsession.so"
    source.write_text('#include "session.h"\n')
    include = f"-I{nccl_support.ROOT / 'shim/nccl/tests/c'}"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-shared", include]
    subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
    return library


@pytest.mark.parametrize("how", ["by path", "preloaded, by soname"])
def test_ctypes_client(session: Path, how: str) -> None:
    shim = str(nccl_support.shim())
    preload = how.startswith("preloaded")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(session), "soname" if preload else shim],
        capture_output=True,
        text=True,
        env=nccl_support.environment(**({"LD_PRELOAD": shim} if preload else {})),
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")
