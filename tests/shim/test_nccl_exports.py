"""The NCCL stand-in as the loader and a client without a GPU see it."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import nccl_support
import pytest


def test_soname_is_nccls() -> None:
    dynamic = subprocess.run(["readelf", "-d", str(nccl_support.shim())], check=True, capture_output=True, text=True)
    assert "Library soname: [libnccl.so.2]" in dynamic.stdout


def test_exports_are_the_table_each_with_its_twin() -> None:
    table = nccl_support.table()
    assert len(table) == 97
    without_twin = {name for name, (_, behaviour) in table.items() if behaviour == "without_twin"}
    assert without_twin == {"ncclResetDebugInitInternal"}
    exported = nccl_support.symbols(nccl_support.shim(), defined=True)
    assert exported == set(table) | {f"p{name}" for name in set(table) - without_twin}


def test_the_table_is_nccls() -> None:
    functions = json.loads(nccl_support.shared("api_matrix.json").read_text())
    # One release per minor version was looked at, so the first version is known by its minor.
    first = {name: ".".join(facts["since"].split(".")[:2]) for name, facts in functions.items()}
    assert {name: since for name, (since, _) in nccl_support.table().items()} == first


#: Loads torch's libraries as `import torch` does, all symbols at once.
LOAD_TORCH = """
import ctypes, os, sys
for library in sys.argv[1:]:
    ctypes.CDLL(library, os.RTLD_NOW | os.RTLD_GLOBAL)
"""


def torch_libraries() -> list[Path]:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    folder = Path(spec.origin).parent / "lib"
    return [folder / "libtorch_cuda.so", folder / "libtorch_python.so"]


@pytest.mark.torch
@pytest.mark.slow
def test_ld_02_torch_names_the_function_that_is_missing(tmp_path: Path) -> None:
    """Each function that torch needs, removed in turn: torch cannot be loaded, and says which it was."""
    libraries = torch_libraries()
    if not all(library.exists() for library in libraries):
        pytest.skip("this torch was built without CUDA")
    names: set[str] = set()
    for library in libraries:
        names |= {name for name in nccl_support.symbols(library, defined=False) if name.startswith("nccl")}
    whole, preloaded = nccl_support.shim().read_bytes(), tmp_path / "libnccl.so.2"
    others = nccl_support.shim().parent / "libprism_cuda.so"

    def load(library: bytes) -> str:
        preloaded.write_bytes(library)
        environment = nccl_support.environment(LD_PRELOAD=f"{preloaded}:{others}")
        command = [sys.executable, "-c", LOAD_TORCH, *map(str, libraries)]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        return "" if run.returncode == 0 else run.stderr

    assert load(whole) == "", "torch loads with the whole library"
    for name in sorted(names):
        found = f"{name}\0".encode()
        assert found in whole
        # The loader finds nothing under the old name any more.
        said = load(whole.replace(found, b"x" + found[1:]))
        assert f"undefined symbol: {name}" in said, f"{name}: {said}"


PARAMETERS = """
import ctypes, json, sys
TYPES = "I8 I16 I32 I64 U8 U16 U32".split()
nccl, address = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p
text, number = ctypes.c_char_p(b"before"), ctypes.c_int(-1)
by = ctypes.byref
key = lambda name: ctypes.c_char_p(name.encode()) if name else None
def of(name):
    code = nccl.ncclParamGetParameter(key(name), by(text), by(number))
    return code, text.value and text.value.decode(), number.value
def handle(name):
    bound = address()
    return nccl.ncclParamBind(by(bound), key(name)), bound
