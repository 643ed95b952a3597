"""`prism sweep`: every configuration once, whatever ends it; the best first."""

from __future__ import annotations

import csv
import io
import itertools
import json
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import prism_core
import pytest
from prism_core import _native, synthetic
from prism_core.errors import ConfigError
from prism_core.layout_file import estimate_document, read_layout
from prism_core.settings import apply_settings
from prism_core.sweep import plan_of, sweep, sweep_svg, to_csv
from prism_core.sweep.expression import evaluate
from prism_core.sweep.results import cost, ranked, read_records

SWEEP = """
[sweep]
graph = "pp{pp}.prism"
require = "pp * 2 <= limit"
samples = "16 / pp"

[axes]
pp = [1, 2, 4, 8]
straggler = [1.0, 1.5]

[derived]
limit = 8

[replay]
slow = ["0={straggler}"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep file and the graphs it names."""
    for pp in (1, 2, 4):
        job = synthetic.transformer_step(dp=2, tp=1, pp=pp, microbatches=4, layers=4 // pp)
        job.save(str(tmp_path / f"pp{pp}.prism"))
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return tmp_path


def tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau of two lists without ties."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    agree = sum((one[a] - one[b]) * (other[a] - other[b]) > 0 for a, b in pairs)
    return (2 * agree - len(pairs)) / len(pairs)


def test_cfg_01_larger_micro_batch_better_kernels_or_bigger_bubble(tmp_path: Path) -> None:
    """PP 8, DP 8, 512 samples, 1F1B: kernels get faster with the micro-batch, the bubble longer. The sweep takes 2."""
    micro_batches = {1: (1.0, 1.0), 2: (1.25, 0.879), 4: (1.4, 0.926), 8: (1.45, 1.166)}
    for micro_batch, (speed_up, _) in micro_batches.items():
        times = {
            f"{way}_ns": round(base * micro_batch / speed_up) for way, base in (("forward", 1e7), ("backward", 2e7))
        }
        job = synthetic.transformer_step(
            8, 1, 8, 512 // 8 // micro_batch, 1, **times, activation_bytes=1, gradient_bytes=1, latency_ns=1
        )
        job.save(str(tmp_path / f"{micro_batch}.prism"))
    plan = {
        "sweep": {"graph": str(tmp_path / "{micro_batch}.prism")},
        "axes": {"micro_batch": list(micro_batches)},
    }
    found = sweep(plan, tmp_path / "kept.jsonl")["results"]
    ours = {record["values"]["micro_batch"]: record["iteration_time_ns"] for record in found}
    assert [record["values"]["micro_batch"] for record in found] == [2, 4, 1, 8]
    for micro_batch, (_, expected) in micro_batches.items():
        assert ours[micro_batch] / ours[1] == pytest.approx(expected, abs=0.001)


def test_an_empty_value_is_no_word_of_a_command(tmp_path: Path) -> None:
    plan = plan_of(
        {
            "sweep": {"command": "train.py --name 'a {what}' {options} --last"},
            "axes": {"options": ["", "--recompute --bf16"], "what": ["b c"]},
            "collect": {"world_size": 2},
        },
        tmp_path,
    )
    words = [configuration.command for configuration in plan.configurations]
    assert words[0] == ["train.py", "--name", "a b c", "--last"]
    assert words[1] == ["train.py", "--name", "a b c", "--recompute", "--bf16", "--last"]


def test_configurations_are_ranked_by_time_per_sample(folder: Path) -> None:
    found = sweep(folder / "sweep.toml")
    assert (found["configurations"], found["finished"], found["kept"], found["failed"]) == (6, 6, 0, 0)
    assert found["axes"] == ["pp", "straggler", "limit"]
    assert found["notes"] == ["sweep.require leaves out 2 combinations"]
    results = found["results"]
    assert [record["rank"] for record in results] == [1, 2, 3, 4, 5, 6]
    assert [cost(record) for record in results] == sorted(cost(record) for record in results)
    # As a replay of every rank by itself says: a full run of the model, without what makes sweeps fast.
    full = [
        prism_core.replay(
            folder / f"pp{record['values']['pp']}.prism", slow={0: record["values"]["straggler"]}, symmetry=False
        ).iteration_time_ns[-1]
        for record in results
    ]
    assert [record["iteration_time_ns"] for record in results] == full
    assert (
        tau([cost(record) for record in results], [time / r["samples"] for time, r in zip(full, results, strict=True)])
        == 1
    )


def test_a_sweep_goes_on_where_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = folder / "kept.jsonl"
    whole = sweep(folder / "sweep.toml", output)
    lines = output.read_text().splitlines(keepends=True)
    # One result was cut off when the machine went down, one has a bit turned over.
    output.write_text("".join(lines[:3]) + lines[3].replace('"samples": ', '"samples": 1') + lines[4][:40])
    worked: list[str] = []
    module = __import__("prism_core.sweep", fromlist=["work_out"])
    real = module.work_out
    monkeypatch.setattr(module, "work_out", lambda *task: worked.append(task[2]) or real(*task))
    again = sweep(folder / "sweep.toml", output, jobs=2)
    assert (again["kept"], again["finished"], len(worked)) == (3, 6, 3)
    assert any("2 damaged lines" in note for note in again["notes"])
    times = [(record["name"], record["iteration_time_ns"]) for record in whole["results"]]
    assert [(record["name"], record["iteration_time_ns"]) for record in again["results"]] == times
    records, damaged = read_records(output)
    assert (len(records), damaged) == (6, 2)
    assert sweep(folder / "sweep.toml", output)["kept"] == 6
    # Another graph under the same name is another configuration.
    synthetic.transformer_step(dp=2, tp=1, pp=1, microbatches=4, layers=8).save(str(folder / "pp1.prism"))
    assert sweep(folder / "sweep.toml", output)["kept"] == 4


def test_what_fails_or_does_not_fit_comes_last(folder: Path) -> None:
    text = prism_core.Graph.open(str(folder / "pp1.prism")).to_text()
    lines = [
        line + "\n  +0 s0 alloc 60000000000" if line.startswith("template") else line for line in text.splitlines()
    ]
    prism_core.Graph.from_text("\n".join(lines) + "\n").save(str(folder / "pp1.prism"))
    (folder / "pp4.prism").write_bytes(b"not a graph")
    plan = {"sweep": {"graph": str(folder / "pp{pp}.prism"), "card": "40GiB"}, "axes": {"pp": [4, 1, 2]}}
    found = sweep(plan, folder / "kept.jsonl")
    outcome = [(r["values"]["pp"], r["rank"], r["fits"], r["error"] is None) for r in found["results"]]
    assert outcome == [(2, 1, None, True), (1, None, False, True), (4, None, None, False)]
    assert found["results"][1]["over_by_bytes"] == found["results"][1]["peak_bytes"] - (40 << 30) > 0
    assert found["results"][2]["error"]["kind"] == "GraphFormatError" and found["failed"] == 1
    assert sweep(plan, folder / "kept.jsonl")["kept"] == 3
    assert sweep(plan, folder / "kept.jsonl", retry_failed=True)["kept"] == 2
    svg = sweep_svg(found["results"], "<title> & more")
    root = ElementTree.fromstring(svg)
    assert sum("over" in element.get("class", "") for element in root.iter()) == 1
    table = list(csv.DictReader(io.StringIO(to_csv(found["results"], found["axes"]))))
    assert [row["pp"] for row in table] == ["2", "1", "4"] and table[1]["fits"] == "False" and table[2]["error"]


def test_the_command_prints_a_table_or_one_document(prism: Any, folder: Path) -> None:
    options = ["--csv", folder / "t.csv", "--svg", folder / "t.svg", "--set", "axes.straggler=[1.0]"]
    code, out, err = prism("sweep", folder / "sweep.toml", *options)
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == ["pp", "straggler", "limit", "iteration"] and lines[1].startswith("1 ")
    assert "3 of 3 configurations" in out and "wrote" in err
    assert (folder / "t.csv").read_text().startswith("rank,pp,straggler,limit,iteration_time_ns")
    assert (folder / "t.svg").read_text().startswith("<svg")
    code, out, _ = prism("sweep", folder / "sweep.toml", "--json", *options)
    document = json.loads(out)
    assert document["kept"] == 3 and document["results"][0]["rank"] == 1
    code, _, err = prism("sweep", folder / "sweep.toml", "--executor", "cloud")
    assert code == 1 and "local or ray" in err


def test_a_program_is_collected_for_every_configuration(tmp_path: Path) -> None:
    """What a failed program says is the configuration's outcome, not the sweep's."""
    plan = {
        "sweep": {"command": ["sh", "-c", "echo {width} is too wide; exit 7"]},
        "axes": {"width": [3]},
        "collect": {"world_size": 2, "jobs": 1},
    }
    found = sweep(plan, tmp_path / "kept.jsonl")
    assert found["failed"] == 1 and "exit code 7" in found["results"][0]["error"]["message"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "one of command"),
        ({"sweep": {"graph": "a", "command": "b"}}, "one of command"),
        ({"sweep": {"command": "b"}}, "must have world_size"),
        ({"sweep": {"graph": "a"}, "collect": {"world_size": 2}}, "nothing is collected"),
        ({"sweep": {"graph": "a", "speed": 1}}, "it can have card, command, graph"),
        ({"sweep": {"graph": "{tp}"}, "axes": {"pp": [1]}}, "names {tp}: it is none of pp"),
        ({"sweep": {"graph": "a"}, "axes": {"pp": []}}, "a list of values"),
        ({"sweep": {"graph": "a"}, "axes": {"a": list(range(400)), "b": list(range(400))}}, "at most 100,000"),
        ({"sweep": {"graph": "a", "require": "pp > 1"}, "axes": {"pp": [1]}}, "leaves out all 1"),
        ({"sweep": {"graph": "a", "samples": "0 * pp"}, "axes": {"pp": [1]}}, "above 0"),
        ({"sweep": {"graph": "a"}, "axes": {"pp": [1]}, "derived": {"pp": "1"}}, "also an axis"),
        ({"sweep": {"graph": "a"}, "replay": {"speed": 1}}, r"\[replay\] has 'speed'"),
    ],
)
def test_bad_files_are_refused(document: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(document, tmp_path)


def test_expressions_compute_and_do_nothing_else() -> None:
    values = {"tp": 2, "pp": 4, "mode": "ddp"}
    for text, value in (
        ("tp * pp - 1", 7),
        ("64 // (tp*pp)", 8),
        ("tp < pp <= 4 and mode == 'ddp'", True),
        ("-tp", -2),
    ):
        assert evaluate(text, values, "here") == value
    for text in (
        "__import__('os')",
        "tp.real",
        "[1]",
        "tp ** pp",
        "(lambda: 1)()",
        "1 / 0",
        "mode * 99",
        "",
        "x",
        "1" * 2000,
    ):
        with pytest.raises(ConfigError, match="here"):
            evaluate(text, values, "here")


def test_settings_change_a_file() -> None:
    document = {"axes": {"tp": [1]}, "sweep": {"graph": "a"}}
    changed = apply_settings(document, ["axes.tp=[2, 4]", "sweep.card=80GiB", "replay.contention = fifo"])
    assert changed == {
        "axes": {"tp": [2, 4]}, "sweep": {"graph": "a", "card": "80GiB"}, "replay": {"contention": "fifo"},
    }  # fmt: skip
    assert document["axes"] == {"tp": [1]}
    for item in ("tp", "=3", "a..b=1", "sweep.graph.x=1"):
        with pytest.raises(ConfigError, match="--set"):
            apply_settings(document, [item])


def test_ranking_is_by_fit_then_cost() -> None:
    def record(name: str, time: int, fits: bool | None, samples: float | None = None) -> dict[str, Any]:
        return {"name": name, "iteration_time_ns": time, "fits": fits, "samples": samples, "error": None}

    found = ranked([record("slow", 9, True), record("big", 1, False), record("fast", 16, None, 4.0)])
    assert [(r["name"], r["rank"]) for r in found] == [("fast", 1), ("slow", 2), ("big", None)]


#: What the CUDA context of the profile h100-sxm takes.
CONTEXT_BYTES = tomllib.loads(_native.profile_toml("h100-sxm"))["device"]["context_bytes"]
LAYOUTS = """
[sweep]
layout = "model.toml"
samples = 8
[axes]
tp = [1, 2, 3]
card = ["80GiB", "3GiB"]
[layout]
tp = "{tp}"
"""


def test_layouts_without_a_program(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text(
        "[layout]\nlayers = 4\nhidden = 2048\nheads = 16\nseq = 512\nglobal_batch = 8\n"
    )
    path = tmp_path / "sweep.toml"
    path.write_text(LAYOUTS.replace("samples = 8", 'samples = 8\ncard = "{card}"'))
    found = sweep(path)
    by_name = {record["name"]: record for record in found["results"]}
    assert found["results"][0]["rank"] == 1 and found["failed"] == 2
    for tp in (1, 2):
        layout, _ = read_layout(tmp_path / "model.toml", [f"layout.tp={tp}"])
        expected = estimate_document(layout, "h100-sxm")
        record = by_name[f"tp={tp} card=80GiB"]
        assert record["iteration_time_ns"] == expected["iteration_time_ns"] and record["world_size"] == tp
        assert record["fits"] is None and record["peak_bytes"] is None, "activations are not known"
        small = by_name[f"tp={tp} card=3GiB"]
        over = expected["state_bytes"] + CONTEXT_BYTES - (3 << 30)
        assert (small["fits"], small["over_by_bytes"]) == ((False, over) if over > 0 else (None, None))
    assert by_name["tp=1 card=3GiB"]["fits"] is False and by_name["tp=2 card=3GiB"]["fits"] is None
    assert "cannot be spread evenly over 3 ranks" in by_name["tp=3 card=80GiB"]["error"]["message"]
    # Another content of the file is another configuration.
    assert sweep(path)["kept"] == 6
    (tmp_path / "model.toml").write_text((tmp_path / "model.toml").read_text() + "rotary = true\n")
    assert sweep(path)["kept"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[sweep]\nlayout = "m.toml"\ngraph = "g.prism"', "one of command .* graph .* layout"),
        ('[sweep]\nlayout = "m.toml"\n[replay]\nnccl = {}', r"\[replay\] has nccl: with layout it can have profile"),
        ('[sweep]\nlayout = "m.toml"\n[collect]\nworld_size = 8', "with layout nothing is collected"),
        ('[sweep]\ngraph = "g.prism"\n[layout]\ntp = 2', r"\[layout\] changes a layout file: there is none with graph"),
    ],
)
def test_what_goes_with_a_layout(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(tomllib.loads(text), Path())
