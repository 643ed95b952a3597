"""Sweeps and imports from the shell: CPU seconds of `prism sweep` and `prism import kineto`.

The answer is checked first: every configuration is ranked, and the graph of one replays to the time that stands in
the table; an import's unchanged replay takes as long as the recording.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prism_core
import pytest
from conftest import ROOT, Job
from figures import report
from prism_core.imports.kineto import import_kineto

DLRM = ROOT.parent / "shared/data/traces/param/inputs__dlrm_kineto.tar.gz"
#: How often the job's traces are copied, one folder each, to be imported one after the other.
REPEATS = 3
GRAPH_SWEEP = """
[sweep]
graph = "{graph}"

[axes]
cluster = ["h100-sxm", "a100-sxm"]
straggler = [1.0, 1.1, 1.2, 1.3, 1.5, 2.0]

[replay]
slow = ["42={{straggler}}"]
profile = "{{cluster}}"
"""
PROGRAM_SWEEP = """
[sweep]
command = "{python} {program} --mode={{mode}} --layers=4 --hidden=512 --heads=8 --seq=512 --batch={{batch}} --iters=3"
samples = "batch"

[axes]
mode = ["ddp", "fsdp2"]
batch = [1, 8]

[collect]
world_size = 64
ranks = "0"
verify = 0
"""


@dataclass(frozen=True)
class Run:
    """A finished command: its document, and CPU seconds with all children."""

    document: dict[str, Any]
    cpu_s: float


def prism(*arguments: str | Path, out: Path) -> Run:
    """Runs a command of prism, its answer in a file."""
    command = [sys.executable, "-m", "prism_core.cli", *map(str, arguments), "--json"]
    with out.open("wb") as stdout:
        child = os.posix_spawn(
            command[0], command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, stdout.fileno(), 1)]
        )
        _, status, usage = os.wait4(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, command
    return Run(json.loads(out.read_text()), usage.ru_utime + usage.ru_stime)


def sweep(benchmark: Any, folder: Path, text: str, configurations: int, rounds: int) -> Run:
    """A sweep from nothing, timed; the latest."""
    plan = folder / "sweep.toml"
    plan.write_text(text)
    runs: list[Run] = []

    def once() -> None:
        (folder / "sweep.results.jsonl").unlink(missing_ok=True)
        runs.append(prism("sweep", plan, "-o", folder / "sweep.results.jsonl", out=folder / "answer.json"))

    benchmark.pedantic(once, rounds=rounds if benchmark.enabled else 1)
    document = runs[-1].document
    counts = [document[key] for key in ("configurations", "finished", "failed", "kept")]
    assert counts == [configurations, configurations, 0, 0], document
    report(benchmark, cpu_s=[run.cpu_s for run in runs], each=[run.cpu_s / configurations for run in runs])
    return runs[-1]


def test_sweep_of_a_graph(benchmark: Any, demo: Job, tmp_path: Path) -> None:
    """Twelve configurations of the demo's graph of 8,192 ranks."""
    run = sweep(benchmark, tmp_path, GRAPH_SWEEP.format(graph=demo.graph), 12, 3)
    worst = run.document["results"][-1]
    straggler, cluster = worst["values"]["straggler"], worst["values"]["cluster"]
    expected = prism_core.replay(demo.graph, slow={42: straggler}, profile=cluster)
    assert straggler == 2.0 and worst["iteration_time_ns"] == expected.iteration_time_ns[-1]


def test_sweep_of_a_program(benchmark: Any, tmp_path: Path) -> None:
    """Four configurations of a program, each collected from one rank of 64 and replayed; one by hand before."""
    text = PROGRAM_SWEEP.format(python=sys.executable, program=ROOT / "examples/train_gpt.py")
    command = text.split('command = "')[1].split('"')[0].format(mode="fsdp2", batch=8).split()
    prism_core.collect(command, 64, tmp_path / "one.prism", ranks="0", num_verified=0)
    expected = prism_core.replay(tmp_path / "one.prism").iteration_time_ns[-1]
    run = sweep(benchmark, tmp_path, text, 4, 1)
    results = {(found["values"]["mode"], found["values"]["batch"]): found for found in run.document["results"]}
    assert set(results) == {("ddp", 1), ("ddp", 8), ("fsdp2", 1), ("fsdp2", 8)}
    assert results["fsdp2", 8]["iteration_time_ns"] == expected
    for mode in ("ddp", "fsdp2"):
        small, large = results[mode, 1], results[mode, 8]
        assert large["iteration_time_ns"] > small["iteration_time_ns"]
        assert large["peak_bytes"] > small["peak_bytes"]


def unpack(copies: Path) -> Sequence[Path]:
    """Folders with the traces of the job, one file per rank."""
    folders = []
    for number in range(REPEATS):
        folder = copies / str(number)
        folder.mkdir()
        with tarfile.open(DLRM) as archive:
            for member in archive.getmembers():
                name = Path(member.name).name
                source = archive.extractfile(member) if member.isfile() and not name.startswith("._") else None
                if source is not None:
                    with (folder / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
        folders.append(folder)
    return folders


@pytest.mark.skipif(not DLRM.exists(), reason=f"{DLRM} is not there")
def test_import_of_kineto_traces(benchmark: Any, tmp_path: Path) -> None:
    """The 8-rank DLRM job: from text to a stored graph, its replay checked against the recording."""
    folders = iter(unpack(tmp_path))
    runs: list[Run] = []
    rates: list[float] = []

    def once() -> None:
        folder = next(folders)
        # Without the interpreter's start, which is most of the command.
        start = time.process_time()
        import_kineto(folder)
        rates.append(sum(file.stat().st_size for file in folder.iterdir()) / 1e6 / (time.process_time() - start))
        runs.append(prism("import", "kineto", folder, "-o", tmp_path / "job.prism", out=tmp_path / "answer.json"))

    benchmark.pedantic(once, rounds=REPEATS if benchmark.enabled else 1)
    for run in runs:
        assert run.document["recorded_iteration_time_ns"] == run.document["replayed_iteration_time_ns"] == [13_311_000]
    report(benchmark, cpu_s=[run.cpu_s for run in runs], mb_per_cpu_s=rates)
