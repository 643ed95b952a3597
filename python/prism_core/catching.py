"""How a program's NCCL and driver calls are caught: what the loader can do for it, and whether it really does."""

from __future__ import annotations

import json
import os
import platform
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from prism_core.environment import AUDIT_NAME, SHIM_FOLDER, SHIM_NAMES, loader_variables
from prism_core.errors import ShimError

#: Ways to get at NCCL that a preloaded library with its SONAME catches, and those that need the audit library too.
BY_PRELOAD = ("linked", "dlopen libnccl.so.2", "RTLD_NOLOAD libnccl.so.2", "dlopen libcuda.so.1")
BY_AUDIT = (
    "dlopen libnccl.so",
    "dlopen by path",
    "dlopen by path, RTLD_DEEPBIND",
    "dlmopen libnccl.so.2",
    "dlopen libcuda.so",
    "dlopen libcuda.so.1 by path",
)

#: Run in a child: whose function does each way lead to? `folder` has decoys that define nothing.
_PROBE = """
import ctypes, json, os, sys
folder = sys.argv[1]
own = ctypes.CDLL(None)
own.dlopen.restype = own.dlmopen.restype = own.dlsym.restype = ctypes.c_void_p
own.dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
own.dlmopen.argtypes = [ctypes.c_long, ctypes.c_char_p, ctypes.c_int]
own.dlsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
class Info(ctypes.Structure):
    _fields_ = [("path", ctypes.c_char_p)] + [(name, ctypes.c_void_p) for name in ("base", "name", "at")]
own.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(Info)]
def owner(handle, symbol):
    address, info = own.dlsym(handle, symbol), Info()
    return info.path.decode() if address and own.dladdr(address, ctypes.byref(info)) else ""
def opened(name, symbol=b"ncclGetVersion", mode=0):
    handle = own.dlopen(name.encode(), os.RTLD_NOW | mode)
    return owner(handle, symbol) if handle else ""
driver = b"cuDriverGetVersion"
found = {
    "linked": owner(None, b"ncclGetVersion"),
    "RTLD_NOLOAD libnccl.so.2": opened("libnccl.so.2", mode=os.RTLD_NOLOAD),
    "dlopen libnccl.so.2": opened("libnccl.so.2"),
    "dlopen libcuda.so.1": opened("libcuda.so.1", driver),
    "dlopen libnccl.so": opened("libnccl.so"),
    "dlopen by path": opened(folder + "/libnccl.so.2"),
    "dlopen by path, RTLD_DEEPBIND": opened(folder + "/libnccl.so.2", mode=os.RTLD_DEEPBIND),
    "dlopen libcuda.so": opened("libcuda.so", driver),
    "dlopen libcuda.so.1 by path": opened(folder + "/libcuda.so.1", driver),
}
handle = own.dlmopen(-1, b"libnccl.so.2", os.RTLD_NOW)
found["dlmopen libnccl.so.2"] = owner(handle, b"ncclGetVersion") if handle else ""
print(json.dumps(found))
"""


def probe(folder: Path = SHIM_FOLDER, base: Mapping[str, str] = os.environ) -> dict[str, bool]:
    """Tries every way to get at NCCL and the driver in a child; which of them lead to our libraries.

    Raises:
        ShimError: The child cannot be started or ends with an error.
    """
    environment = {name: value for name, value in base.items() if not name.startswith("PRISM_")}
    environment |= loader_variables([folder / name for name in SHIM_NAMES], base)
    with tempfile.TemporaryDirectory(prefix="prism-doctor-") as decoys:
        try:
            for name in ("libnccl.so.2", "libcuda.so.1"):
                shutil.copyfile(folder / AUDIT_NAME, Path(decoys) / name)  # any library without NCCL's functions
            child = subprocess.run(
                [sys.executable, "-S", "-c", _PROBE, decoys],
                env=environment, capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ShimError(f"cannot try how libraries are loaded: {error}") from error
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines()
        raise ShimError(f"a child that loads NCCL ends with {child.returncode}: {lines[-1] if lines else 'no message'}")
    owners: dict[str, str] = json.loads(child.stdout.splitlines()[-1])
    return {way: Path(owner).parent == folder for way, owner in owners.items()}


def libc_problem() -> str | None:
    """Why LD_AUDIT does not work with this interpreter's C library, or what it costs there; `None` if all is well."""
    name, version = platform.libc_ver()
    if name != "glibc":
        return "the C library is not glibc: only the preload can work"
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 35):
        return f"glibc {version} traces every lazily bound call under LD_AUDIT (fixed in 2.35): programs are slower"
    return None


def program_problem(command: str, base: Mapping[str, str] = os.environ) -> str | None:
    """Why the loader cannot put our libraries into a program, or `None`. A program it starts may still be caught."""
    found = shutil.which(command, path=base.get("PATH"))
    if found is None:
        return None  # the start will fail and say so
    path = Path(found)
    for _ in range(4):  # the kernel follows as many `#!` lines
        header = _start_of(path)
        if not header.startswith(b"#!"):
            return _elf_problem(path, header) if header.startswith(b"\x7fELF") else None
        words = header[2:].split(b"\n")[0].decode(errors="replace").split()
        interpreter = shutil.which(_interpreter(words), path=base.get("PATH")) if words else None
        if interpreter is None:
            return None
        path = Path(interpreter)
    return None


def _interpreter(words: list[str]) -> str:
    """The program a `#!` line starts, looking through `env`."""
    if Path(words[0]).name != "env":
        return words[0]
    named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return named[0] if named else words[0]


def _start_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64 * 1024)
    except OSError:
        return b""


def _elf_problem(path: Path, header: bytes) -> str | None:
    nothing = "nothing can be preloaded into it"
    if header[4:5] != b"\x02":
        return f"{path} is a 32-bit program: {nothing}"
    interpreter = _elf_interpreter(header)
    if interpreter is None:
        return f"{path} is linked statically: {nothing}"
    if Path(interpreter).name.startswith("ld-musl"):
        return f"{path} uses musl, not glibc: {nothing}"
    if path.stat().st_mode & (stat.S_ISUID | stat.S_ISGID) or _has_capabilities(path):
        return f"{path} runs with the rights of its file (setuid, setgid or capabilities): the loader ignores a preload"
    return None


def _elf_interpreter(header: bytes) -> str | None:
    """The loader a 64-bit ELF program asks for."""
    order = "<" if header[5:6] == b"\x01" else ">"
    try:
        (table,) = struct.unpack_from(f"{order}Q", header, 32)
        size, count = struct.unpack_from(f"{order}HH", header, 54)
        for index in range(count):
            kind, _, offset, _, _, length = struct.unpack_from(f"{order}IIQQQQ", header, table + index * size)
            if kind == 3:  # PT_INTERP
                return header[offset : offset + length].rstrip(b"\0").decode(errors="replace")
    except struct.error:
        return None
    return None


def _has_capabilities(path: Path) -> bool:
    try:
        return bool(os.getxattr(path, "security.capability"))
    except OSError:
        return False
