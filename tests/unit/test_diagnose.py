"""`prism diagnose`: the culprit first, for jobs that hang, jobs that are slow, and runs that failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import prism_core
import pytest
from prism_core import cli
from prism_core.diagnose import diagnose_text, ranks_text
from prism_core.errors import ConfigError

COMPUTE = '+0 s0 compute 100000000000 Gemm Default "gemm"'
REDUCE = "+0 s0 AllReduce c0 Uint8 80000000 Sum"


def graph(*programs: list[str], ranks: list[str]) -> prism_core.Graph:
    """A job whose ranks share one communicator."""
    world = max(int(part.split("-")[-1]) for part in ranks) + 1
    lines = ["prism-graph 1", f"world {world}", 'name "gemm"', f"comm 0-{world - 1}"]
    for number, program in enumerate(programs):
        lines += [f'template "t{number}"', *(f"  {op}" for op in program)]
    lines += [f"rank {part} template {number} comms 0" for number, part in enumerate(ranks)]
    return prism_core.Graph.from_text("\n".join(lines) + "\n")


def test_the_slow_rank_is_the_one_that_does_not_wait() -> None:
    found = prism_core.diagnose(graph([COMPUTE, REDUCE], ranks=["0-7"]), slow={5: 1.3})
    culprit = found["waiting"]["culprit"]
    assert (culprit["ranks"], culprit["cause"], culprit["waited_ns"]) == ([5], "compute", 0)
    assert culprit["median_waited_ns"] == 30_000_000
    assert found["headline"].startswith("rank 5 holds up the others")
    path = found["critical_path"]
    assert path["ns"] == found["iteration_time_ns"][0] == sum(part["ns"] for part in path["parts"])
    assert {"parameter": "rank_speed", "rank": 5}.items() <= found["sensitivities"][0].items() or (
        found["sensitivities"][0]["parameter"] == "compute_class"
    )
    text = diagnose_text(found).splitlines()
    assert found["headline"].startswith(text[0])
    assert all(len(line) <= 100 for line in text), text
    assert any("waiting for others in communicator 0" in line for line in text)


def test_sensitivities_can_be_left_out_and_lists_kept_short() -> None:
    found = prism_core.diagnose(graph([COMPUTE, REDUCE], ranks=["0-7"]), sensitivities=False, top=1)
    assert found["sensitivities"] == [] and len(found["critical_path"]["longest"]) == 1


def test_a_missing_call_is_an_answer() -> None:
    found = prism_core.diagnose(graph([REDUCE, REDUCE], [REDUCE], ranks=["0-2", "3"]))
    hang = found["hang"]
    assert (hang["kind"], hang["culprits"]) == ("missing_call", [3])
    assert found["headline"].startswith("rank 3 ended without the call that ranks 0-2 wait for at op 1")
    assert found["critical_path"] is None
    text = diagnose_text(found)
    assert "look at   rank 3" in text and "AllReduce 1 of communicator 0" in text
    assert all(len(line) <= 100 for line in text.splitlines()), text


def test_a_mismatch_names_the_minority() -> None:
    found = prism_core.diagnose(graph([REDUCE], [REDUCE.replace("80000000", "8")], ranks=["0-2", "3"]))
    assert (found["hang"]["kind"], found["hang"]["culprits"]) == ("mismatch", [3])
    assert found["hang"]["mismatch"]["minority"]["count"] == 8


def test_bad_requests_are_refused() -> None:
    job = graph([COMPUTE, REDUCE], ranks=["0-7"])
    with pytest.raises(ConfigError, match="iteration 3 of 1 is not available"):
        prism_core.diagnose(job, iteration=3)
    with pytest.raises(ConfigError, match="rank 8"):
        prism_core.diagnose(job, slow={8: 2.0})


SLOW_LINK = """
[[perturb]]
kind = "slow-link"
ranks = [2]
bandwidth_factor = 0.1
"""


def test_perturbed_jobs_are_explained(tmp_path: Path) -> None:
    job = graph([COMPUTE, REDUCE], ranks=["0-7"])

    def collectives(found: dict[str, Any]) -> int:
        return sum(part["ns"] for part in found["critical_path"]["parts"] if part["what"] == "collective")

    healthy = prism_core.diagnose(job, sensitivities=False)
    path = tmp_path / "link.toml"
    path.write_text(SLOW_LINK)
    for perturb in (path, SLOW_LINK):
        found = prism_core.diagnose(job, perturb=perturb, sensitivities=False)
        assert found["iteration_time_ns"] == prism_core.replay(job, perturb=perturb).iteration_time_ns
        assert sum(part["ns"] for part in found["critical_path"]["parts"]) == found["iteration_time_ns"][0]
        assert collectives(found) > 5 * collectives(healthy)
    straggler = '[[perturb]]\nkind = "straggler"\nranks = [6]\nfactor = 1.5\n'
    found = prism_core.diagnose(job, perturb=straggler)
    assert found["waiting"]["culprit"]["ranks"] == [6]
    death = '[[perturb]]\nkind = "rank-death"\nrank = 4\ntime_ns = 1000\n'
    found = prism_core.diagnose(job, perturb=death)
    assert (found["hang"]["kind"], found["hang"]["culprits"]) == ("dead_rank", [4])
    assert found["headline"].startswith("rank 4 is dead, and ranks 0-3,5-7 wait at op 1: AllReduce number 0")
    assert "rank 4 is dead" in diagnose_text(found).splitlines()[-1]


def run_folder(tmp_path: Path, error: dict[str, Any] | None, exit_code: int) -> Path:
    rank = {"rank": 5, "iterations": 2, "last_op": "AllReduce", "exit_code": exit_code}
    summary = {
        "world_size": 64, "error": error, "ranks": [rank], "iteration_time_ns": [7, 7], "command": "train.py",
        "sandbox": [5], "notes": [],
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "timing.json").write_text("{}")
    return tmp_path


def test_a_run_cannot_be_perturbed_afterwards(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the run is over"):
        prism_core.diagnose(run_folder(tmp_path, None, 0), perturb=SLOW_LINK)


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    error = {"kind": "SessionError", "message": "deadlock: nothing can move\n  rank 5 at op 7 waits for rank 6"}
    found = prism_core.diagnose(run_folder(tmp_path, error, 1))
    assert found["headline"] == "deadlock: nothing can move"
    assert diagnose_text(found).splitlines() == [
        "deadlock: nothing can move",
        "  rank 5 at op 7 waits for rank 6",
        "  rank 5: 2 iterations, exit code 1, last op AllReduce",
    ]


def test_a_complete_run_says_so(tmp_path: Path) -> None:
    found = prism_core.diagnose(run_folder(tmp_path, None, 0))
    assert found["headline"] == "the run is complete: 2 iterations, no error"
    assert found["run"]["ranks"] == []


def test_the_command_prints_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.prism"
    graph([COMPUTE, REDUCE], ranks=["0-7"]).save(str(path))
    for flags in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["prism", "diagnose", str(path), "--slow", "5=1.3", *flags])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert not caught.value.code
    text, document = capfd.readouterr().out.split("{", 1)
    assert text.startswith("rank 5 holds up the others")
    assert json.loads("{" + document)["waiting"]["culprit"]["ranks"] == [5]


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 9.11 GiB is free. Including non-PyTorch memory, this process has 70.00 GiB memory in use.\n"
)


def test_a_run_out_of_memory_names_rank_op_and_by_how_much(tmp_path: Path) -> None:
    run = run_folder(tmp_path, {"kind": "RankFailedError", "message": "rank 5 ended with exit code 1", "rank": 5}, 1)
    (run / "logs").mkdir()
    (run / "logs/rank-5.log").write_text("x" * 100_000 + OOM)
    found = prism_core.diagnose(run)
    assert found["headline"] == (
        "out of memory: rank 5 asks for 20.00 GiB in iteration 2, after AllReduce; its card of 79.11 GiB has 9.11 GiB "
        "left: 10.89 GiB too little"
    )
    assert (found["memory"]["rank"], found["memory"]["over_by_bytes"]) == (5, (20 << 30) - round(9.11 * (1 << 30)))
    assert diagnose_text(found).startswith("out of memory: rank 5")


def test_a_complete_run_is_explained_by_its_graph(tmp_path: Path) -> None:
    job, run = tmp_path / "job.prism", run_folder(tmp_path, None, 0)
    graph([COMPUTE, REDUCE], ranks=["0-7"]).save(str(job))
    summary = json.loads((run / "summary.json").read_text())
    (run / "timing.json").write_text(json.dumps({"graph": str(job)}))
    found = prism_core.diagnose(run)
    assert found["headline"].startswith("nothing wrong found: no rank holds up the others")
    assert len(diagnose_text(found).splitlines()) <= 40, "one screen"
    (run / "summary.json").write_text(json.dumps(summary | {"slow": {"5": 1.3}}))
    found = prism_core.diagnose(run)
    assert found["headline"].startswith("rank 5 holds up the others") and found["job"]["waiting"]["culprit"][
        "ranks"
    ] == [5]
    peaks = {"peak_device_bytes": 50 << 30, "peak_reserved_bytes": 49 << 30, "nccl_buffer_bytes": 1 << 30}
    summary["ranks"][0] |= peaks
    (run / "summary.json").write_text(json.dumps(summary))
    assert prism_core.diagnose(run, card_bytes=80 << 30)["memory"] is None
    found = prism_core.diagnose(run, card_bytes=40 << 30)
    assert found["headline"].startswith("out of memory on such a card: rank 5 needs 51.00 GiB")
    assert found["memory"]["over_by_bytes"] == 11 << 30


def test_ranks_are_told_as_ranges() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 7]) == "ranks 0-2,7"
    assert ranks_text(range(0, 40, 2)) == "ranks 0,2,4,6,8,10,12,14,... (20 in all)"
