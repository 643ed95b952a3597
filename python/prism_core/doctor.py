"""`prism doctor`: says whether programs can be emulated here, and if not, what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from prism_core import _native, catching
from prism_core.environment import (
    AUDIT_NAME,
    ENV_AUDIT,
    REAL_SHIM_NAMES,
    SHIM_FOLDER,
    SHIM_NAMES,
    preload_variable,
    shim_problem,
)
from prism_core.errors import ShimError

SESSION_SYMBOL = "prism_session_table_v1"
State = Literal["ok", "warning", "error"]

#: Run in a child under the preload: which libraries did the loader really map, and is the session's entry point there?
_PROBE = f"""
import ctypes, json
maps = open("/proc/self/maps").read()
names = {list(SHIM_NAMES)!r}
found = hasattr(ctypes.CDLL(None), {SESSION_SYMBOL!r})
print(json.dumps({{"mapped": [name for name in names if "/" + name in maps], "symbol": found}}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    state: State
    detail: str


def examine(folder: Path = SHIM_FOLDER) -> list[Finding]:
    """Looks at everything a run depends on."""
    findings = [_shim(folder / name) for name in (*SHIM_NAMES, REAL_SHIM_NAMES[0], AUDIT_NAME)]
    findings += [probe_preload(folder), probe_catching(folder)]
    findings += _versions()
    checks: list[Callable[[], Finding]] = [_profiles, _second_nccl, _memfd, _open_files, _devices]
    return findings + [check() for check in checks]


def report(findings: list[Finding]) -> dict[str, Any]:
    """The document `prism doctor --json` prints."""
    return {
        "ok": all(finding.state != "error" for finding in findings),
        "preload_in_place": any(finding.name == "preload" and finding.state == "ok" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "build": {key: str(value) for key, value in sorted(_native.build_info().items())},
    }


def _shim(path: Path) -> Finding:
    problem = shim_problem(path)
    return Finding(path.name, "error", problem) if problem else Finding(path.name, "ok", str(path))


def probe_preload(folder: Path = SHIM_FOLDER) -> Finding:
    """Looks at what a child under LD_PRELOAD mapped: the loader merely warns about what it cannot load."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PRISM_")}
    libraries = [folder / name for name in SHIM_NAMES]
    environment["LD_PRELOAD"] = preload_variable(libraries, environment.get("LD_PRELOAD"))
    try:
        child = subprocess.run(
            [sys.executable, "-S", "-c", _PROBE],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("preload", "error", "a child under LD_PRELOAD hangs")
    if child.returncode != 0:
        detail = f"a child under LD_PRELOAD ends with {child.returncode}: {_last(child.stderr)}"
        return Finding("preload", "error", detail)
    seen = json.loads(child.stdout.splitlines()[-1])
    missing = [name for name in SHIM_NAMES if name not in seen["mapped"]]
    if missing:
        return Finding("preload", "error", f"not in place: {', '.join(missing)} not mapped; {_last(child.stderr)}")
    if not seen["symbol"]:
        return Finding("preload", "error", f"in place, but {SESSION_SYMBOL} is not exported: rebuild the libraries")
    return Finding("preload", "ok", f"{', '.join(SHIM_NAMES)} are mapped in a child")


def probe_catching(folder: Path = SHIM_FOLDER) -> Finding:
    """Tries in a child every way a program can get at NCCL and the driver."""
    try:
        ways = catching.probe(folder)
    except ShimError as error:
        return Finding("catching", "error", str(error))
    caught, missed = ([way for way, is_ours in ways.items() if is_ours is wanted] for wanted in (True, False))
    if not missed:
        note = catching.libc_problem()
        detail = f"preload and audit lead here from: {', '.join(caught)}"
        return Finding("catching", "warning" if note else "ok", f"{detail}; {note}" if note else detail)
    by_audit = set(missed) <= set(catching.BY_AUDIT)
    if by_audit and os.environ.get(ENV_AUDIT) == "off":
        detail = f"{ENV_AUDIT}=off; not caught (a second NCCL then ends the program): {', '.join(missed)}"
        return Finding("catching", "warning", detail)
    reason = (by_audit and catching.libc_problem()) or f"is {AUDIT_NAME if by_audit else 'the preload'} in place?"
    return Finding("catching", "error", f"not caught: {', '.join(missed)}; {reason}")


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"


def _versions() -> list[Finding]:
    prism = importlib.metadata.version("prism_core") if _is_installed("prism_core") else "not installed (source tree)"
    findings = [
        Finding("prism", "ok", prism),
        Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}"),
    ]
    if _is_installed("torch"):
        findings.append(Finding("torch", "ok", importlib.metadata.version("torch")))
    else:
        detail = "not installed; replay and inspect work; for collect and emulate: `python -m prism_core.slim`"
        findings.append(Finding("torch", "warning", detail))
    return findings


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _profiles() -> Finding:
    return Finding("device", "ok", f"emulated; profiles: {', '.join(_native.profile_names())}")


def _second_nccl() -> Finding:
    """A real libnccl in PyTorch's tree is what the preload replaces; one that is linked in statically it cannot."""
    if not _is_installed("torch"):
        return Finding("libnccl", "ok", "no PyTorch, no libnccl")
    found = sorted(
        str(file.locate())
        for name in importlib.metadata.packages_distributions().get("nvidia", [])
        for file in importlib.metadata.files(name) or []
        if file.name.startswith("libnccl.so")
    )
    if found:
        return Finding("libnccl", "ok", f"a real one is installed and is replaced by the preload: {found[0]}")
    return Finding("libnccl", "ok", "no second libnccl installed")


def _memfd() -> Finding:
    try:
        descriptor = os.memfd_create("prism-doctor")
        os.ftruncate(descriptor, 1 << 20)
        os.close(descriptor)
    except OSError as error:
        return Finding("shared memory", "error", f"memfd does not work here: {error.strerror}")
    return Finding("shared memory", "ok", "memfd works")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state: State = "ok" if soft >= 1024 else "warning"
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        return Finding("limits", "error", f"address space is limited to {space} bytes: `ulimit -v unlimited`")
    return Finding("limits", state, f"open files {soft} (hard {hard}), address space unlimited")


def _devices() -> Finding:
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    text = f"{len(devices)} real GPUs (not used by the emulated device)" if devices else "no real GPU, none needed"
    return Finding("gpus", "ok", text)
