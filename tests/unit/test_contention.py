"""Contention, overlap and export through the Python functions and the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from prism_core import ConfigError, cli, export, replay
from prism_core.synthetic import transformer_step

MIB = 1 << 20


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs") / "step.prism"
    transformer_step(1, 8, 8, 16, 2).save(str(path))
    return path


def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["prism", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capfd.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_each_rule_has_its_number(step: Path) -> None:
    # By formula; by LogGOPSim, whose cards carry one message at a time.
    alone, fifo, fair = (replay(step, rule) for rule in ("none", "fifo", "fair-share"))
    assert sum(alone.iteration_time_ns) * 1e-9 == pytest.approx(0.532014, rel=1e-6)
    assert sum(fifo.iteration_time_ns) * 1e-9 == pytest.approx(0.534683, rel=1e-3)
    assert sum(fair.iteration_time_ns) > sum(fifo.iteration_time_ns)
    assert fair.traffic["total_time_alone_ns"] == alone.total_time_ns
    assert fair.traffic["messages"] == 116_480
    assert "traffic" not in alone.to_dict()


def test_factors_come_from_a_mapping_a_text_or_a_file(step: Path, tmp_path: Path) -> None:
    file = tmp_path / "overlap.toml"
    file.write_text('[overlap]\ngemm = 1.15\nprovenance = "measured"\n', encoding="utf-8")
    results = [replay(step, overlap=how) for how in ({"gemm": 1.15}, "[overlap]\ngemm = 1.15\n", file, str(file))]
    assert len({sum(result.iteration_time_ns) for result in results}) == 1
    assert sum(results[0].iteration_time_ns) > 532_014_088
    kinds = [result.traffic["overlap"].pop("provenance") for result in results]
    assert kinds == ["default", "default", "measured", "measured"]
    assert results[0].traffic == results[2].traffic


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contention": "lifo"}, "it must be none, fair-share or fifo"),
        ({"overlap": {"gem": 1.1}}, 'there is no class of work "gem"'),
        ({"overlap": {"gemm": 0.5}}, "at least 1"),
        ({"overlap": {"gemm": "much"}}, "it must be numbers"),
        ({"overlap": "nowhere.toml"}, "cannot read nowhere.toml"),
        ({"contention": "fifo", "messages": "rough"}, "it must be fine or coarse"),
    ],
)
def test_options_that_do_not_fit_are_named(step: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(step, **options)


def test_replay_prints_what_contention_did(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "overlap.toml").write_text("[overlap]\ngemm = 1.15\n", encoding="utf-8")
    arguments = ("replay", step, "--contention", "fair-share", "--overlap", tmp_path / "overlap.toml")
    code, text, _ = run(monkeypatch, capfd, *arguments)
    assert code == 0
    assert "fair-share, 116,480 messages; 532.014 ms without" in text
    assert "of compute time slowed down" in text
    assert "network card 0 of node" in text
    code, text, _ = run(monkeypatch, capfd, *arguments, "--json")
    assert json.loads(text)["traffic"]["overlap"]["stretched_ns"] > 0


def test_a_job_is_exported_as_goal(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "step.goal"
    arguments = ("export", step, "--format", "goal", "-o", output, "--tick-ps", "20", "--json")
    code, text, _ = run(monkeypatch, capfd, *arguments)
    document = json.loads(text)
    assert code == 0
    assert (document["ranks"], document["sends"], document["file_bytes"]) == (64, 116_480, output.stat().st_size)
    lines = output.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "num_ranks 64"
    assert sum(": send" in line for line in lines) == sum(": recv" in line for line in lines) == 116_480
    # One millisecond in ticks of 20 ps.
    assert lines[3] == "l1: calc 50000000"


def test_the_exported_step_takes_what_loggopsim_says(step: Path, tmp_path: Path) -> None:
    export(step, tmp_path / "step.goal", tick_ps=20)
    result = replay(tmp_path / "step.goal", loggops="L=250000,o=0,g=0,G=1,O=0,S=1000000000,tick_ps=20")
    assert result.total_time_ns * 1e-9 == pytest.approx(0.534683, rel=1e-3)


def test_exports_that_cannot_be_are_refused(step: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it must be goal"):
        export(step, tmp_path / "step", format="chakra")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tick_ps is 0"):
        export(step, tmp_path / "step.goal", tick_ps=0)
    with pytest.raises(OSError, match="cannot write"):
        export(step, tmp_path / "nowhere" / "step.goal")
