"""Every way a program can get at NCCL leads to the stand-in, or ends the run with the reason.

The programs ask for the device of a session that does not exist: the libraries look for NCCL code that is not caught
before they connect, so no engine is needed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import nccl_support
import pytest
from prism_core import catching, doctor
from prism_core.environment import AUDIT_NAME, EXIT_NOT_CAUGHT, SHIM_NAMES, loader_variables
from prism_core.errors import ShimError

SOURCES = Path(__file__).parent / "c"
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

OURS, OTHER = "23007", "29999"


def libraries() -> Path:
    """The folder with all our libraries."""
    folder = nccl_support.shim().parent
    missing = [name for name in (*SHIM_NAMES, AUDIT_NAME) if not (folder / name).exists()]
    if missing:
        pytest.fail(f"{', '.join(missing)} not in {folder}: build the shims first")
    return folder


def run_environment(*, audit: bool, **changes: str) -> dict[str, str]:
    """What the launcher sets for the loader, and a session that nobody listens at."""
    base = nccl_support.environment(PRISM_AUDIT="on" if audit else "off")
    base.update(loader_variables([libraries() / name for name in SHIM_NAMES], base))
    session = {
        "PRISM_SESSION": "/nowhere/socket",
        "PRISM_RANK": "0",
        "PRISM_WORLD_SIZE": "8",
        "PRISM_DEVICE": "emulated",
        "PRISM_NCCL_VERSION": OURS,
    }
    return {**base, **session, **changes}


def gcc(*arguments: object) -> None:
    subprocess.run(["gcc", "-std=gnu11", "-O1", *map(str, arguments)], check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another NCCL (shared in `other`, and as an archive) and the program that gets at it."""
    folder = tmp_path_factory.mktemp("catching")
    other = folder / "other"
    other.mkdir()
    gcc("-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", SOURCES / "other_nccl.c", "-o", other / "libnccl.so.2")
    (other / "libnccl.so").symlink_to("libnccl.so.2")
    gcc("-c", "-fPIC", SOURCES / "other_nccl.c", "-o", folder / "other_nccl.o")
    subprocess.run(["ar", "rcs", folder / "libnccl_static.a", folder / "other_nccl.o"], check=True)
    gcc(SOURCES / "binding.c", "-o", folder / "binding", "-ldl")
    gcc("-DLINKED", "-no-pie", SOURCES / "binding.c", other / "libnccl.so.2", "-o", folder / "linked", "-ldl")
    return folder


