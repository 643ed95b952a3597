"""Slim torch: the CUDA build of PyTorch without the NVIDIA libraries.

The CUDA wheel of torch needs about a dozen NVIDIA libraries only to be *loaded*. On a machine without a GPU they would
be several gigabytes of code that never runs. This module installs torch without them and puts small **stand-ins** in
their place:

1. ``pip install --no-deps torch==VERSION`` plus torch's pure Python dependencies, when torch is missing;
2. read the ELF files of ``torch/lib``: which NVIDIA libraries are needed and cannot be found, and which of their
   symbols are used;
3. build one shared object per missing library, with its SONAME, its version nodes and those symbols.

A stand-in's function jumps to the function of the same name of the preloaded emulated device when there is one.
Otherwise it names itself (``prism_unsupported_call``, or one line on stderr) and returns its library's "not supported"
code, so a missing function can never be mistaken for one that worked. Without a preload ``import torch`` works and
``torch.cuda.is_available()`` is ``False``.

Stand-ins lie in ``torch/lib``, the *last* place torch's own search path names: a real NVIDIA library installed later
wins. A manifest lists them; nothing that is not in it is ever overwritten or removed.

The module uses the standard library only and also runs as a plain script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

TORCH_VERSION = "2.14.1"
MANIFEST_NAME = "prism-standins.json"
MANIFEST_FORMAT = 1
PURE_DEPENDENCIES = ("filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec")


class SlimError(RuntimeError):
    """Slim torch cannot be set up; the message says what to do."""


# --- ELF -----------------------------------------------------------------------------------------------------------

_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 4, 5, 6, 14, 15, 29
_DT_GNU_HASH, _DT_VERSYM, _DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFE, 0x6FFFFFFF
_PT_LOAD, _PT_DYNAMIC = 1, 2
_STT_OBJECT, _STT_TLS = 1, 6
_STB_WEAK = 2


@dataclass(frozen=True, order=True)
class Undefined:
    """A symbol that an ELF file uses and does not define."""

    name: str
    library: str | None
    """SONAME the version of the reference names, ``None`` for a reference without a version."""
    version: str | None
    is_data: bool
    is_weak: bool


@dataclass
class ElfFile:
    """What the dynamic section of one shared object says about its neighbours."""

    path: Path
    soname: str | None = None
    needed: list[str] = field(default_factory=list)
    search_path: list[str] = field(default_factory=list)
    undefined: list[Undefined] = field(default_factory=list)


def read_elf(path: Path) -> ElfFile:
    """Read the dynamic section of a 64-bit little-endian ELF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _DynamicReader(path, data).read()
    except (struct.error, IndexError, ValueError) as error:
        raise SlimError(f"{path}: damaged ELF file ({error})") from error


