"""What catching NCCL's callers costs: the start of a child, calls between libraries, looking for a second NCCL."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from figures import report
from prism_core.environment import check_shims, loader_variables

CALLS = 100_000_000
PROGRAM = f"""
#include <stdio.h>
#include <time.h>
int step(int value);
int main(void) {{
    int value = 0;
    clock_t before = clock();
    for (int i = 0; i < {CALLS}; i++) value = step(value);
    printf("%d %.4f\\n", value, (double)(clock() - before) / CLOCKS_PER_SEC * 1e9 / {CALLS});
    return 0;
}}
"""
LOOK = """
import ctypes, time
import torch
driver = ctypes.CDLL("libcuda.so.1")
times = [time.process_time_ns()]
for _ in range(2):
    assert driver.cuInit(0) != 0  # nobody listens: looks for NCCL code first, then gives up
    times.append(time.process_time_ns())
print(times[1] - times[0], times[2] - times[1])
"""


def environments() -> dict[str, dict[str, str]]:
    """Without our libraries, with the preload, with the preload and the audit library."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "PRISM_"))}
    shims = check_shims()
    return {
        "plain": plain,
        "preload": plain | loader_variables(shims, {"PRISM_AUDIT": "off"}),
        "audit": plain | loader_variables(shims, {}),
    }


def cpu_ms(command: list[str], environment: dict[str, str]) -> float:
    """CPU time of a process."""
    child = subprocess.Popen(command, env=environment)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return (usage.ru_utime + usage.ru_stime) * 1e3


def test_start_of_a_child(benchmark: Any) -> None:
    """CPU time of `true`: what every compiler or shell that the program starts pays."""
    seen: dict[str, list[float]] = {name: [] for name in environments()}

    def start() -> None:
        for name, environment in environments().items():
            seen[name].append(cpu_ms(["true"], environment))

    benchmark.pedantic(start, rounds=60 if benchmark.enabled else 1)
    report(benchmark, **{f"cpu_ms_{name}": samples for name, samples in seen.items()})


def test_calls_between_libraries(benchmark: Any, tmp_path: Path) -> None:
    """A lazily bound call into another library: the audit library asks for no notice of calls."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    (tmp_path / "step.c").write_text("int step(int value) { return value + 1; }\n")
    (tmp_path / "main.c").write_text(PROGRAM)
    library = tmp_path / "libstep.so"
    subprocess.run(["gcc", "-O1", "-fPIC", "-shared", tmp_path / "step.c", "-o", library], check=True)
    program = tmp_path / "main"
    subprocess.run(["gcc", "-O1", "-Wl,-z,lazy", tmp_path / "main.c", library, "-o", program], check=True)
    seen: dict[str, list[float]] = {name: [] for name in environments()}

    def call() -> None:
        for name, environment in environments().items():
            output = subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout
            assert output.split()[0] == str(CALLS)
            seen[name].append(float(output.split()[1]))

    benchmark.pedantic(call, rounds=5 if benchmark.enabled else 1)
    report(benchmark, **{f"ns_{name}": samples for name, samples in seen.items()})


def test_looking_for_a_second_nccl(benchmark: Any) -> None:
    """With all of PyTorch mapped: the first look of a process, and one when nothing was loaded since."""
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this interpreter has no torch")
    environment = environments()["audit"] | {
        "PRISM_SESSION": "/nowhere/socket", "PRISM_RANK": "0", "PRISM_WORLD_SIZE": "8",
    }  # fmt: skip
    seen: list[tuple[float, float]] = []

    def look() -> None:
        child = subprocess.run(
            [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=True
        )
        first, second = map(int, child.stdout.split())
        seen.append((first / 1e6, second / 1e6))

    benchmark.pedantic(look, rounds=5 if benchmark.enabled else 1)
    report(benchmark, cpu_ms_first=[first for first, _ in seen], cpu_ms_again=[second for _, second in seen])