small, large, raw = ctypes.c_uint32(7), ctypes.c_uint64(7), ctypes.create_string_buffer(64)
table, length = ctypes.POINTER(ctypes.c_char_p)(), ctypes.c_int()
subsystems, levels, file = (handle(f"NCCL_DEBUG_{name}")[1] for name in ("SUBSYS", "TIMESTAMP_LEVELS", "FILE"))
answers = {
    "debug": of("NCCL_DEBUG"), "subsystems": of("NCCL_DEBUG_SUBSYS"), "levels": of("NCCL_DEBUG_TIMESTAMP_LEVELS"),
    "format": of("NCCL_DEBUG_TIMESTAMP_FORMAT"), "flag": of("NCCL_SET_THREAD_NAME"), "unknown": of("NCCL_NONSENSE"),
    "null": [nccl.ncclParamGetParameter(None, by(text), by(number)), nccl.ncclParamBind(None, b"NCCL_DEBUG")],
    "bind_unknown": handle("NCCL_NONSENSE")[0], "null_handle": nccl.ncclParamGetU64(None, by(large)),
    "garbage_handle": nccl.ncclParamGetU64(address(0xdead), by(large)),
    "u64": [nccl.ncclParamGetU64(subsystems, by(large)), large.value],
    "u32": [nccl.ncclParamGetU32(levels, by(small)), small.value],
    "wrong_type": [getattr(nccl, f"ncclParamGet{t}")(subsystems, by(large)) for t in TYPES],
    "str": [nccl.ncclParamGetStr(file, by(text)), text.value.decode(), nccl.ncclParamGetStr(levels, by(text))],
    "raw": [nccl.ncclParamGet(file, raw, 64, by(number)), number.value, raw.value.decode()],
    "no_room": [nccl.ncclParamGet(subsystems, raw, 7, by(number)), number.value],
    "keys": nccl.ncclParamGetAllParameterKeys(by(table), by(length)),
    "all_keys": [table[i].decode() for i in range(length.value)],
}
print(json.dumps(answers))
"""


def test_parameters_are_those_of_nccl() -> None:
    """What NCCL 2.30 answers from its registry and the environment (``src/param/c_api.cc``)."""
    environment = nccl_support.environment(
        NCCL_DEBUG="info", NCCL_DEBUG_SUBSYS="NET,init", NCCL_DEBUG_FILE="/tmp/log", NCCL_SET_THREAD_NAME="t",
        NCCL_DEBUG_TIMESTAMP_LEVELS="nonsense",
    )  # fmt: skip
    command = [sys.executable, "-c", PARAMETERS, str(nccl_support.shim())]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    published = ["", "_FILE", "_SUBSYS", "_TIMESTAMP_FORMAT", "_TIMESTAMP_LEVELS"]
    assert json.loads(run.stdout) == {
        "debug": [0, "INFO", 4], "subsystems": [0, "INIT,NET", 8], "levels": [0, "WARN", 4],
        "format": [0, "[%F %T] ", 8], "flag": [0, "TRUE", 4], "unknown": [4, None, 0], "null": [4, 4],
        "bind_unknown": 4, "null_handle": 4, "garbage_handle": 4, "u64": [0, 0x11], "u32": [0, 4],
        "wrong_type": [4] * 7, "str": [0, "/tmp/log", 4], "raw": [0, 9, "/tmp/log"], "no_room": [4, 0],
        "keys": 0, "all_keys": [*(f"NCCL_DEBUG{name}" for name in published), "NCCL_SET_THREAD_NAME"],
    }  # fmt: skip


REFUSALS = """
import ctypes, sys
nccl = ctypes.CDLL(sys.argv[1])
nccl.ncclGetLastError.restype = ctypes.c_char_p
for name in sys.argv[2:]:
    code = getattr(nccl, name)(None)
    print(code, name in nccl.ncclGetLastError(None).decode(), name)