class _DynamicReader:
    """Walks the dynamic section by program headers, as the loader does (section headers may be stripped)."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data
        if data[:6] != b"\x7fELF\x02\x01":
            raise SlimError(f"{path}: not a 64-bit little-endian ELF file")
        (offset,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        self.loads: list[tuple[int, int, int]] = []
        self.dynamic: dict[int, list[int]] = {}
        span = None
        for index in range(count):
            kind, _, file_offset, address, _, file_size = struct.unpack_from("<IIQQQQ", data, offset + index * size)
            if kind == _PT_LOAD:
                self.loads.append((address, file_size, file_offset))
            elif kind == _PT_DYNAMIC:
                span = (file_offset, file_size)
        if span is not None:
            for tag, value in struct.iter_unpack("<QQ", data[span[0] : span[0] + span[1]]):
                if tag == 0:
                    break
                self.dynamic.setdefault(tag, []).append(value)

    def read(self) -> ElfFile:
        elf = ElfFile(self.path)
        if _DT_STRTAB not in self.dynamic:
            return elf
        elf.needed = [self.text(value) for value in self.dynamic.get(_DT_NEEDED, [])]
        for tag in (_DT_RPATH, _DT_RUNPATH):
            for value in self.dynamic.get(tag, []):
                elf.search_path += [entry for entry in self.text(value).split(":") if entry]
        for value in self.dynamic.get(_DT_SONAME, []):
            elf.soname = self.text(value)
        elf.undefined = sorted(set(self.undefined_symbols()))
        return elf

    def at(self, address: int) -> int:
        """File offset of a virtual address."""
        for start, size, offset in self.loads:
            if start <= address < start + size:
                return offset + address - start
        raise SlimError(f"{self.path}: address {address:#x} is in no loaded segment")

    def table(self, tag: int) -> int:
        return self.at(self.dynamic[tag][0])

    def text(self, offset: int) -> str:
        start = self.table(_DT_STRTAB) + offset
        return self.data[start : self.data.find(b"\0", start)].decode("utf-8", "replace")

    def symbol_bound(self) -> int:
        """A symbol index below which every undefined symbol lies."""
        if _DT_HASH in self.dynamic:
            return int(struct.unpack_from("<II", self.data, self.table(_DT_HASH))[1])
        if _DT_GNU_HASH in self.dynamic:
            # The GNU table covers defined symbols only; they all follow the undefined ones.
            return int(struct.unpack_from("<II", self.data, self.table(_DT_GNU_HASH))[1])
        return 0

    def versions(self) -> dict[int, tuple[str, str]]:
        """Version index → (SONAME, version name) of every version the file needs."""
        found: dict[int, tuple[str, str]] = {}
        if _DT_VERNEED not in self.dynamic:
            return found
        entry = self.table(_DT_VERNEED)
        for _ in range(self.dynamic[_DT_VERNEEDNUM][0]):
            _, count, file, auxiliary, following = struct.unpack_from("<HHIII", self.data, entry)
            item = entry + auxiliary
            for _ in range(count):
                _, _, index, name, step = struct.unpack_from("<IHHII", self.data, item)
                found[index & 0x7FFF] = (self.text(file), self.text(name))
                item += step
            entry += following
        return found

    def undefined_symbols(self) -> Iterator[Undefined]:
        if _DT_SYMTAB not in self.dynamic:
            return
        symbols, versions = self.table(_DT_SYMTAB), self.versions()
        version_table = self.table(_DT_VERSYM) if _DT_VERSYM in self.dynamic else None
        for index in range(1, self.symbol_bound()):
            name, info, _, section = struct.unpack_from("<IBBH", self.data, symbols + 24 * index)
            if section != 0 or name == 0:
                continue
            library = version = None
            if version_table is not None:
                (number,) = struct.unpack_from("<H", self.data, version_table + 2 * index)
                library, version = versions.get(number & 0x7FFF, (None, None))
            is_data = info & 15 in (_STT_OBJECT, _STT_TLS)
            yield Undefined(self.text(name), library, version, is_data, info >> 4 == _STB_WEAK)


# --- NVIDIA libraries ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """One NVIDIA library: how its SONAME and its symbols look and how it says "not supported"."""

    stem: str
    symbols: str
    status: int

    def has_soname(self, soname: str) -> bool:
        """Whether ``soname`` is this library, with or without version numbers."""
        return re.fullmatch(re.escape(self.stem) + r"\.so(\.\d+)*", soname) is not None


CUDNN_PARTS = (
    "adv", "cnn", "engines_precompiled", "engines_runtime_compiled", "engines_tensor_ir", "ext", "graph", "heuristic",
    "ops",
)  # fmt: skip

# Order matters: the first matching pattern owns a symbol that carries no version.
FAMILIES = (
    Family("libcublasLt", r"cublasLt", 15),
    Family("libcublas", r"cublas", 15),
    Family("libcudnn", r"cudnn", 3000),
    # Parts of cuDNN: linked by their names, called through the library above.
    *(Family(f"libcudnn_{part}", r"(?!)", 3000) for part in CUDNN_PARTS),
    Family("libcusparseLt", r"cusparseLt", 10),
    Family("libcusparse", r"cusparse", 10),
    Family("libcusolver", r"cusolver", 9),
    Family("libcufft", r"cufft", 16),
    Family("libcurand", r"curand", 999),
    Family("libcupti", r"cupti", 27),
    Family("libcufile", r"cuFile", 5007),
    Family("libnvrtc", r"nvrtc", 11),
    Family("libnvJitLink", r"nvJitLink|__nvJitLink", 6),
    Family("libnccl", r"p?nccl[A-Z]", 5),
    Family("libnvshmem_host", r"nvshmem", 3),
    Family("libcudart", r"cuda[A-Z]|__cuda[A-Z]", 801),
    Family("libcuda", r"cu[A-Z]", 801),
)


def family_of(soname: str) -> Family | None:
    """The NVIDIA library with this SONAME."""
    return next((family for family in FAMILIES if family.has_soname(soname)), None)


# Answers that must be true even without an emulated device: torch asks for them while it is loaded or while it finds
# out that there is no device. 35 is cudaErrorInsufficientDriver; torch takes it for "no driver" if the version is 0.
QUIET_ANSWERS = {
    "cudaGetDeviceCount": "int $(int *count) { if (count) *count = 0; return 35; }",
    "cudaDriverGetVersion": "int $(int *version) { if (version) *version = 0; return 0; }",
    "cudaGetLastError": "int $(void) { return 0; }",
    "cudaPeekAtLastError": "int $(void) { return 0; }",
    "__cudaRegisterFatBinary": "void **$(void *image) { static void *handle[8]; (void)image; return handle; }",
    "__cudaRegisterFatBinaryEnd": "void $(void **handle) { (void)handle; }",
    "__cudaUnregisterFatBinary": "void $(void **handle) { (void)handle; }",
    "__cudaRegisterFunction": "void $(void) { }",
    "__cudaRegisterVar": "void $(void) { }",
    "__cudaInitModule": "char $(void **handle) { (void)handle; return 0; }",
    "cudnnGetLastErrorString": "void $(char *text, unsigned long size) { if (text && size) *text = 0; }",
}
_TEXT_ANSWER = 'const char *$(int code) { (void)code; return "no emulated device is preloaded ($N is a stand-in)"; }'
_TEXT_FUNCTION = re.compile(r"(cuda|cudnn|cublas|cublasLt|cusparse|nvrtc|nccl)Get(ErrorString|ErrorName|Status\w+)")
# These return a pointer or a version number: zero is their way to say no.
_ZERO_FUNCTION = re.compile(
    r"nvshmem_malloc|nvshmem_ptr|nvshmemx_mc_ptr|(cudnn|cublasLt)Get(Cudart)?Version|ncclGetLastError"
)


# --- generated source ----------------------------------------------------------------------------------------------

_PRELUDE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/uio.h>

extern void prism_unsupported_call(const char *name) __attribute__((weak));

/* Names the call, once per function when no emulated device listens. */
static long prism_missing(const char *name, char *said, long status) {
    if (prism_unsupported_call) {
        prism_unsupported_call(name);
    } else if (!*said) {
        *said = 1;
        struct iovec parts[3] = {{"prism: ", 7}, {(void *)name, strlen(name)},
                                 {" was called, but no emulated device is preloaded\n", 50}};
        if (writev(2, parts, 3) < 0) return status;
    }
    return status;
}
"""

