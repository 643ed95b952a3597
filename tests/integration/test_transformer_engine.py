"""Transformer Engine on the emulated device: the real library and its torch extension (`make test-te` builds both)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAMS = ROOT / "tests" / "programs"


@pytest.fixture(scope="module", autouse=True)
def transformer_engine(torch_program: list[str]) -> None:
    """The core wheel and the extension."""
    try:
        root = Path(str(metadata.distribution("transformer_engine").locate_file("")))
    except metadata.PackageNotFoundError:
        pytest.skip("Transformer Engine is not installed: `make test-te`")
    if not list(root.glob("transformer_engine_torch*.so")):
        pytest.skip("Transformer Engine's torch extension is not built: `make test-te`")


def peaks(log: Path) -> list[int]:
    """Peaks of the allocator that the program printed."""
    return [int(peak) for peak in re.findall(r"peak (\d+)", log.read_text())]


def say(capsys: pytest.CaptureFixture[str], name: str, summary: dict[str, Any]) -> None:
    """Prints what a user waits and pays for."""
    seconds = summary["wall_ns"] / 1e9
    with capsys.disabled():
        print(f"\n{name}: {seconds:.1f} s, largest rank {summary['peak_rank_rss_bytes'] / 2**20:.0f} MiB")


def test_modules_and_recipes(prism: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = tmp_path / "te.prism"
    command = [sys.executable, str(PROGRAMS / "te_layers.py")]
    summary = prism("collect", "--world-size", 1, "--verify", 0, "-o", graph, "--", *command).document
    text = (tmp_path / "te.logs/rank-0.log").read_text()
    lines = [line for line in text.splitlines() if " peak " in line]
    assert [line.split()[:2] for line in lines] == [
        [module, recipe]
        for module in ("linear", "mlp", "attention", "grouped")
        for recipe in ("bf16", "delayed", "current")
    ]
    assert text.rstrip().endswith("done") and "is not supported by the emulated device" not in text
    assert all(peak > 0 for peak in peaks(tmp_path / "te.logs/rank-0.log"))
    say(capsys, "modules", summary)


@pytest.mark.parametrize(
    ("world", "ranks", "options"),
    [
        (8, "0,4,7", ["--tp", "2", "--pp", "2"]),
        (8, "0,7", ["--tp", "2", "--pp", "2", "--fp8"]),
        (8, "0,5,6,7", ["--ep", "4", "--experts", "8"]),
        (1024, "0,512,1023", ["--tp", "8", "--pp", "2"]),
        (8192, "0,2273,4321,8191", ["--tp", "8", "--pp", "4"]),
    ],
    ids=["8", "8-fp8", "8-moe", "1024", "8192"],
)
def test_megatron_core_with_its_layers(
    world: int,
    ranks: str,
    options: list[str],
    prism: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not list(Path(str(metadata.distribution("torch").locate_file(""))).glob("megatron/core")):
        pytest.skip("megatron-core is not installed: `make programs`")
    graph = tmp_path / "job.prism"
    command = [sys.executable, str(PROGRAMS / "megatron_gpt.py"), "--te", *options]
    summary = prism(
        "collect", "--world-size", world, "--ranks", ranks, "--verify", 0, "-o", graph, "--", *command
    ).document
    for rank in summary["ranks"]:
        log = graph.with_suffix(".logs") / f"rank-{rank['rank']}.log"
        assert rank["iterations"] == 3 and "done after 3 iterations" in log.read_text()
        assert max(peaks(log)) == rank["peak_allocated_bytes"]
    say(capsys, f"megatron-core, rank {ranks} of {world} {' '.join(options)}", summary)
