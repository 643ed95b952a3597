"""The command line: one document on stdout with --json, errors as one line or one document, exit codes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import fakes
import pytest
from prism_core import cli, doctor
from prism_core.errors import ConfigError, GraphFormatError
from prism_core.report import tolerance_rows

PROGRAM = ["--", "sh", "-c", fakes.CONNECT]


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> fakes.FakeGraph:
    graph = fakes.FakeGraph(
        64, meta={"device": "emulated:h100-sxm", "profile": "[node]\ngpus = 8\n[device]\nmemory_bytes = 85899345920\n"}
    )
    for module in (importlib.import_module("prism_core.emulate"), cli):
        monkeypatch.setattr(module, "open_graph", lambda path: graph)
    return graph


@pytest.mark.usefixtures("fake_engine")
def test_collect_prints_one_document_or_a_text(prism: Any, tmp_path: Path) -> None:
    options = ["collect", "--world-size", 16, "-o", tmp_path / "job.prism"]
    code, out, _ = prism(*options, "--json", *PROGRAM)
    document = json.loads(out)
    assert code == 0 and document["world_size"] == 16 and len(document["ranks_run"]) == 5
    code, out, err = prism(*options, *PROGRAM)
    assert code == 0 and "16: 5 run, 11 inferred" in out
    assert "running ranks 0, 8, 15 of 16 ranks" in err


def test_a_role_tolerance_is_a_share(prism: Any, tmp_path: Path) -> None:
    options = ["collect", "--world-size", 2, "--role-tolerance", 5, "-o", tmp_path / "job.prism"]
    code, _, err = prism(*options, *PROGRAM)
    assert code == 2 and "--role-tolerance" in err


def test_what_passed_for_alike_is_said() -> None:
    rows = dict(tolerance_rows({"rank": 7, "stand_in": 5, "share": 0.00117}))
    assert rows == {"nearly alike": "rank 7 is 0.117% from rank 5, its stand-in: the farthest of those that ran"}
    assert not list(tolerance_rows(None))


@pytest.mark.usefixtures("fake_engine", "graph")
def test_the_program_s_own_options_stay_its_own(prism: Any, tmp_path: Path) -> None:
    program = ["--", "sh", "-c", f'{fakes.CONNECT}; echo "$@"', "sh", "--json", "-o", "x", "--slow", "no", "--", "y"]
    code, out, err = prism("emulate", "job.prism", "--sandbox", "3", "-o", tmp_path / "run", *program)
    assert code == 0, err
    assert not out.startswith("{")
    assert (tmp_path / "run/logs/rank-3.log").read_text() == "--json -o x --slow no -- y\n"
    assert "[rank 3] --json -o x" in err and "[rank 3]" not in out


@pytest.mark.usefixtures("fake_engine", "graph")
def test_emulate_and_report(prism: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, _ = prism("emulate", "job.prism", "--sandbox", "0,5", "-o", run, "--slow", "42=1.3", "--json", *PROGRAM)
    document = json.loads(out)
    assert code == 0 and document["sandbox"] == [0, 5] and document["slow"] == {"42": 1.3}
    assert [rank["rank"] for rank in document["ranks"]] == [0, 5]
    code, out, _ = prism("report", run, "-o", tmp_path / "page.html")
    assert code == 0 and "iteration time" in out
    assert (tmp_path / "page.html").read_text() == (run / "report.html").read_text()
    code, out, _ = prism("report", run, "--json")
    assert json.loads(out)["iteration_time_ns"] == document["iteration_time_ns"]


@pytest.mark.usefixtures("fake_engine", "graph")
def test_the_exit_code_of_a_dead_rank_is_passed_on(prism: Any, tmp_path: Path) -> None:
    program = ["--", "sh", "-c", f"{fakes.CONNECT}; exit 42"]
    code, out, err = prism("emulate", "job.prism", "--sandbox", "5", "-o", tmp_path / "run", "--json", *program)
    error = json.loads(out)["error"]
    assert code == 42
    assert (error["kind"], error["rank"], error["returncode"]) == ("RankFailedError", 5, 42)
    assert "Traceback" not in err and "prism: error: rank 5 ended with exit code 42" in err
    assert (tmp_path / "run/summary.json").exists()


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["emulate", "job.prism", "--sandbox", "64", "-o", "run", "--", "true"], "rank 64 is outside the job"),
        (["emulate", "job.prism", "--sandbox", "0", "--slow", "1", "-o", "run", "--", "true"], "RANK=FACTOR"),
        (["collect", "--world-size", "4", "-o", "no/such/job.prism", "--", "true"], "does not exist"),
        (["collect", "--world-size", "4", "--device", "abacus", "-o", "job.prism", "--", "true"], "abacus"),
        (["report", "no-such-run"], "not a run folder"),
    ],
)
def test_errors_are_one_line_or_one_document(
    prism: Any, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = prism(*arguments)
    assert code == 1 and out == ""
    assert err.startswith("prism: error: ") and message in err and len(err.splitlines()) == 1
    code, out, _ = prism(arguments[0], "--json", *arguments[1:])
    assert code == 1 and json.loads(out)["error"]["kind"] == ConfigError.__name__
    assert message in json.loads(out)["error"]["message"]


def test_usage_errors_are_documents_too(prism: Any) -> None:
    code, out, err = prism("replay", "--json", "job.prism", "--bogus")
    assert code == 2 and json.loads(out)["error"]["kind"] == "UsageError"
    assert "--bogus" in err and "Traceback" not in err
    code, out, _ = prism("collect", "--json")
    assert code == 2 and "error" in json.loads(out)


def test_a_damaged_graph_is_an_error_of_its_kind(prism: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(path: object) -> None:
        raise GraphFormatError("checksum differs at offset 64")

    monkeypatch.setattr(cli, "read_graph", damaged)
    code, out, _ = prism("inspect", "job.prism", "--json")
    assert code == 1
    assert json.loads(out)["error"] == {"kind": "GraphFormatError", "message": "checksum differs at offset 64"}


def test_bugs_are_not_dressed_up(prism: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "read_graph", broken)
    monkeypatch.setattr(sys, "argv", ["prism", "inspect", "job.prism"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_doctor_says_that_the_preload_is_not_in_place(
    prism: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = doctor.examine(tmp_path)
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    code, out, _ = prism("doctor")
    assert code == 1 and out.splitlines()[-1] == "THE PRELOAD IS NOT IN PLACE"
    code, out, _ = prism("doctor", "--json")
    document = json.loads(out)
    assert code == 1 and not document["ok"] and not document["preload_in_place"]
    states = {finding["name"]: finding["state"] for finding in document["findings"]}
    assert states["preload"] == "error" and states["python"] == "ok" and states["shared memory"] == "ok"


def test_doctor_looks_at_what_is_really_mapped(tmp_path: Path) -> None:
    """Any ELF library under our name is mapped, but lacks the session's entry point."""
    some_library = next(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libm" in line
    )
    for name in ("libprism_cuda.so", "libprism_nccl.so", "libprism_nvml.so"):
        (tmp_path / name).write_bytes(Path(some_library).read_bytes())
    finding = doctor.probe_preload(tmp_path)
    assert finding.state == "error" and "prism_session_table_v1 is not exported" in finding.detail
    (tmp_path / "libprism_nccl.so").write_bytes(b"text")
    finding = doctor.probe_preload(tmp_path)
    assert finding.state == "error" and "libprism_nccl.so not mapped" in finding.detail


def test_version(prism: Any) -> None:
    code, out, _ = prism("--version")
    assert code == 0 and out.strip()