_TRAMPOLINES = r"""
/* Every exported function is one jump through its slot; arguments stay where they are. */
#if defined(__x86_64__)
#define EXPORT(name, n) __asm__(".text\n.p2align 4\n.globl " #name "\n.type " #name ",@function\n" #name ":\n" \
    "prism_self_" #n ":\n endbr64\n jmp *prism_slots+8*" #n "(%rip)\n.size " #name ",.-" #name "\n");
#elif defined(__aarch64__)
#define EXPORT(name, n) __asm__(".text\n.p2align 4\n.globl " #name "\n.type " #name ",%function\n" #name ":\n" \
    "prism_self_" #n ":\n adrp x16, prism_slots+8*" #n "\n ldr x16, [x16, #:lo12:prism_slots+8*" #n "]\n br x16\n" \
    ".size " #name ",.-" #name "\n");
#else
#error "stand-ins know x86-64 and AArch64 only"
#endif
"""

_CONSTRUCTOR = r"""
/* A preloaded emulated device comes first in the global scope; send also those here who looked us up by handle. */
__attribute__((constructor)) static void prism_forward(void) {
    for (unsigned long i = 0; i < sizeof prism_slots / sizeof *prism_slots; i++) {
        void *target = dlsym(RTLD_DEFAULT, prism_names[i]);
        if (target && target != prism_selves[i]) prism_slots[i] = target;
    }
}
"""


