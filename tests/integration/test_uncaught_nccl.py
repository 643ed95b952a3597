"""Runs of programs with NCCL code that the stand-in does not stand in for: they end, and `prism` says why."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
SOURCES = ROOT / "tests/shim/c"

PROGRAM = """
import ctypes, sys
when, path = sys.argv[1:]
driver = ctypes.CDLL("libcuda.so.1")
if when == "before":
    ctypes.CDLL(path)
assert driver.cuInit(0) == 0
print("the device is there", flush=True)
if when != "before":
    ctypes.CDLL(path)
if when == "training":
    ctypes.CDLL(None).prism_marker(1, None)  # as the framework hook does at the first iteration
    print("trained", flush=True)
"""


def build(folder: Path, name: str, *options: object) -> Path:
    library = folder / name
    subprocess.run(["gcc", "-shared", "-fPIC", *map(str, options), "-o", library], check=True)
    return library


def collect(prism: Callable[..., Any], folder: Path, when: str, library: Path) -> tuple[dict[str, Any], str]:
    """The error of a run and the output of its rank."""
    program, graph = folder / "program.py", folder / f"{when}.prism"
    program.write_text(PROGRAM)
    options = ["--world-size", 8, "--ranks", "3", "-o", graph]
    outcome = prism("collect", *options, "--", sys.executable, "-S", program, when, library)
    return outcome.error, graph.with_suffix(".logs").joinpath("rank-3.log").read_text()


@pytest.mark.parametrize("when", ["before", "training", "after"])
def test_a_library_with_nccl_linked_in_ends_the_run(when: str, prism: Callable[..., Any], tmp_path: Path) -> None:
    """Before the device is used: at once. Later: at the next mark of an iteration, or at the end of the process."""
    sources = [SOURCES / "framework.c", SOURCES / "other_nccl.c"]
    library = build(tmp_path, "libframework.so", "-Wl,-Bsymbolic", *sources)
    error, log = collect(prism, tmp_path, when, library)
    assert error["kind"] == "ShimError"
    assert f"rank 3: NCCL is linked statically into {library} (NCCL version 2.99.9+cuda13.0)" in error["message"]
    assert ("the device is there" in log) == (when != "before")
    assert "trained" not in log


def test_a_second_nccl_by_path_is_kept_out_or_ends_the_run(
    prism: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(tmp_path, "libnccl.so.2", SOURCES / "other_nccl.c")
    error, log = collect(prism, tmp_path, "before", library)
    # Kept out; the program has no iteration, which is another matter.
    assert "the device is there" in log and "second NCCL" not in error["message"]
    monkeypatch.setenv("PRISM_AUDIT", "off")
    error, _ = collect(prism, tmp_path, "before", library)
    assert error["kind"] == "ShimError"
    assert f"a second NCCL is loaded and its calls are not emulated: {library}" in error["message"]
