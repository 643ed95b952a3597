"""Slim torch: the ELF reader, the stand-ins and the torch install, against libraries built here with gcc."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_slim() -> ModuleType:
    """The module by its path: it must work where the package's extension is not built."""
    spec = importlib.util.spec_from_file_location("slim", ROOT / "python" / "prism_core" / "slim.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules["slim"] = module
    spec.loader.exec_module(module)
    return module


slim = load_slim()
NEEDS_GCC = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def compile_library(target: Path, source: str, *options: str) -> Path:
    """Build a shared object from C text."""
    code = target.with_suffix(".c")
    code.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(target), str(code), *options], check=True)
    return target


@pytest.fixture
def client(tmp_path: Path) -> Path:
    """A library that needs libcublas.so.13 (versions, a variable) and libnccl.so.2 (no versions); both are gone."""
    folder = tmp_path / "lib"
    folder.mkdir()
    script = tmp_path / "cublas.map"
    script.write_text("libcublas.so.13 { global: cublas*; local: *; };")
    cublas = compile_library(
        folder / "libcublas.so.13",
        "int cublasSdot_v2(void) { return 0; } int cublasUnused(void) { return 0; } int cublasTable[4];",
        "-Wl,-soname,libcublas.so.13",
        f"-Wl,--version-script,{script}",
    )
    nccl = compile_library(folder / "libnccl.so.2", "int ncclSend(void) { return 0; }", "-Wl,-soname,libnccl.so.2")
    source = """
        extern int cublasSdot_v2(int), ncclSend(void), cublasTable[4];
        extern int ncclFuture(void) __attribute__((weak));
        int dot(int n) { return cublasSdot_v2(n); }
        int send(void) { return ncclSend(); }
        int table(void) { return cublasTable[2]; }
        int future(void) { return ncclFuture ? 1 : 0; }
    """
    library = compile_library(
        folder / "client.so", source, str(cublas), str(nccl), "-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags"
    )
    for path in (cublas, nccl):
        path.unlink()
    return library