@dataclass
class StandIn:
    """A library to be built: its SONAME and the symbols it must define."""

    soname: str
    family: Family
    functions: dict[str, str | None] = field(default_factory=dict)
    """Name → version node (``None``: referenced without a version)."""
    data: dict[str, str | None] = field(default_factory=dict)
    companions: list[str] = field(default_factory=list)
    """SONAMEs of stand-ins beside it that are loaded with it."""

    def source(self) -> str:
        """The C source of the library."""
        names = sorted(self.functions)
        lines = [_PRELUDE]
        lines += [self._body(name, number) for number, name in enumerate(names)]
        lines += [f"char {name}[4096];" for name in sorted(self.data)]
        if names:
            lines += self._exports(names)
        return "\n".join(lines) + "\n"

    @staticmethod
    def _exports(names: list[str]) -> list[str]:
        """The table of slots and one exported jump per function."""
        numbers = range(len(names))
        hidden = '__attribute__((visibility("hidden")))'
        bodies = ", ".join(f"(void *)prism_body_{n}" for n in numbers)
        quoted = ", ".join(f'"{name}"' for name in names)
        selves = ", ".join(f"prism_self_{n}" for n in numbers)
        return [
            f"{hidden} void *prism_slots[] = {{ {bodies} }};",
            f"static const char *const prism_names[] = {{ {quoted} }};",
            *(f"extern char prism_self_{n}[] {hidden};" for n in numbers),
            f"static char *const prism_selves[] = {{ {selves} }};",
            _TRAMPOLINES,
            *(f"EXPORT({name}, {n})" for n, name in enumerate(names)),
            _CONSTRUCTOR,
        ]

    def _body(self, name: str, number: int) -> str:
        own = f"prism_body_{number}"
        quiet = QUIET_ANSWERS.get(name) or (_TEXT_ANSWER if _TEXT_FUNCTION.fullmatch(name) else None)
        if quiet is not None:
            return "static " + quiet.replace("$N", name).replace("$", own)
        status = 0 if _ZERO_FUNCTION.fullmatch(name) else self.family.status
        return f'static long {own}(void) {{ static char said; return prism_missing("{name}", &said, {status}); }}'

    def version_script(self) -> str:
        """The linker version script: one node per version, unversioned names in the first."""
        nodes: dict[str, list[str]] = {}
        symbols = {**self.functions, **self.data}
        first = min((version for version in symbols.values() if version is not None), default=None)
        for name, version in sorted(symbols.items()):
            nodes.setdefault(version or first or "", []).append(name)
        text = ""
        for index, (version, names) in enumerate(sorted(nodes.items())):
            hidden = " local: *;" if index == 0 else ""
            text += f"{version} {{ global: {' '.join(f'{name};' for name in names)}{hidden} }};\n"
        return text or "{ local: *; };\n"


