"""How late held streams are released on a real device, by the driver without a GPU of the tests (streams are threads).

The figures are those of the scheduler and of the machine's timer; a GPU adds the time in which it sees a word of host
memory change. They are only as good as a CPU is free, so nothing is asserted but that no stream is released early.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

_native = pytest.importorskip("prism_core._native", reason="the engine's binding is not built")

ROOT = Path(__file__).resolve().parents[1]
SHIMS = ROOT / "python/prism_core/_shim"


def test_release_of_held_streams(benchmark: Any, tmp_path: Path) -> None:
    """Ten collectives of 330 us and 5 ms each, one after the other; none may be released early."""
    driver, source = tmp_path / "libcuda.so.1", ROOT / "tests/shim/c/fake_cuda.c"
    options = ["-O2", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *options, "-o", driver, source], check=True)
    found: dict[str, Any] = {}

    def run() -> None:
        mode = {"mode": "collect", "world_size": 8, "live": [0], "profile": _native.profile_toml("h100-sxm")}
        engine = _native.Session(json.dumps(mode))
        with tempfile.TemporaryDirectory(prefix="prism-") as folder:
            environment = os.environ | {
                "PRISM_SESSION": engine.listen(folder), "PRISM_RANK": "0", "PRISM_WORLD_SIZE": "8",
                "PRISM_DEVICE": "real", "LD_LIBRARY_PATH": str(tmp_path),
                "LD_PRELOAD": f"{SHIMS / 'libprism_gpu.so'}:{SHIMS / 'libprism_nccl.so'}",
                "LD_AUDIT": str(SHIMS / "libprism_audit.so"),
            }  # fmt: skip
            program = [sys.executable, str(ROOT / "tests/shim/real_client.py"), "timed"]
            output = subprocess.run(program, env=environment, check=True, capture_output=True, text=True).stdout
            said = [json.loads(line) for line in output.splitlines()]
            assert all(facts["took_ns"] >= facts["expected_ns"] - 2_000 for facts in said)
            found.update(json.loads(engine.finish())["ranks"][0]["release_errors"])
        assert found["count"] == len(said) == 10

    benchmark.pedantic(run, rounds=5, iterations=1)
    if benchmark.enabled:
        benchmark.extra_info |= found