def call(library: Path, expression: str, preload: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Evaluate ``expression`` of ``c`` (the loaded library) in a fresh interpreter."""
    environment = {**os.environ, **({"LD_PRELOAD": str(preload)} if preload else {})}
    text = f"import ctypes; c = ctypes.CDLL({str(library)!r}); print({expression})"
    return subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False)


@NEEDS_GCC
def test_elf_reader_sees_names_versions_and_search_path(client: Path) -> None:
    elf = slim.read_elf(client)
    assert {"libcublas.so.13", "libnccl.so.2"} <= set(elf.needed)
    assert elf.search_path == ["$ORIGIN"]
    symbols = {symbol.name: symbol for symbol in elf.undefined}
    assert (symbols["cublasSdot_v2"].library, symbols["cublasSdot_v2"].version) == ("libcublas.so.13",) * 2
    assert not symbols["cublasSdot_v2"].is_data
    assert symbols["cublasTable"].is_data
    assert symbols["ncclSend"].version is None
    assert symbols["ncclFuture"].is_weak


@NEEDS_GCC
def test_elf_reader_agrees_with_readelf(client: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    target = client
    output = subprocess.run(["readelf", "-W", "--dyn-syms", target], capture_output=True, text=True, check=True).stdout
    expected = {
        line.split()[7].partition("@")[0] for line in output.splitlines() if " UND " in line and len(line.split()) > 7
    }
    assert {symbol.name for symbol in slim.read_elf(target).undefined} == expected


@pytest.mark.parametrize("content", [b"", b"not an ELF file", b"\x7fELF\x01\x01" + b"\0" * 80, b"\x7fELF\x02\x01\x01"])
def test_elf_reader_refuses_other_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(content)
    with pytest.raises(slim.SlimError):
        slim.read_elf(path)


@NEEDS_GCC
def test_elf_reader_refuses_a_truncated_library(client: Path) -> None:
    data = client.read_bytes()
    for size in range(64, len(data), 997):
        client.write_bytes(data[:size])
        try:
            slim.read_elf(client)
        except slim.SlimError:
            continue


@NEEDS_GCC
def test_plan_takes_used_symbols_only_and_leaves_weak_ones(client: Path) -> None:
    cublas, nccl = slim.plan([client])
    assert cublas.functions == {"cublasSdot_v2": "libcublas.so.13"}
    assert cublas.data == {"cublasTable": "libcublas.so.13"}
    assert nccl.functions == {"ncclSend": None}


@NEEDS_GCC
def test_missing_function_names_itself_once_and_fails(client: Path) -> None:
    assert call(client, "0").returncode != 0
    slim.build_stand_ins([client], client.parent)
    result = call(client, "c.dot(1), c.dot(2), c.send(), c.table(), c.future()")
    assert result.stdout.strip() == "15 15 5 0 0"
    assert result.stderr.count("cublasSdot_v2 was called, but no emulated device is preloaded") == 1
    assert "ncclSend" in result.stderr


@NEEDS_GCC
def test_preloaded_device_wins_by_linking_and_by_handle(client: Path, tmp_path: Path) -> None:
    slim.build_stand_ins([client], client.parent)
    source = """
        #include <stdio.h>
        int cublasSdot_v2(int n) { return 100 + n; }
        void prism_unsupported_call(const char *name) { printf("unsupported %s\\n", name); fflush(stdout); }
    """
    device = compile_library(tmp_path / "device.so", source)
    handle = f"ctypes.CDLL({str(client.parent / 'libcublas.so.13')!r})"
    result = call(client, f"c.dot(7), {handle}.cublasSdot_v2(8), c.send()", device)
    assert result.stdout.split("\n")[:2] == ["unsupported ncclSend", "107 108 5"]
    assert result.stderr == ""


@NEEDS_GCC
def test_second_run_changes_nothing(client: Path) -> None:
    slim.build_stand_ins([client], client.parent)
    before = {path.name: path.stat().st_mtime_ns for path in client.parent.iterdir()}
    report = slim.build_stand_ins([client], client.parent)
    assert report == ["libcublas.so.13: in place", "libnccl.so.2: in place"]
    assert {path.name: path.stat().st_mtime_ns for path in client.parent.iterdir()} == before


@NEEDS_GCC
def test_more_files_give_more_symbols(client: Path, tmp_path: Path) -> None:
    slim.build_stand_ins([client], client.parent)
    other = compile_library(tmp_path / "other.so", "extern int ncclRecv(void); int recv(void) { return ncclRecv(); }")
    report = slim.build_stand_ins([client, other], client.parent)
    assert report == ["libcublas.so.13: in place", "libnccl.so.2: built, 2 functions, 0 data symbols"]


@NEEDS_GCC
def test_parts_of_cudnn_come_with_its_main_library(tmp_path: Path) -> None:
    parts = [
        compile_library(
            tmp_path / f"lib{name}.so.9", f"int {symbol}(void) {{ return 0; }}", f"-Wl,-soname,lib{name}.so.9"
        )
        for name, symbol in [("cudnn", "cudnnCreate"), ("cudnn_graph", "cudnnUnused")]
    ]
    framework = tmp_path / "framework.so"
    source = "extern int cudnnCreate(void); int create(void) { return cudnnCreate(); }"
    compile_library(framework, source, str(parts[0]), "-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags")
    # Another library is linked to a part that only its own loader would find, and looks a function up by name.
    source = 'const char *wanted = "cudnnLookedUp"; const char *no = "cudnn is not a name";'
    client = compile_library(tmp_path / "client.so", source, "-Wl,--no-as-needed", str(parts[1]))
    for path in parts:
        path.unlink()
    assert slim.looked_up_names(client) == ["cudnnLookedUp"]
    report = slim.build_stand_ins([framework, client], tmp_path, [client])
    assert report == [
        "libcudnn_graph.so.9: built, 0 functions, 0 data symbols",
        "libcudnn.so.9: built, 2 functions, 0 data symbols",
    ]
    result = call(framework, f"c.create(), ctypes.CDLL({str(client)!r}) is not None")
    assert (result.stdout.strip(), result.returncode) == ("3000 True", 0), result.stderr
    assert slim.build_stand_ins([framework, client], tmp_path, [client])[1] == "libcudnn.so.9: in place"


@NEEDS_GCC
def test_remove_takes_only_what_was_built(client: Path) -> None:
    slim.build_stand_ins([client], client.parent)
    (client.parent / "libnccl.so.2").write_bytes(b"the real library came later")
    report = slim.remove_stand_ins(client.parent)
    assert report[0] == "libcublas.so.13: removed"
    assert report[1].startswith("libnccl.so.2: left alone")
    assert (client.parent / "libnccl.so.2").read_bytes() == b"the real library came later"
    assert not (client.parent / "libcublas.so.13").exists()
    assert not (client.parent / slim.MANIFEST_NAME).exists()


@NEEDS_GCC
def test_a_real_library_is_never_overwritten(client: Path) -> None:
    real = compile_library(
        client.parent / "libnccl.so.2", "int ncclSend(void) { return 42; }", "-Wl,-soname,libnccl.so.2"
    )
    content = real.read_bytes()
    assert [line.partition(":")[0] for line in slim.build_stand_ins([client], client.parent)] == ["libcublas.so.13"]
    assert real.read_bytes() == content


@NEEDS_GCC
def test_an_existing_file_off_the_search_path_is_not_overwritten(client: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "libcublas.so.13").write_bytes(b"mine")
    with pytest.raises(slim.SlimError, match="not overwritten"):
        slim.build_stand_ins([client], other)
    assert (other / "libcublas.so.13").read_bytes() == b"mine"


@NEEDS_GCC
def test_stand_in_goes_when_the_real_library_comes(client: Path, tmp_path: Path) -> None:
    slim.build_stand_ins([client], client.parent)
    real = tmp_path / "real"
    real.mkdir()
    (real / "libnccl.so.2").write_bytes(b"real")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(real))
        report = slim.build_stand_ins([client], client.parent)
    assert report[0] == "libcublas.so.13: in place"
    assert report[1].startswith("libnccl.so.2: removed")
    assert not (client.parent / "libnccl.so.2").exists()


@NEEDS_GCC
def test_no_compiler_is_a_clear_error(client: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(slim.SlimError, match="gcc"):
        slim.build_stand_ins([client], client.parent)


def test_damaged_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / slim.MANIFEST_NAME).write_text('{"format": 1}')
    with pytest.raises(slim.SlimError, match="damaged"):
        slim.remove_stand_ins(tmp_path)
    (tmp_path / slim.MANIFEST_NAME).write_text('{"format": 99, "libraries": {}}')
    with pytest.raises(slim.SlimError, match="format"):
        slim.remove_stand_ins(tmp_path)


def test_cpu_only_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(slim.SlimError, match="CPU-only"):
        slim.torch_libraries(tmp_path)


def test_missing_torch_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(slim, "installed_torch", lambda: None)
    assert slim.main(["--no-install"]) == 1
    assert "torch is not installed" in capsys.readouterr().err


def test_pure_requirements_leave_the_nvidia_ones_out() -> None:
    requires = [
        "filelock",
        "typing-extensions>=4.10.0",
        'nvidia-nccl-cu13==2.30.7; platform_system == "Linux"',
        'triton~=3.8.0; platform_system == "Linux"',
        'pyyaml; extra == "pyyaml"',
        "Jinja2",
    ]
    assert slim.pure_requirements(requires) == ["filelock", "typing-extensions>=4.10.0", "Jinja2"]


def test_a_requirement_is_satisfied_by_its_version_or_a_later_one() -> None:
    version = metadata.version("pytest")
    assert slim.is_satisfied("pytest")
    assert slim.is_satisfied(f"pytest>={version}")
    assert not slim.is_satisfied("pytest>=9999.1")
    assert not slim.is_satisfied("no-such-distribution")


@pytest.mark.parametrize(
    ("soname", "stem"),
    [
        ("libcublasLt.so.13", "libcublasLt"),
        ("libcublas.so", "libcublas"),
        ("libcuda.so.1", "libcuda"),
        ("libcusparseLt.so.0", "libcusparseLt"),
        ("libcudnn_graph.so.9", "libcudnn_graph"),
        ("libcudnn.so.9", "libcudnn"),
        ("libcuda-tools.so.1", None),
        ("libstdc++.so.6", None),
    ],
)
def test_soname_belongs_to_one_family(soname: str, stem: str | None) -> None:
    family = slim.family_of(soname)
    assert (family.stem if family else None) == stem


def test_runs_as_a_plain_script() -> None:
    script = ROOT / "python" / "prism_core" / "slim.py"
    result = subprocess.run([sys.executable, "-I", str(script), "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "--remove" in result.stdout


def has_slim_torch() -> bool:
    try:
        package = Path(str(metadata.distribution("torch").locate_file("torch")))
    except metadata.PackageNotFoundError:
        return False
    return (package / "lib" / slim.MANIFEST_NAME).exists()


@pytest.mark.torch
@pytest.mark.skipif(not has_slim_torch(), reason="needs the slim torch install")
def test_torch_trains_on_the_cpu_and_sees_no_device() -> None:
    program = """
import torch
assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)
losses = []
for _ in range(50):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 4, losses
"""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "prism" not in result.stderr


@pytest.mark.torch
@pytest.mark.skipif(not has_slim_torch(), reason="needs the slim torch install")
def test_unsupported_driver_call_has_a_body() -> None:
    found = slim.installed_torch()
    assert found is not None
    library = ctypes.CDLL(str(found[1] / "lib" / "libcudart.so.13"))
    count = ctypes.c_int(-1)
    assert library.cudaGetDeviceCount(ctypes.byref(count)) == 35
    assert count.value == 0