def _search_directories(elf: ElfFile) -> list[Path]:
    """Where the loader would look for what ``elf`` needs, in order."""
    origin = str(elf.path.resolve().parent)
    directories = [Path(re.sub(r"\$ORIGIN|\$\{ORIGIN\}", lambda _: origin, entry)) for entry in elf.search_path]
    directories += [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
    machine = "aarch64-linux-gnu" if os.uname().machine == "aarch64" else "x86_64-linux-gnu"
    for root in ("/lib", "/usr/lib"):
        directories += [Path(root) / machine, Path(root + "64"), Path(root)]
    return directories


def _loader_cache() -> frozenset[str]:
    """SONAMEs in the loader's cache; empty where there is no ``ldconfig``."""
    tool = shutil.which("ldconfig", path=os.environ.get("PATH", "") + ":/sbin:/usr/sbin")
    if tool is None:
        return frozenset()
    result = subprocess.run([tool, "-p"], capture_output=True, text=True, check=False, env=_child_environment())
    return frozenset(re.findall(r"^\t(\S+) \(", result.stdout, re.MULTILINE))


def plan(files: Sequence[Path], ours: frozenset[Path] = frozenset(), looked_up: Sequence[Path] = ()) -> list[StandIn]:
    """The stand-ins that ``files`` need: every NVIDIA library that is missing, with the symbols used.

    ``ours`` are stand-ins built earlier; they do not count as found. Of the files ``looked_up``, names of functions
    among their strings count as used, too. A stand-in comes after those it loads.
    """
    elves = [read_elf(path) for path in files]
    cache = _loader_cache()
    missing: dict[str, StandIn] = {}
    for elf in elves:
        directories = _search_directories(elf)
        for soname in elf.needed:
            family = family_of(soname)
            if family is None or soname in missing or soname in cache:
                continue
            places = [directory / soname for directory in directories]
            if not any(place.exists() and place.resolve() not in ours for place in places):
                missing[soname] = StandIn(soname, family)
    for elf in elves:
        for symbol in elf.undefined:
            _assign(symbol, missing)
    for path in looked_up:
        _assign_names(looked_up_names(path), missing)
    # torch loads the main part of cuDNN; the others are on nobody else's search path.
    parts = sorted(soname for soname, item in missing.items() if item.family.stem.startswith("libcudnn_"))
    for item in missing.values():
        if item.family.stem == "libcudnn":
            item.companions = parts
    return sorted(missing.values(), key=lambda item: (bool(item.companions), item.soname))


def _assign_names(names: Iterable[str], missing: dict[str, StandIn]) -> None:
    """Give functions that are looked up by name to the missing libraries they belong to."""
    for name in names:
        family = next((entry for entry in FAMILIES if re.match(entry.symbols, name)), None)
        owner = next((item for item in missing.values() if item.family is family), None)
        if owner is not None:
            owner.functions.setdefault(name, None)


def looked_up_names(path: Path) -> list[str]:
    """Names of NVIDIA functions among the strings of a file: what it may look up with `dlsym`."""
    pattern = re.compile(rb"\0((?:cudnn|cublas|cublasLt|nvrtc|cufft|curand)[A-Z][A-Za-z0-9_]{3,80})(?=\0)")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return sorted({match[1].decode("ascii") for match in pattern.finditer(data)})


def _assign(symbol: Undefined, missing: dict[str, StandIn]) -> None:
    """Give ``symbol`` to the missing library that owns it, if one does."""
    owner = missing.get(symbol.library) if symbol.library is not None else None
    if symbol.library is None and not symbol.is_weak:
        family = next((entry for entry in FAMILIES if re.match(entry.symbols, symbol.name)), None)
        owner = next((item for item in missing.values() if item.family is family), None)
    if owner is not None:
        table = owner.data if symbol.is_data else owner.functions
        table[symbol.name] = symbol.version or table.get(symbol.name)


# --- building and removing -----------------------------------------------------------------------------------------


def _child_environment() -> dict[str, str]:
    """The environment without a preload: tools must not load the emulated device."""
    return {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "LD_AUDIT")}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _compiler() -> str:
    for name in (os.environ.get("CC"), "gcc", "cc"):
        if name and shutil.which(name):
            return name
    raise SlimError("no C compiler: stand-ins are built with gcc; install it (or set CC)")


