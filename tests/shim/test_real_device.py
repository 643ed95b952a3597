"""A real device, with a driver that has no GPU: held streams, the scheduler, the real NCCL behind real communicators.

``c/fake_cuda.c`` works in wall-clock time. How late a stream is released depends on the machine, so no test limits it:
they check that nothing is released early, and that what is reported is what the program saw.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nccl_support
import pytest

_native = pytest.importorskip("prism_core._native", reason="the engine's binding is not built")

HERE = Path(__file__).parent
PROGRAM = HERE / "real_client.py"
#: Only a hang takes so long.
HANG_S = 240.0
#: A clock read in another thread than the program's may be this much off.
ROUNDING_NS = 2_000


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the driver and the NCCL of the tests."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the driver of the tests with")
    folder = tmp_path_factory.mktemp("fakes")
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    cuda, nccl = folder / "libcuda.so.1", folder / "libfakenccl.so"
    subprocess.run(["gcc", *options, "-Wl,-soname,libcuda.so.1", "-o", cuda, HERE / "c/fake_cuda.c"], check=True)
    subprocess.run(["gcc", *options, "-o", nccl, HERE / "c/fake_nccl.c", cuda], check=True)
    return folder


Run = Callable[..., tuple[list[list[dict[str, Any]]], dict[str, Any]]]


@pytest.fixture
def run(fakes: Path) -> Run:
    def run(case: str, *, world: int = 8, ranks: int = 1, **more: str) -> tuple[list[list[dict[str, Any]]], Any]:
        """Runs a program as the first ranks of a world; what each said, and the engine's summary."""
        shims = nccl_support.shim().parent
        options = {
            "mode": "collect", "world_size": world, "live": list(range(ranks)),
            "profile": _native.profile_toml("h100-sxm"),
        }  # fmt: skip
        engine = _native.Session(json.dumps(options))
        with tempfile.TemporaryDirectory(prefix="prism-") as folder:
            environment = nccl_support.environment(
                PRISM_SESSION=engine.listen(str(Path(folder) / "s")),
                PRISM_WORLD_SIZE=str(world),
                PRISM_DEVICE="real",
                LD_PRELOAD=f"{shims / 'libprism_gpu.so'}:{shims / 'libprism_nccl.so'}",
                LD_AUDIT=str(shims / "libprism_audit.so"),
                LD_LIBRARY_PATH=str(fakes),
                **more,
            )
            processes = [
                subprocess.Popen(
                    [sys.executable, PROGRAM, case],
                    env=environment | {"PRISM_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(ranks)
            ]
            try:
                outputs = [process.communicate(timeout=HANG_S) for process in processes]
            finally:
                for process in processes:
                    process.kill()
            assert [process.returncode for process in processes] == [0] * ranks, outputs
            summary = json.loads(engine.finish())
        return [[json.loads(line) for line in output.splitlines()] for output, _ in outputs], summary

    return run


def test_a_stream_is_held_for_the_time_of_the_collective(run: Run) -> None:
    ((said,), summary) = run("timed")
    errors = summary["ranks"][0]["release_errors"]
    assert errors["count"] == len(said) == 10
    assert 0 <= errors["p50_ns"] <= errors["p99_ns"] <= errors["max_ns"]
    assert 300_000 < said[0]["expected_ns"] < 8 * said[0]["expected_ns"] < said[-1]["expected_ns"]
    for facts in said:
        assert facts["took_ns"] >= facts["expected_ns"] - ROUNDING_NS
    (world,) = summary["ranks"][0]["communicators"]
    assert (world["size"], world["calls"], world["bytes"]) == (8, 10, 5 * 4 * 425_000_000)


def test_iterations_take_what_streams_took(run: Run) -> None:
    ((said,),), summary = run("marked")
    (rank,) = summary["ranks"]
    assert len(rank["iteration_time_ns"]) == 2
    # A mark may be seen late, so only what the engine itself adds is certain.
    assert all(ns >= said["expected_ns"] - ROUNDING_NS for ns in rank["iteration_time_ns"])
    assert (rank["peak_allocated_bytes"], rank["peak_reserved_bytes"]) == (123_456, 234_567)
    assert summary["failed"] is None


def test_operations_of_one_communicator_follow_each_other_across_streams(run: Run) -> None:
    ((apart, group),), summary = run("two_streams")
    assert apart["took_ns"] >= 20_000_000 + 2 * apart["one_ns"] - ROUNDING_NS
    assert group["took_ns"] >= 20_000_000 + group["one_ns"]
    assert summary["failed"] is None


def test_small_payloads_are_mirrored_while_the_stream_is_held(run: Run) -> None:
    ((said,),), summary = run("mirrored")
    expected = [8.0, 16.0, 24.0, 4.0]
    assert (said["recv"], said["send"]) == (expected, expected)
    (note,) = (
        count for text, count in summary["ranks"][0]["notes"].items() if "ncclAllReduce: payload mirrored" in text
    )
    assert note == 2


def test_communication_that_is_captured_is_refused_by_name(run: Run) -> None:
    ((said,),), summary = run("captured")
    assert said["code"] == 5
    assert said["text"].startswith("ncclAllReduce") or said["text"].startswith("AllReduce")
    assert "captured into a CUDA graph" in said["text"]
    assert any("captured" in name for name in summary["ranks"][0]["unsupported"])


def test_an_abort_releases_a_held_stream(run: Run) -> None:
    ((said,),), _ = run("aborted")
    assert said == {"done": True}


def test_communicators_of_ranks_that_all_run_are_the_real_librarys(run: Run, fakes: Path) -> None:
    said, summary = run("passed", world=2, ranks=2, PRISM_REAL_NCCL=str(fakes / "libfakenccl.so"))
    for facts, after in said:
        assert facts["recv"] == facts["send"] == [3.0, 10.0, 0.5]
        assert (facts["calls"], facts["groups"], facts["error"]) == (2, 2, 0)
        assert after == {"live": 0, "holds": 0}
    assert [rank.get("release_errors") for rank in summary["ranks"]] == [None, None]


def test_a_real_communicator_needs_the_real_library(run: Run) -> None:
    with pytest.raises(AssertionError, match="PRISM_REAL_NCCL does not name the real libnccl"):
        run("passed", world=1)


def test_a_communicator_of_one_rank_is_the_real_librarys(run: Run, fakes: Path) -> None:
    ((said,),), _ = run("alone", world=1, PRISM_REAL_NCCL=str(fakes / "libfakenccl.so"))
    assert said["recv"] == [4.0, 5.0]


@pytest.fixture
def emulated(fakes: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`prism emulate --device real` of the timed program as rank 3 of 8, with a graph of the host device."""
    prism = [sys.executable, "-m", "prism_core.cli"]
    environment = nccl_support.environment(LD_LIBRARY_PATH=str(fakes), CUDA_VISIBLE_DEVICES="0")
    graph, program = tmp_path / "job.prism", [sys.executable, str(PROGRAM), "timed"]

    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        line = [*prism, *map(str, arguments), "--", *program]
        return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=HANG_S)

    collected = command("collect", "--world-size", 8, "--device", "host", "--ranks", "0", "-o", graph)
    assert collected.returncode == 0, collected.stderr

    def emulate(*arguments: object) -> subprocess.CompletedProcess[str]:
        return command(
            "emulate", graph, "--sandbox", 3, "--device", "real", "-o", tmp_path / "run", "--json", *arguments
        )

    return emulate


def test_a_sandbox_rank_runs_on_the_device_among_virtual_ranks(
    emulated: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = emulated("--max-release-error", 1e9)
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["ranks"]
    assert (rank["rank"], rank["release_errors"]["count"]) == (3, 10)
    said = [json.loads(line) for line in (tmp_path / "run/logs/rank-3.log").read_text().splitlines()]
    assert all(facts["took_ns"] >= facts["expected_ns"] - ROUNDING_NS for facts in said)


def test_a_run_that_does_not_keep_time_is_an_error(emulated: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = emulated("--max-release-error", 1e-6)
    assert done.returncode != 0
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "TimekeepingError"
    assert "rank 3: one of a hundred of 10 held streams was released more than" in error["message"]
