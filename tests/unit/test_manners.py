"""How the command line behaves: exit codes, hints, bars, colours, completion, version."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fakes
import prism_core
import pytest
import typer
from prism_core import cli, synthetic
from prism_core.progress import Progress, wants_progress

STUCK = "prism-graph 1\nworld 2\ncomm 0-1\n" + "".join(
    f'template "t{rank}"\n  +0 s0 Send c0 Uint8 8 peer {1 - rank}\nrank {rank} template {rank} comms 0\n'
    for rank in (0, 1)
)


def on_a_terminal(*arguments: object, cwd: Path, **changes: str) -> tuple[str, str]:
    """Runs `prism` with standard error on a terminal; its standard output and what the terminal got."""
    ours, theirs = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    child = subprocess.Popen(
        [sys.executable, "-m", "prism_core.cli", *map(str, arguments)], stdout=subprocess.PIPE, stderr=theirs, cwd=cwd,
        env={**environment, "TERM": "xterm-256color", "COLUMNS": "100", **changes},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    out, _ = child.communicate()
    os.close(ours)
    assert child.returncode == 0, shown
    return out.decode(), shown.decode(errors="replace")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    synthetic.transformer_step(dp=2, tp=1, pp=1, microbatches=1, layers=1).save(str(tmp_path / "job.prism"))
    (tmp_path / "sweep.toml").write_text('[sweep]\ngraph = "job.prism"\n[axes]\nx = [1, 2, 3]\n')
    return tmp_path


def test_bars_are_for_terminals_and_can_be_switched_off(sweep: Path, prism: Any) -> None:
    out, shown = on_a_terminal("sweep", "sweep.toml", cwd=sweep)
    assert "prism: sweep" in shown and "3/3" in shown and "3 of 3 configurations" in out
    assert "\x1b[3" in shown, "in colours"
    _, shown = on_a_terminal("sweep", "sweep.toml", "-o", "b", cwd=sweep, NO_COLOR="1")
    assert "3/3" in shown and not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown), "without colours"
    _, shown = on_a_terminal("sweep", "sweep.toml", "-o", "c", "--no-progress", cwd=sweep)
    assert shown == ""
    code, _, err = prism("sweep", sweep / "sweep.toml", "-o", sweep / "d")
    assert (code, err) == (0, ""), "not on a terminal"


def test_an_import_shows_how_much_it_has_read(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1, "dur": 5}
    trace = {"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": [{**event, "args": {"stream": 7}}]}
    # The bar counts MiB: white space is read, too.
    (tmp_path / "rank0.json").write_text(json.dumps(trace) + " " * (3 << 20))
    out, shown = on_a_terminal("import", "kineto", "rank0.json", "-o", "job.prism", cwd=tmp_path)
    assert "prism: MiB read" in shown and "/3" in shown and out.startswith("job.prism: 1 ranks")
    assert shown.rstrip().endswith(("\x1b[2K", "\x1b[?25h")), "the bar goes away, the cursor is back"
    _, shown = on_a_terminal("import", "kineto", "rank0.json", "-o", "b.prism", "--no-progress", cwd=tmp_path)
    assert shown == ""


def test_when_bars_are_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("PRISM_NO_PROGRESS", raising=False)
    assert wants_progress() and not wants_progress(False)
    monkeypatch.setenv("PRISM_NO_PROGRESS", "1")
    assert not wants_progress()
    monkeypatch.delenv("PRISM_NO_PROGRESS")
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_progress()
    with Progress(enabled=False).task("x", 3) as advance, Progress(enabled=False).watched("y", None, lambda: 1 // 0):
        advance("nothing happens")


@pytest.mark.usefixtures("fake_engine")
def test_collect_shows_how_many_ranks_are_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prism_core.collect import collect
    from prism_core.config import CollectConfig

    seen: list[str] = []

    class Watched(Progress):
        def task(self, name: str, total: int | None) -> Any:
            seen.append(f"{name} {total}")
            return super().task(name, total)

    config = CollectConfig(command=["sh", "-c", fakes.CONNECT], world_size=16, output=tmp_path / "job.prism")
    collect(config, Watched(enabled=False))
    assert seen[0] == "ranks 3"


def test_a_hang_has_a_hint_and_is_an_answer_to_diagnose(prism: Any, tmp_path: Path) -> None:
    job = tmp_path / "job.prism"
    prism_core.Graph.from_text(STUCK).save(str(job))
    code, out, err = prism("replay", job)
    assert code == 1 and out == "" and "prism: hint: `prism diagnose JOB.prism`" in err
    code, out, _ = prism("replay", job, "--json")
    assert "prism diagnose" in json.loads(out)["error"]["hint"]
    code, out, _ = prism("diagnose", job)
    assert code == 0 and out.startswith("rank 1 never makes the receive that rank 0 waits for")


def test_a_wrong_command_line_ends_with_2_and_a_hint(prism: Any) -> None:
    for arguments, hint in (
        (["replay"], "prism replay --help"), (["repaly"], "prism --help"),
        (["replay", "x", "--bogus"], "prism replay --help"), (["import", "goal"], "prism import goal --help"),
    ):  # fmt: skip
        code, out, err = prism(*arguments)
        assert code == 2 and out == "" and f"prism: hint: {hint} lists what there is" in err, err


def test_an_interrupt_ends_with_130(prism: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "read_graph", interrupted)
    code, out, err = prism("inspect", "job.prism")
    assert (code, out, err) == (130, "", "prism: interrupted\n")


def test_every_command_prints_json() -> None:
    """But for those that only group others."""

    def leaves(command: Any) -> list[Any]:
        subs = getattr(command, "commands", None)
        return [command] if subs is None else [leaf for sub in subs.values() for leaf in leaves(sub)]

    without = [
        command.name
        for command in leaves(typer.main.get_command(cli.app))
        if not any("--json" in option.opts for option in command.params)
    ]
    # Writes a table, and nothing on standard output.
    assert without in ([], ["sweep"])


def test_options_come_from_a_file_and_can_be_set_for_once(prism: Any, sweep: Path) -> None:
    job, config = sweep / "job.prism", sweep / "prism.toml"
    config.write_text('[replay]\nslow = ["0=2.0", "1=3.0"]\njson = true\n[spare.plan]\ngroups = 8\n')

    def time(*before: object, after: tuple[str, ...] = ()) -> int:
        code, out, err = prism(*before, "replay", job, *after)
        assert code == 0, err
        return int(json.loads(out)["iteration_time_ns"][0])

    plain = time(after=("--json",))
    assert time("--set", "replay.json=true") == plain
    slow = prism_core.replay(job, slow={0: 2.0, 1: 3.0}).iteration_time_ns[0]
    assert time("--config", config) == slow
    assert time("--config", config, "--set", "replay.slow=[]") == plain
    assert time("--config", config, after=("--slow", "1=1.0")) == plain, "the command line comes first"
    for text, message in (
        ("[repaly]\n", "none of the commands' tables"), ("[replay]\nspeed = 1\n", "replay.speed is no option"),
        ("[replay]\ncontention = [1]\n", "must be one value"), ("[", "is not TOML"),
    ):  # fmt: skip
        config.write_text(text)
        code, _, err = prism("--config", config, "replay", job)
        assert code == 1 and message in err, err
    code, _, err = prism("--config", sweep / "none.toml", "replay", job)
    assert code == 1 and "cannot read" in err


def test_the_version_names_the_build(prism: Any) -> None:
    code, out, _ = prism("--version")
    assert code == 0
    assert re.fullmatch(
        r"prism \S+ \(([0-9a-f]{12}\+?|unknown), release, \S+\), Python 3\.\d+\.\d+, torch .+\n", out
    ), out


def test_shells_complete(tmp_path: Path) -> None:
    environment = {**os.environ, "_PRISM_COMPLETE": "complete_bash", "COMP_WORDS": "prism di", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "import sys; sys.argv = ['prism']; from prism_core.cli import main; main()"]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert child.stdout.split() == ["diagnose"], child.stderr


def test_the_functions_have_the_verbs_names() -> None:
    verbs = {"collect", "replay", "emulate", "inspect", "diagnose", "export", "sweep", "write_report"}
    assert verbs <= set(prism_core.__all__) and all(callable(getattr(prism_core, verb)) for verb in verbs)