def _build(stand_in: StandIn, target: Path) -> None:
    """Compile ``stand_in`` and move it to ``target`` in one step."""
    with tempfile.TemporaryDirectory(prefix="prism-slim-") as folder:
        source, script, output = (Path(folder) / name for name in ("standin.c", "standin.map", "standin.so"))
        source.write_text(stand_in.source())
        script.write_text(stand_in.version_script())
        command = [_compiler(), "-shared", "-fPIC", "-O1", "-w", "-o", str(output), str(source)]
        command += [f"-Wl,-soname,{stand_in.soname}", f"-Wl,--version-script,{script}", "-Wl,-z,noexecstack", "-ldl"]
        if stand_in.companions:
            command += ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-L{target.parent}"]
            command += [f"-l:{name}" for name in stand_in.companions]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=_child_environment())
        if result.returncode != 0:
            raise SlimError(f"{stand_in.soname}: the compiler failed:\n{result.stderr[-2000:]}")
        partial = target.with_name(f".{target.name}.partial")
        shutil.copyfile(output, partial)
        partial.chmod(0o755)
        partial.replace(target)


def _read_manifest(directory: Path) -> dict[str, dict[str, str]]:
    """SONAME → {source, file} digests of the stand-ins in ``directory``."""
    path = directory / MANIFEST_NAME
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
        if content["format"] != MANIFEST_FORMAT:
            raise SlimError(f"{path}: unknown manifest format {content['format']!r}")
        libraries = content["libraries"].items()
        return {str(name): {"source": str(entry["source"]), "file": str(entry["file"])} for name, entry in libraries}
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise SlimError(f"{path}: damaged manifest ({error!r})") from error


def _write_manifest(directory: Path, libraries: dict[str, dict[str, str]]) -> None:
    text = json.dumps({"format": MANIFEST_FORMAT, "libraries": libraries}, indent=1, sort_keys=True)
    (directory / MANIFEST_NAME).write_text(text + "\n")


def _is_ours(directory: Path, soname: str, manifest: dict[str, dict[str, str]]) -> bool:
    """Whether the file with this name is the one the manifest speaks of, unchanged."""
    path = directory / soname
    return soname in manifest and path.is_file() and _digest(path.read_bytes()) == manifest[soname]["file"]


def build_stand_ins(files: Sequence[Path], directory: Path, looked_up: Sequence[Path] = ()) -> list[str]:
    """Build in ``directory`` the stand-ins that ``files`` need; returns one line per library saying what was done."""
    manifest = _read_manifest(directory)
    ours = {soname for soname in manifest if _is_ours(directory, soname, manifest)}
    report: list[str] = []
    libraries: dict[str, dict[str, str]] = {soname: manifest[soname] for soname in sorted(ours)}
    wanted = plan(files, frozenset((directory / soname).resolve() for soname in ours), looked_up)
    for stand_in in wanted:
        target = directory / stand_in.soname
        source = _digest("".join([stand_in.source(), stand_in.version_script(), *stand_in.companions]).encode())
        if stand_in.soname in ours and manifest[stand_in.soname]["source"] == source:
            report.append(f"{stand_in.soname}: in place")
            continue
        if target.exists() and stand_in.soname not in ours:
            raise SlimError(f"{target}: exists and is not a stand-in of ours; not overwritten")
        _build(stand_in, target)
        libraries[stand_in.soname] = {"source": source, "file": _digest(target.read_bytes())}
        _write_manifest(directory, libraries)
        counts = f"{len(stand_in.functions)} functions, {len(stand_in.data)} data symbols"
        report.append(f"{stand_in.soname}: built, {counts}")
    for soname in sorted(ours - {stand_in.soname for stand_in in wanted}):
        (directory / soname).unlink()
        del libraries[soname]
        _write_manifest(directory, libraries)
        report.append(f"{soname}: removed, the real library is there now or nobody needs it")
    return report


def remove_stand_ins(directory: Path) -> list[str]:
    """Remove the stand-ins in ``directory`` and their manifest; a file that was changed since stays."""
    manifest = _read_manifest(directory)
    report: list[str] = []
    for soname in sorted(manifest):
        if _is_ours(directory, soname, manifest):
            (directory / soname).unlink()
            report.append(f"{soname}: removed")
        else:
            report.append(f"{soname}: left alone, it is not the file that was built")
    (directory / MANIFEST_NAME).unlink(missing_ok=True)
    return report


