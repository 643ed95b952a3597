"""Message programs (GOAL): from text to an answer, and what other verbs say to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import prism_core
import pytest
from prism_core import ConfigError, DeadlockError, GraphFormatError, goal
from prism_core.messages import import_goal, is_message_program, replay_program
from prism_core.replay import open_graph

TEXT = """num_ranks 2
rank 0 {
l1: calc 100
l2: send 11b to 1
l2 requires l1
}
rank 1 {
l1: recv 11b from 0
}
"""
SMALL = "L=250,o=15,g=10,G=2,O=1,S=500"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "job.goal"
    path.write_text(TEXT)
    return path


@pytest.fixture
def stored(text: Path, tmp_path: Path) -> Path:
    path = tmp_path / "job.prism"
    assert import_goal(text, path)["ops"] == 3
    return path


def test_both_forms_replay_the_same(text: Path, stored: Path) -> None:
    # 100, then L + o, then o + 10 G.
    for path in (text, stored):
        result = prism_core.replay(path, loggops=SMALL)
        assert (result.level, result.world_size, result.ops, result.messages) == ("message", 2, 3, 1)
        assert (result.total_time_ns, result.iteration_time_ns, result.critical_rank) == (400, [400], 1)
        assert result.graph_bytes == stored.stat().st_size and result.peak_rss_bytes > 0 and result.wall_ns > 0


def test_parameters_are_a_text_or_a_mapping(text: Path) -> None:
    assert replay_program(text, {"L": 250, "o": 15, "g": 10, "G": 2, "O": 1})["total_ticks"] == 400
    default = replay_program(text)
    assert default["total_ticks"] == 100 + 14_000 and default["loggops"]["S"] is None
    finer = replay_program(text, "tick_ps=100")
    assert finer["total_ticks"] == 100 + 140_000 + 2 and finer["total_time_ns"] == 14_010
    for bad in ("L", "q=1", "L=-1", "G=x", "L=1,L=2", "tick_ps=0"):
        with pytest.raises(ConfigError, match=bad.split("=", maxsplit=1)[0]):
            replay_program(text, bad)


def test_what_is_written_reads_the_same(text: Path, tmp_path: Path) -> None:
    program = goal.read(text)
    goal.write(program, tmp_path / "again.goal")
    again = goal.read(tmp_path / "again.goal")
    assert again.to_goal() == program.to_goal() and (again.world_size, again.num_ops) == (2, 3)


def test_a_blocked_job_names_who_waits_for_whom(text: Path) -> None:
    text.write_text(TEXT.replace("from 0", "from 0 tag 4"))
    with pytest.raises(DeadlockError, match=r"rank 1's op 0 .* waits for a send that no rank has .*tag 0 from rank 0"):
        prism_core.replay(text)


def test_files_that_are_none_are_refused(text: Path, stored: Path, tmp_path: Path) -> None:
    text.write_text(TEXT.replace("11b to 1", "11b to 2"))
    with pytest.raises(GraphFormatError, match="line 4, rank 0, l2: send: rank 2 is outside the job"):
        prism_core.replay(text)
    data = bytearray(stored.read_bytes())
    data[300] ^= 1
    stored.write_bytes(data)
    with pytest.raises(GraphFormatError, match="checksum"):
        prism_core.replay(stored)
    other = tmp_path / "other"
    other.write_bytes(b"")
    assert not is_message_program(other) and not is_message_program(tmp_path / "none")
    for path in (other, tmp_path / "none"):
        with pytest.raises(ConfigError, match=path.name):
            goal.read(path)


def test_verbs_that_need_programs_refuse_by_name(text: Path, stored: Path, prism: Any, tmp_path: Path) -> None:
    for path in (text, stored):
        with pytest.raises(ConfigError, match=r"message-level program .*only replay and inspect"):
            open_graph(path)
        for verb in (["diagnose", path], ["emulate", path, "--sandbox", 0, "-o", tmp_path / "run", "--", "true"]):
            code, _, err = prism(*verb)
            assert code == 1 and "message-level program" in err
    for options in ({"slow": {0: 2.0}}, {"symmetry": False}, {"contention": "fair-share"}):
        with pytest.raises(ConfigError, match="takes only loggops"):
            prism_core.replay(text, **options)  # type: ignore[arg-type]


def test_the_command_line(text: Path, prism: Any, tmp_path: Path) -> None:
    out_path = tmp_path / "out.prism"
    code, out, err = prism("import", "goal", text, "-o", out_path, "--json")
    assert code == 0, err
    assert json.loads(out)["ops_by_kind"] == {"calc": 1, "recv": 1, "send": 1}
    code, out, _ = prism("inspect", out_path)
    assert code == 0 and "2, message level" in out
    code, out, _ = prism("replay", out_path, "--loggops", SMALL, "--json")
    document = json.loads(out)
    assert code == 0 and document["level"] == "message" and document["total_time_ns"] == 400
    code, out, _ = prism("replay", text, "--loggops", SMALL)
    assert code == 0 and "400 ticks" in out
    code, _, err = prism("import", "goal", tmp_path / "none", "-o", out_path)
    assert code == 1 and "none" in err


def test_loggops_is_not_for_graphs() -> None:
    graph = prism_core.synthetic.transformer_step(1, 2, 1, 1, 1)
    with pytest.raises(ConfigError, match="loggops is for message programs"):
        prism_core.replay(graph, loggops=SMALL)