"""


def test_refused_functions_say_so_by_name() -> None:
    refused = sorted(name for name, (_, behaviour) in nccl_support.table().items() if behaviour == "refused")
    run = subprocess.run(
        [sys.executable, "-c", REFUSALS, str(nccl_support.shim()), *refused],
        check=True,
        capture_output=True,
        text=True,
        env=nccl_support.environment(),
    )
    answers = [line.split() for line in run.stdout.splitlines()]
    assert [name for _, _, name in answers] == refused
    # Invalid usage; or invalid argument from those that look at the communicator first, which was NULL.
    assert {code for code, _, _ in answers} <= {"4", "5"}
    assert all(is_named == "True" for _, is_named, _ in answers)


@pytest.mark.torch
def test_ld_02_exports_every_function_torch_needs() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    libraries = sorted((Path(spec.origin).parent / "lib").glob("libtorch_*.so"))
    needed: set[str] = set()
    for library in libraries:
        needed |= {name for name in nccl_support.symbols(library, defined=False) if name.startswith("nccl")}
    if not needed:
        pytest.skip("this torch was built without NCCL")
    assert needed <= nccl_support.symbols(nccl_support.shim(), defined=True)
    # torch 2.14 needs 52; far fewer would mean that the wrong libraries were read.
    assert len(needed) >= 40


#: Recorded answers that are not ours, on purpose.
DELIBERATE = {
    # A pointer that is no communicator killed 2.19; ours answers as every later version does.
    ("2.19.3", "garbage_comm"): "4",
    # Not there before 2.22; all names resolve, whatever version is answered.
    ("2.19.3", "simend_uninit"): "4",
    # 2.19 looked at the parent before it looked for a device.
    ("2.19.3", "split_null"): "1",
}


@pytest.mark.parametrize("version", ["2.19.3", "2.27.7", "2.30.7", "2.32.3"])
def test_answers_like_nccl_without_a_gpu(version: str) -> None:
    wanted = json.loads(nccl_support.shared(f"edge_cu12-{version}.json").read_text())
    answers = nccl_support.edge_answers(nccl_support.environment(PRISM_NCCL_VERSION=version))
    # How many bytes of a unique id are not zero depends on the address of the machine that NCCL ran on.
    code, nonzero_bytes = ast.literal_eval(answers.pop("uid"))
    assert code == ast.literal_eval(wanted.pop("uid"))[0]
    assert nonzero_bytes > 8
    different = {name: answers[name] for name in wanted if answers[name] != wanted[name]}
    assert answers.keys() == wanted.keys()
    assert different == {case: ours for (since, case), ours in DELIBERATE.items() if since == version}


def version_in(**changes: str) -> tuple[int, str]:
    """Version code and standard error of a fresh process."""
    program = (
        "import ctypes, sys; number = ctypes.c_int(); "
        "assert ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number)) == 0; print(number.value)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(nccl_support.shim())],
        check=True,
        capture_output=True,
        text=True,
        env=nccl_support.environment(**changes),
    )
    return int(run.stdout), run.stderr


def test_version_is_the_clients_and_can_be_overridden() -> None:
    assert version_in() == (23007, "")
    assert version_in(PRISM_NCCL_VERSION="22707") == (22707, "")
    code, stderr = version_in(PRISM_NCCL_VERSION="newest")
    assert code == 23007
    assert "PRISM_NCCL_VERSION=newest" in stderr


def test_a_session_without_its_device_library_is_an_error_that_says_so() -> None:
    program = """
import ctypes, sys
nccl = ctypes.CDLL(sys.argv[1])
nccl.ncclGetLastError.restype = ctypes.c_char_p
comm = ctypes.c_void_p(1)
code = nccl.ncclCommInitAll(ctypes.byref(comm), 1, None)
print(code, nccl.ncclGetLastError(None).decode())
"""
    run = subprocess.run(
        [sys.executable, "-c", program, str(nccl_support.shim())],
        check=True,
        capture_output=True,
        text=True,
        env=nccl_support.environment(PRISM_SESSION="nowhere"),
    )
    assert run.stdout.startswith("1 ")
    assert "libprism_cuda.so" in run.stdout


def test_loading_starts_nothing() -> None:
    """The library is preloaded into compilers and data loaders too: no thread, no file, no output."""
    program = """
import ctypes, os, sys
before = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
ctypes.CDLL(sys.argv[1])
after = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
print(before == after)
"""
    run = subprocess.run(
        [sys.executable, "-c", program, str(nccl_support.shim())],
        check=True,
        capture_output=True,
        text=True,
        env=nccl_support.environment(PRISM_SESSION="nowhere"),
    )
    assert (run.stdout, run.stderr) == ("True\n", "")


def test_is_loadable_by_this_interpreter() -> None:
    assert ctypes.CDLL(str(nccl_support.shim())).ncclGroupStart is not None