# --- torch ---------------------------------------------------------------------------------------------------------


def installed_torch() -> tuple[str, Path] | None:
    """Version and package directory of the torch of this interpreter, without importing it."""
    try:
        distribution = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    package = Path(str(distribution.locate_file("torch")))
    return (distribution.version, package) if (package / "version.py").exists() else None


def _pip(arguments: Iterable[str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False, env=_child_environment(), stdout=sys.stderr).returncode != 0:
        raise SlimError(f"failed: {' '.join(command)}")


def pure_requirements(requires: Iterable[str]) -> list[str]:
    """Those of torch's own requirements that are pure Python, as pip takes them."""
    found = []
    for line in requires:
        requirement, _, marker = line.partition(";")
        name = re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
        if "extra" not in marker and re.sub(r"[-_.]+", "-", name).lower() in PURE_DEPENDENCIES:
            found.append(requirement.strip())
    return found


def install_torch(version: str = TORCH_VERSION) -> list[str]:
    """Install torch without its NVIDIA libraries unless a torch is there; returns what was done."""
    report = []
    found = installed_torch()
    if found is None:
        _pip(["--no-deps", f"torch=={version}"])
        report.append(f"torch {version}: installed without the NVIDIA libraries")
    elif found[0].partition("+")[0] != version.partition("+")[0]:
        advice = f"uninstall it or give --torch-version {found[0]}"
        raise SlimError(f"torch {found[0]} is installed, {version} was asked for; {advice}")
    else:
        report.append(f"torch {found[0]}: in place")
    missing = [line for line in pure_requirements(metadata.requires("torch") or []) if not is_satisfied(line)]
    if missing:
        _pip(missing)
        report.append(f"dependencies: installed {', '.join(missing)}")
    return report


def is_satisfied(requirement: str) -> bool:
    """Whether a distribution is installed, at least in the version that a ``name>=version`` line asks for."""
    name, _, wanted = requirement.partition(">=")
    try:
        found = metadata.version(name.strip())
    except metadata.PackageNotFoundError:
        return False
    numbers = [[int(number) for number in re.findall(r"\d+", text)] for text in (found, wanted)]
    return numbers[0] >= numbers[1]


def torch_libraries(package: Path) -> list[Path]:
    """The shared objects of the torch package that need NVIDIA libraries; fails for a CPU-only torch."""
    libraries = package / "lib"
    if not (libraries / "libtorch_cuda.so").exists():
        advice = f"uninstall it and install the CUDA build (torch=={TORCH_VERSION})"
        raise SlimError(f"{package}: this torch is CPU-only; {advice}")
    return [path for stem in ("libtorch", "libc10", "libcaffe2") for path in sorted(libraries.glob(f"{stem}*.so"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: install, build or remove."""
    parser = argparse.ArgumentParser(prog="prism_core.slim", description="Install torch without the NVIDIA libraries.")
    parser.add_argument("--torch-version", default=TORCH_VERSION, help="version to install (default: %(default)s)")
    parser.add_argument("--no-install", action="store_true", help="only build stand-ins for the torch that is there")
    parser.add_argument(
        "--also",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="serve this shared object too (repeatable)",
    )
    parser.add_argument("--remove", action="store_true", help="remove the stand-ins")
    options = parser.parse_args(arguments)
    try:
        if not options.no_install and not options.remove:
            print("\n".join(install_torch(options.torch_version)))
        found = installed_torch()
        if found is None:
            raise SlimError("torch is not installed for this interpreter; run without --no-install")
        libraries = found[1] / "lib"
        if options.remove:
            print("\n".join(remove_stand_ins(libraries)) or "no stand-ins")
        else:
            files = [*torch_libraries(found[1]), *options.also]
            print("\n".join(build_stand_ins(files, libraries, options.also)) or "nothing is missing")
    except (SlimError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