def run(built: Path, how: str, name: str, *then: str, audit: bool, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs the program; the other NCCL is what the loader would find by name."""
    program = built / ("linked" if how == "linked" else "binding")
    environment = run_environment(audit=audit, LD_LIBRARY_PATH=str(built / "other"), **changes)
    return subprocess.run([program, how, name, *then], capture_output=True, text=True, env=environment, check=False)


#: How, what name (`/` stands for the other NCCL's path), and whether the preload alone leads to us.
WAYS = [
    ("linked", "-", True),
    ("global", "-", True),
    ("dlopen", "libnccl.so.2", True),
    ("lazy", "libnccl.so.2", True),
    ("noload", "libnccl.so.2", True),
    ("deepbind", "libnccl.so.2", True),
    ("dlopen", "libnccl.so", False),
    ("dlopen", "/", False),
    ("lazy", "/", False),
    ("deepbind", "/", False),
    ("noload", "/", False),
    ("dlmopen", "libnccl.so.2", False),
]


@pytest.mark.parametrize("audit", [False, True], ids=["preload only", "with audit"])
@pytest.mark.parametrize(("how", "name", "by_preload"), WAYS, ids=[f"{how} {name}" for how, name, _ in WAYS])
def test_ld_04_every_way_to_nccl_is_caught_or_ends_the_run(
    how: str, name: str, by_preload: bool, audit: bool, built: Path
) -> None:
    other = str(built / "other/libnccl.so.2")
    child = run(built, how, other if name == "/" else name, "device", audit=audit)
    if by_preload or audit:
        version, path = child.stdout.splitlines()[0].split(" ", 1)
        assert version == OURS, child.stdout
        assert how == "linked" or Path(path).name == "libprism_nccl.so"
        assert child.stdout.splitlines()[1].startswith("cuInit "), child.stderr
        assert child.returncode == 0 and "not emulated" not in child.stderr
    elif how == "noload":
        assert child.stdout.startswith("load: ")  # not loaded, says the loader: the program has no other NCCL then
    else:
        assert child.stdout.split()[0] == OTHER
        assert child.returncode == EXIT_NOT_CAUGHT
        assert "a second NCCL is loaded" in child.stderr and str(built / "other/libnccl.so") in child.stderr
        assert "cuInit" not in child.stdout


def test_a_path_in_a_namespace_of_its_own_escapes_the_audit_and_ends_the_run(built: Path) -> None:
    """The loader does not ask the audit library for it (glibc: a dlmopen of a path has no asking object)."""
    child = run(built, "dlmopen", str(built / "other/libnccl.so.2"), "device", audit=True)
    assert (child.stdout.split()[0], child.returncode) == (OTHER, EXIT_NOT_CAUGHT)
    assert str(built / "other/libnccl.so.2") in child.stderr and "dlmopen" in child.stderr


@pytest.mark.parametrize("device", ["emulated", "host"])
def test_a_stand_in_in_a_namespace_of_its_own_refuses_to_work(device: str, built: Path) -> None:
    child = run(built, "dlmopen", "libnccl.so.2", "communicator", audit=True, PRISM_DEVICE=device)
    assert child.stdout.split()[0] == OURS
    assert child.returncode == EXIT_NOT_CAUGHT
    assert "libprism_nccl.so was loaded into a namespace of its own" in child.stderr


def test_a_second_nccl_ends_the_run_at_the_communicator_too(built: Path) -> None:
    """The host device has no CUDA call before it."""
    program = "\n".join([
        "import ctypes",
        f"other = ctypes.CDLL({str(built / 'other/libnccl.so.2')!r})",
        "nccl, comm, unique_id = ctypes.CDLL('libnccl.so.2'), ctypes.c_void_p(), (ctypes.c_char * 128)()",
        "print('made', nccl.ncclCommInitRankScalable(ctypes.byref(comm), 8, 0, 1, unique_id, None))",
    ])  # fmt: skip
    run = [sys.executable, "-S", "-c", program]
    caught = subprocess.run(run, capture_output=True, text=True, env=run_environment(audit=True, PRISM_DEVICE="host"))
    assert caught.returncode == 0 and caught.stdout.startswith("made ")
    missed = subprocess.run(run, capture_output=True, text=True, env=run_environment(audit=False, PRISM_DEVICE="host"))
    assert (missed.returncode, missed.stdout) == (EXIT_NOT_CAUGHT, "")
    assert str(built / "other/libnccl.so.2") in missed.stderr and "PRISM_AUDIT=off" in missed.stderr


def test_a_program_that_never_asks_for_the_device_is_left_alone(built: Path) -> None:
    child = run(built, "dlopen", str(built / "other/libnccl.so.2"), audit=False)
    assert (child.returncode, child.stdout.split()[0], child.stderr) == (0, OTHER, "")


# --- NCCL linked into something -------------------------------------------------------------------------------------

#: Linker options, and whether the framework's calls are bound to its own copy. Measured with glibc 2.36: case ld-01.
LINKS = {
    "default": ([], False),
    "exclude-libs": (["-Wl,--exclude-libs,ALL"], True),
    "Bsymbolic": (["-Wl,-Bsymbolic"], True),
    "exclude-libs, stripped": (["-Wl,--exclude-libs,ALL", "-s"], True),
}


def ask_framework(library: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """A Python program that uses the framework and then the device."""
    program = "\n".join([
        "import ctypes, sys",
        "framework = ctypes.CDLL(sys.argv[1], mode=ctypes.DEFAULT_MODE | int(sys.argv[2]))",
        "print('version', framework.framework_version(), flush=True)",
        "print('cuInit', ctypes.CDLL('libcuda.so.1').cuInit(0), flush=True)",
    ])  # fmt: skip
    mode = changes.pop("mode", "0")
    command = [sys.executable, "-S", "-c", program, str(library), mode]
    return subprocess.run(
        command, capture_output=True, text=True, env=run_environment(audit=True, **changes), check=False
    )


@pytest.mark.parametrize("link", LINKS)
def test_ld_01_nccl_linked_into_a_library_ends_the_run_unless_its_calls_come_to_us(
    link: str, built: Path, tmp_path: Path
) -> None:
    options, is_bypassed = LINKS[link]
    library = tmp_path / "libframework.so"
    archive = ["-Wl,--whole-archive", built / "libnccl_static.a", "-Wl,--no-whole-archive"]
    gcc("-shared", "-fPIC", SOURCES / "framework.c", *archive, *options, "-o", library)
    child = ask_framework(library)
    assert child.stdout.split()[:2] == ["version", OTHER if is_bypassed else OURS]
    if is_bypassed:
        assert child.returncode == EXIT_NOT_CAUGHT
        assert f"NCCL is linked statically into {library} (NCCL version 2.99.9+cuda13.0)" in child.stderr
        assert "cuInit" not in child.stdout
    else:
        assert child.returncode == 0 and "cuInit" in child.stdout
        # The same library, loaded so that its own functions come first.
        deep = ask_framework(library, mode=str(os.RTLD_DEEPBIND | os.RTLD_NOW))
        assert (deep.stdout.split()[1], deep.returncode) == (OTHER, EXIT_NOT_CAUGHT)


@pytest.mark.parametrize(
    "options", [[], ["-rdynamic"], ["-s"], ["-no-pie"]], ids=lambda options: " ".join(options) or "plain"
)
def test_nccl_linked_into_the_program_ends_the_run(options: list[str], built: Path, tmp_path: Path) -> None:
    program = tmp_path / "train"
    gcc("-DPROGRAM", SOURCES / "framework.c", built / "libnccl_static.a", *options, "-o", program, "-ldl")
    child = subprocess.run([program], capture_output=True, text=True, env=run_environment(audit=True), check=False)
    assert (child.stdout, child.returncode) == (f"version {OTHER}\n", EXIT_NOT_CAUGHT)
    assert f"NCCL is linked statically into {program}" in child.stderr


def test_a_renamed_nccl_is_known_by_its_soname_or_its_code(built: Path, tmp_path: Path) -> None:
    for name, options in {"libmine.so": ["-Wl,-soname,libnccl.so.2"], "libcode.so": []}.items():
        library = tmp_path / name
        gcc("-shared", "-fPIC", SOURCES / "other_nccl.c", *options, "-o", library)
        child = run(built, "dlopen", str(library), "device", audit=True)
        # One with NCCL's SONAME, too, is another library for the loader when it is opened by path.
        assert (child.stdout.split()[0], child.returncode) == (OTHER, EXIT_NOT_CAUGHT)
        assert str(library) in child.stderr


def test_stubs_that_open_nccl_are_let_in_and_other_definitions_are_not(built: Path, tmp_path: Path) -> None:
    for option, code in {"-DSTUB": 0, "-DNO_BANNER": EXIT_NOT_CAUGHT}.items():
        library = tmp_path / f"lib{option[2:].lower()}.so"
        gcc("-shared", "-fPIC", option, SOURCES / "other_nccl.c", "-o", library)
        child = run(built, "dlopen", str(library), "device", audit=True)
        assert child.returncode == code, child.stderr
    assert "it defines ncclCommInitRank" in child.stderr


def test_a_copy_that_the_user_says_is_unused_does_not_end_the_run(built: Path, tmp_path: Path) -> None:
    library = tmp_path / "libframework.so"
    gcc("-shared", "-fPIC", "-Wl,-Bsymbolic", SOURCES / "framework.c", SOURCES / "other_nccl.c", "-o", library)
    (tmp_path / "link").symlink_to(tmp_path)
    child = ask_framework(library, PRISM_UNUSED_NCCL=f"/elsewhere.so:{tmp_path}/link/libframework.so")
    assert child.returncode == 0 and "cuInit" in child.stdout
    child = ask_framework(library, PRISM_UNUSED_NCCL="/elsewhere.so")
    assert child.returncode == EXIT_NOT_CAUGHT and f"PRISM_UNUSED_NCCL={library}" in child.stderr


def test_a_stand_in_can_open_the_library_it_stands_for(built: Path, tmp_path: Path) -> None:
    """The audit library replaces what others ask for, not what our own libraries do."""
    source = tmp_path / "open.c"
    source.write_text("""
        #include <dlfcn.h>
        int version_of(const char *path) {
            void *library = dlopen(path, RTLD_NOW);
            int version = 0, (*get)(int *) = library ? (int (*)(int *))dlsym(library, "ncclGetVersion") : 0;
            return get && !get(&version) ? version : -1;
        }
    """)
    program = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).version_of(sys.argv[2].encode()))"
    for name, version in {"libprism_any.so": OTHER, "libany.so": OURS}.items():
        gcc("-shared", "-fPIC", source, "-o", tmp_path / name, "-ldl")
        command = [sys.executable, "-S", "-c", program, str(tmp_path / name), str(built / "other/libnccl.so.2")]
        child = subprocess.run(command, capture_output=True, text=True, env=run_environment(audit=True), check=True)
        assert child.stdout.split() == [version]


def test_the_real_library_may_be_there_when_calls_are_passed_on_to_it(built: Path) -> None:
    real = str(built / "other/libnccl.so.2")
    child = run(built, "dlopen", real, "device", audit=False, PRISM_REAL_NCCL=real)
    assert child.returncode == 0 and child.stdout.split()[0] == OTHER


# --- what the launcher and the doctor say -----------------------------------------------------------------------


def test_the_doctor_tries_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = catching.probe(libraries())
    assert set(ways) == {*catching.BY_PRELOAD, *catching.BY_AUDIT}
    assert all(ways.values())
    assert doctor.probe_catching(libraries()).state in ("ok", "warning")  # a warning where glibc is old
    monkeypatch.setenv("PRISM_AUDIT", "off")
    ways = catching.probe(libraries())
    assert {way for way, is_caught in ways.items() if is_caught} == set(catching.BY_PRELOAD)
    finding = doctor.probe_catching(libraries())
    assert finding.state == "warning" and "PRISM_AUDIT=off" in finding.detail
    monkeypatch.setenv("PRISM_AUDIT", "maybe")
    assert "PRISM_AUDIT=maybe" in doctor.probe_catching(libraries()).detail


def test_the_doctor_sees_an_audit_library_that_the_loader_cannot_use(tmp_path: Path) -> None:
    for name in SHIM_NAMES:
        shutil.copy(libraries() / name, tmp_path)
    with pytest.raises(ShimError, match=AUDIT_NAME):
        catching.probe(tmp_path)
    (tmp_path / AUDIT_NAME).write_bytes(b"\x7fELF but nothing else")
    finding = doctor.probe_catching(tmp_path)
    assert finding.state == "error" and AUDIT_NAME in finding.detail


def without_loader(program: bytes) -> bytes:
    """A program that asks for no loader, as one that is linked statically (whose libraries need not be installed)."""
    data = bytearray(program)
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for header in range(table, table + size * count, size):
        if struct.unpack_from("<I", data, header) == (3,):  # PT_INTERP
            struct.pack_into("<I", data, header, 0)
    return bytes(data)


def test_a_program_nothing_can_be_preloaded_into_is_told(tmp_path: Path) -> None:
    source = tmp_path / "main.c"
    source.write_text("int main(void) { return 0; }\n")
    gcc(source, "-o", tmp_path / "plain")
    (tmp_path / "static").write_bytes(without_loader((tmp_path / "plain").read_bytes()))
    (tmp_path / "static").chmod(0o755)
    shutil.copy(tmp_path / "plain", tmp_path / "setuid")
    (tmp_path / "setuid").chmod(0o4755)
    script, by_env = tmp_path / "script", tmp_path / "by_env"
    script.write_text(f"#!{tmp_path / 'static'} -x\n")
    by_env.write_text("#!/usr/bin/env -S python3 -u\n")
    for path in (script, by_env):
        path.chmod(0o755)
    assert "linked statically" in str(catching.program_problem(str(tmp_path / "static")))
    assert "linked statically" in str(catching.program_problem("script", {"PATH": str(tmp_path)}))
    assert "rights of its file" in str(catching.program_problem(str(tmp_path / "setuid")))
    for fine in (tmp_path / "plain", by_env, "sh", sys.executable, "no such program"):
        assert catching.program_problem(str(fine)) is None, fine


def test_a_program_for_another_loader_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program"
    shutil.copy("/bin/true", program)
    data = bytearray(program.read_bytes())
    at = data.index(b"/lib64/ld-linux") if b"/lib64/ld-linux" in data else data.index(b"/lib/ld-linux")
    end = data.index(b"\0", at)
    data[at:end] = b"/lib/ld-musl.so.1".ljust(end - at, b"\0")
    program.write_bytes(data)
    assert "musl" in str(catching.program_problem(str(program)))
    data[4] = 1
    program.write_bytes(data)
    assert "32-bit" in str(catching.program_problem(str(program)))


# --- children --------------------------------------------------------------------------------------------------------

TOOLS: dict[str, list[str]] = {
    "bash": ["bash", "-c", "set -e; echo $((6 * 7)); printf '%s\\n' a b | sort -r; type cd"],
    "timeout": ["timeout", "20", "sh", "-c", "echo in time; exit 3"],
    "gcc": ["gcc", "-x", "c", "-O2", "-S", "-o", "-", str(SOURCES / "framework.c")],
    "gcc that links": ["gcc", "-shared", "-fPIC", "-o", "/dev/null", str(SOURCES / "framework.c")],
    "gcc that fails": ["gcc", "-x", "c", "-o", "/dev/null", "/dev/null"],
    "nm": ["nm", "-D", "--defined-only", sys.executable],
    "git": ["git", "--version"],
    "python": [sys.executable, "-I", "-c", "import json, ssl, sys; print(sorted(sys.modules)[:3], json.dumps([1]))"],
    "workers": [
        sys.executable, "-I", "-c",
        "import multiprocessing as m\nif __name__ == '__main__':\n"
        " with m.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, 2, -3]))",
    ],
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_child_tools_do_the_same_and_never_call_the_session(tool: str, tmp_path: Path) -> None:
    command = TOOLS[tool]
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}")
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        under = run_environment(audit=True, PRISM_SESSION=str(path))
        plain = {name: value for name, value in nccl_support.environment().items() if not name.startswith("LD_")}
        outcomes = [
            subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path, check=False)
            for environment in (plain, under)
        ]
        with pytest.raises(BlockingIOError):
            listener.accept()
    before, after = ((outcome.returncode, outcome.stdout, outcome.stderr) for outcome in outcomes)
    assert before == after


# --- torch without one of NCCL's functions ---------------------------------------------------------------------


def without_symbol(library: Path, name: str, copy: Path) -> None:
    """A copy of a library in which one function is no longer defined."""
    data = bytearray(library.read_bytes())
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + index * size) for index in range(count)]
    dynsym = next(section for section in sections if section[1] == 11)
    names = sections[dynsym[6]][4]
    for entry in range(dynsym[4], dynsym[4] + dynsym[5], 24):
        (start,) = struct.unpack_from("<I", data, entry)
        if data[names + start : data.index(0, names + start)] == name.encode():
            struct.pack_into("<HQ", data, entry + 6, 0, 0)  # section and value: undefined
            copy.write_bytes(data)
            copy.chmod(0o755)
            return
    raise AssertionError(f"{library} does not define {name}")


@pytest.fixture(scope="module")
def needed_by_torch() -> list[str]:
    """NCCL's functions that torch's libraries refer to."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    names: set[str] = set()
    for library in sorted((Path(spec.origin).parent / "lib").glob("libtorch_*.so")):
        names |= {name for name in nccl_support.symbols(library, defined=False) if name.startswith("nccl")}
    if not names:
        pytest.skip("this torch was built without NCCL")
    return sorted(names)


def import_torch_without(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    for library in (*SHIM_NAMES, AUDIT_NAME):
        if not (folder / library).exists():
            (folder / library).symlink_to(libraries() / library)
    (folder / "libprism_nccl.so").unlink()
    if name:
        without_symbol(libraries() / "libprism_nccl.so", name, folder / "libprism_nccl.so")
    else:
        shutil.copy(libraries() / "libprism_nccl.so", folder)
    environment = nccl_support.environment()
    environment |= loader_variables([folder / library for library in SHIM_NAMES], {})
    command = [sys.executable, "-c", "import torch; print('imported')"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.torch
def test_torch_needs_every_function_it_refers_to(needed_by_torch: list[str], tmp_path: Path) -> None:
    """Removes functions in turn: a seeded few, all of them with PRISM_TEST_ALL_SYMBOLS=1 (half a minute)."""
    assert len(needed_by_torch) == 51 or metadata.version("torch").split("+")[0] != "2.14.1"
    chosen: Any = needed_by_torch
    if os.environ.get("PRISM_TEST_ALL_SYMBOLS") != "1":
        chosen = random.Random(20260101).sample(needed_by_torch, 3)
    whole = import_torch_without("", tmp_path)
    assert (whole.returncode, whole.stdout) == (0, "imported\n"), whole.stderr
    silent = []
    for name in chosen:
        child = import_torch_without(name, tmp_path)
        if child.returncode == 0 or f"undefined symbol: {name}" not in child.stderr:
            silent.append((name, child.stderr[-200:]))
    assert not silent, f"torch is imported without {json.dumps(silent)}"
