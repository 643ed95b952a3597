"""Plain PyTorch programs that know nothing of us: one per way to parallelise, and one per feature of the device."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROBES = ROOT.parent / "shared" / "probes"
WORLD = 8192
#: What a feature must print, as a pattern. Values that follow from random numbers are not looked at.
WORKING = {
    "prof": r"\(\d+, \['cublasSgemm_v2', 'void at::native::vectorized_ele.*reduce_kernel.*'cudaLaunchKernel'",
    "oom": r"CUDA out of memory\. Tried to allocate 200\.00 GiB\. GPU 0 has a total capacity of 79\.\d+ GiB",
    "oom2": r"\(7, \d+\)",
    "scaler": r"65536\.0$",
    "pin": "True",
    "item": r"\(3\.0, \[1, 2, 3\]\)",
    "nonz": r"torch\.Size\(\[2, 1\]\)",
    "idx": r"torch\.Size\(\[3, 3\]\)",
    "uniq": r"torch\.Size\(\[2\]\)",
    "sort": r"\(torch\.Size\(\[10000\]\), torch\.Size\(\[100, 2\]\)\)",
    "conv": r"torch\.Size\(\[2, 8, 30, 30\]\)",
    "flash": "ok",
    "eff": "ok",
    "math": "ok",
    "cudnnsdp": "ok",
    "hist": r"\([1-9]\d*, [1-9]\d*\)",
    "grp": r"torch\.Size\(\[64, 32\]\)",
    "fp8": r"torch\.Size\(\[64, 64\]\)",
    "dl": r"945\.0$",
    "graphs": r"torch\.Size\(\[64, 64\]\)",
    "qr": r"torch\.Size\(\[8, 8\]\)",
}


@pytest.fixture(scope="module")
def probes(torch_program: list[str]) -> Path:
    if not PROBES.is_dir():
        pytest.skip(f"the probe programs are not here: {PROBES.name}")
    return PROBES


@pytest.fixture(scope="module")
def features(probes: Path, prism: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """What every feature printed, all in one process, and the summary of that run."""
    graph = tmp_path_factory.mktemp("features") / "job.prism"
    program = [sys.executable, probes / "features.py", *WORKING]
    summary = prism("collect", "--world-size", 1, "-o", graph, "--", *program).document
    return graph.with_suffix(".logs").joinpath("rank-0.log").read_text(), summary


@pytest.mark.parametrize("name", WORKING)
def test_a_feature_that_works(name: str, features: tuple[str, Any]) -> None:
    pattern = rf"^OK +{name} {WORKING[name]}"
    assert re.search(pattern, features[0], re.MULTILINE), re.findall(rf"^.* {name} .*$", features[0], re.MULTILINE)


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp"])
def test_a_program_among_8192_ranks(mode: str, probes: Path, prism: Callable[..., Any], tmp_path: Path) -> None:
    graph, run = tmp_path / "job.prism", tmp_path / "run"
    program = [sys.executable, probes / "world.py", mode]
    collected = prism(
        "collect", "--world-size", WORLD, "--ranks", "0,5", "--verify", 0, "-o", graph, "--", *program
    ).document
    assert collected["ranks_run"] == [0, 5] and collected["ranks_inferred"] == WORLD - 2
    replayed = prism("replay", graph).document["iteration_time_ns"]
    assert len(replayed) == 3 and min(replayed) > 0
    rank = prism("emulate", graph, "--sandbox", "5", "-o", run, "--", *program).document["ranks"][0]
    assert rank["iteration_time_ns"][-1] == pytest.approx(replayed[-1], rel=0.003)
    log = (run / "logs/rank-5.log").read_text()
    lines = re.findall(rf"^{mode} 5 (\d) ([\d.]+) peak (\d+) (\d+)$", log, re.MULTILINE)
    assert [line[0] for line in lines] == ["0", "1", "2"] and log.rstrip().endswith("done")
    assert int(lines[-1][2]) == rank["peak_allocated_bytes"] and int(lines[-1][3]) == rank["peak_reserved_bytes"]
    printed_ns = float(lines[-1][1]) * 1e9
    assert printed_ns == pytest.approx(rank["iteration_time_ns"][-1], rel=0.1, abs=2e5), "its own timer shows it"
