"""Where the NCCL stand-in is, and what a shared library exports and needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"


def shim() -> Path:
    """The built library: ``PRISM_SHIM_DIR``, the installed package, or cargo's target folder."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    folders = [ROOT / "python/prism_core/_shim", target / "release", target / "debug"]
    if "PRISM_SHIM_DIR" in os.environ:
        folders = [Path(os.environ["PRISM_SHIM_DIR"])]
    for folder in folders:
        if (folder / "libprism_nccl.so").exists():
            return folder / "libprism_nccl.so"
    pytest.fail(f"libprism_nccl.so is in none of {', '.join(map(str, folders))}: build the shims first")


def shared(name: str) -> Path:
    """A file of the shared data folder beside the checkout, or a skip."""
    path = SHARED / "data/nccl" / name
    if not path.exists():
        pytest.skip(f"no {name} in the shared data folder beside the checkout")
    return path


def symbols(library: Path, *, defined: bool) -> set[str]:
    """Names in the dynamic symbol table."""
    flag = "--defined-only" if defined else "--undefined-only"
    listing = subprocess.run(["nm", "-D", flag, str(library)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines()}


def environment(**changes: str) -> dict[str, str]:
    """The environment without any session, plus ``changes``."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PRISM_")} | changes


def table() -> dict[str, tuple[str, str]]:
    """The functions that the stand-in declares: name to first version (``2.18``) and behaviour."""
    text = (ROOT / "shim/nccl/src/api_table.rs").read_text()
    functions: dict[str, tuple[str, str]] = {}
    behaviour = ""
    for line in text.splitlines():
        section = re.match(r"\s+(emulated|without_twin|refused) \{", line)
        row = re.match(r"\s+(2\.\d+) (?:comm |plain )?(nccl\w+)", line)
        if section:
            behaviour = section[1]
        elif row:
            functions[row[2]] = (row[1], behaviour)
    return functions


def edge_answers(environment: dict[str, str]) -> dict[str, str]:
    """What ``edge.py`` gets from the stand-in, by case."""
    script = shared("edge.py")
    command = [sys.executable, str(script), str(shim())]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    answers: dict[str, str] = json.loads(run.stdout)
    return answers
