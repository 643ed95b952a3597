"""Fault-tolerance planning: names, published values, errors a user can act on."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prism_core import spare
from prism_core.errors import ConfigError
from prism_core.units import byte_count, bytes_per_second, duration_text, seconds

VECTORS = Path(__file__).parents[3] / "shared/data/spare/vectors.json"


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prism_core.cli", "spare", *arguments], capture_output=True, text=True, timeout=600
    )


def test_the_names_answer_the_published_values() -> None:
    assert spare.mean_endurable_failures(600, 8) == pytest.approx(253.988824, abs=1e-5)
    assert spare.overhead_lower_bound(600, 8) == pytest.approx(1.996047, abs=1e-5)
    assert [spare.redundancy_rule(n) for n in (200, 600, 1000)] == [8, 10, 10]
    assert spare.checkpoint_interval(save_s=60, restart_s=3600, mtbf_s=300) == pytest.approx(746.7314, abs=1e-3)
    assert spare.availability(save_s=60, restart_s=3600, mtbf_s=31560) == pytest.approx(0.846681, abs=1e-5)
    assert spare.expected_masked(200, 4, "disjoint") == pytest.approx(67.300554, abs=1e-5)
    assert spare.expected_masked(12, 4, "contiguous") == pytest.approx(6.272727, abs=1e-5)
    assert spare.offsets(20, 4, "golomb") == [0, 1, 4, 6]
    assert [spare.max_redundancy(n) for n in (200, 600, 1000)] == [12, 20, 26]
    assert spare.intervals(30, 60, 180).is_young_off


def test_vectors_of_the_controller() -> None:
    if not VECTORS.exists():
        pytest.skip("the shared data folder is not there")
    vectors = json.loads(VECTORS.read_text())["vectors"]
    checked = 0
    for vector in vectors:
        inputs, value = vector["inputs"], vector["value"]
        if "failed" in inputs:
            found = spare.min_stacks(inputs["N"], inputs["offsets"], inputs["failed"])
            assert found == (None if value == "WIPEOUT" else value), vector["id"]
            checked += 1
        elif "failure_order" in inputs:
            arguments = (inputs["N"], inputs["offsets"], inputs["failure_order"])
            assert spare.wipe_out_index(*arguments) == value["T"], vector["id"]
            assert {str(s): k for s, k in spare.stack_thresholds(*arguments).items()} == value["K"], vector["id"]
            checked += 1
    assert checked >= 10


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(24)), r=st.integers(2, 4))
def test_a_layout_covers_every_type_until_the_wipe_out(order: list[int], r: int) -> None:
    layout = spare.Layout(24, r)
    end = spare.wipe_out_index(24, spare.offsets(24, r), order)
    for index, group in enumerate(order, start=1):
        plan = layout.fail([group])
        assert (plan.action == "wipe-out") == (index == end)
        if plan.action == "wipe-out":
            assert plan.lost
            break
        assert plan.stacks >= (spare.min_stacks(24, spare.offsets(24, r), order[:index]) or 0)
        for shard, by in enumerate(plan.computed_by):
            assert by in layout.live
            assert shard in layout.computed(by)
    layout.reset()
    assert layout.live == list(range(24))


def test_copies_in_different_racks() -> None:
    racks = [group // 8 for group in range(96)]
    found = spare.spread(racks, 6)
    assert (found.shared, found.most_in_domain) == (0, 1)


JOB = {"compute_s": 10.0, "all_reduce_s": 1.0, "steps": 500, "save_s": 20.0, "restart_s": 300.0}


def test_a_simulation_is_deterministic_and_says_how_sure_it_is() -> None:
    arguments = {**JOB, "system_mtbf_s": 300.0, "checkpoint_steps": 20, "r": 4, "seeds": 16}
    one, two = (spare.simulate(60, **arguments, threads=threads) for threads in (1, 3))  # type: ignore[arg-type]
    assert one == two
    summary = one["summary"]
    assert summary["finished"] == 16
    time = summary["relative_time"]
    assert time["p10"] <= time["p50"] <= time["p90"]
    assert time["standard_error"] > 0


def test_a_plan_beats_what_it_is_compared_with() -> None:
    found = spare.plan(60, **JOB, system_mtbf_s=300.0, repair_s=3600.0, seeds=8)  # type: ignore[arg-type]
    best = found["best"]["simulated"]["relative_time"]["mean"]
    others = {each["policy"]: each for each in found["alternatives"]}
    assert set(others) == {"replication", "checkpoint", "elastic"}
    assert best < others["replication"]["simulated"]["relative_time"]["mean"]
    assert {each["input"] for each in found["sensitivities"]} >= {"mtbf", "restart", "checkpoint"}
    assert found["best"]["gpu_hours"] is None
    assert "gpus_per_group" in found["unknown"]


def test_without_a_step_time_the_answer_is_relative() -> None:
    found = spare.plan(600, save_s=60, restart_s=3600, system_mtbf_s=300)
    assert found["best"]["simulated"] is None
    assert found["best"]["r"] == 10
    assert "compute_s" in found["unknown"]
    low, high = found["best"]["band"]
    assert low <= found["best"]["relative_time"] <= high


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: spare.offsets(200, 13), "r is 13: a Golomb placement of 200 groups allows at most 12"),
        (lambda: spare.mean_endurable_failures(1, 1), "n is 1"),
        (lambda: spare.checkpoint_interval(-1, 2, 3), "save_s is -1"),
        (lambda: spare.min_stacks(20, [0, 1], [20]), "failed is 20: the groups are 0 to 19"),
        (lambda: spare.wipe_out_index(20, [0, 1], [3, 3]), "fails twice"),
        (lambda: spare.Layout(20, 3).fail([7, 7]), "failed already"),
        (lambda: spare.Layout(20, 3, "golom"), "golomb, contiguous"),
        (lambda: spare.simulate(60, **JOB, checkpoint_steps=20, r=4), "either group_mtbf_s or system_mtbf_s"),  # type: ignore[arg-type]
        (lambda: spare.simulate(60, **JOB, checkpoint_steps=20, system_mtbf_s=9.0), "r is missing"),  # type: ignore[arg-type]
        (
            lambda: spare.simulate(60, **JOB, checkpoint_steps=2, system_mtbf_s=9.0, policy="elastic"),  # type: ignore[arg-type]
            "repair_s is missing",
        ),
        (lambda: spare.plan(60, **JOB, system_mtbf_s=300.0, spares=2), "repair_s is missing"),  # type: ignore[arg-type]
        (lambda: spare.plan(1, **JOB, system_mtbf_s=300.0), "n is 1: there must be 2"),  # type: ignore[arg-type]
        (lambda: spare.simulate(1, **JOB, checkpoint_steps=20, system_mtbf_s=300.0, r=2), "n is 1: there must be 2"),  # type: ignore[arg-type]
        (lambda: spare.plan(60, **JOB, system_mtbf_s=-1.0), "above 0"),  # type: ignore[arg-type]
        (lambda: spare.plan(60, **JOB, system_mtbf_s=0.5, redundancy=(2, 3), seeds=4), "no progress"),  # type: ignore[arg-type]
        (lambda: spare.plan(60, **JOB, system_mtbf_s=90.0, redundancy=(9, 12), placements=["golomb"]), "at most 7"),  # type: ignore[arg-type]
    ],
)
def test_inputs_are_refused_by_name(call: object, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        call()  # type: ignore[operator]


def test_a_plan_tries_fewer_spare_groups_too() -> None:
    found = spare.plan(60, **JOB, system_mtbf_s=300.0, repair_s=7200.0, spares=5, seeds=8)  # type: ignore[arg-type]
    tried = [choice for choice in found["alternatives"] if choice["policy"] == "spares"]
    assert [choice["spares"] for choice in tried] == [5, 2, 1]
    times = [choice["simulated"]["total_s"]["mean"] for choice in tried]
    assert times == sorted(times), "more spare groups are no slower"


def test_units() -> None:
    assert seconds("300s", "x") == seconds("5min", "x") == seconds("300", "x") == 300
    assert seconds("1h30m", "x") == 5400
    assert byte_count("20TB", "x") / bytes_per_second("340GB/s", "x") == pytest.approx(58.82, abs=0.01)
    assert [duration_text(value) for value in (0.5, 90, 7200, 90_000)] == ["0.5 s", "1 min 30 s", "2 h", "1 d 1 h"]
    for text in ("-5s", "5 parsecs", "", "5m5h", "1h 5", "5s5s"):
        with pytest.raises(ConfigError, match="field"):
            seconds(text, "field")
    for text in ("20", "20s", "TB"):
        with pytest.raises(ConfigError, match="field"):
            byte_count(text, "field")
    with pytest.raises(ConfigError, match="such as 340GB/s"):
        bytes_per_second("340GB", "field")


def test_the_command_line(tmp_path: Path) -> None:
    # The answer for 600 groups is r 10 among all there are (above); a plan of fewer takes a fifth of the time.
    job = ["--restart", "1h", "--checkpoint", "60s", "--mtbf-system", "300s"]
    plan = ["plan", "--groups", "600", "--max-redundancy", "12", *job]
    found = cli(*plan, "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["best"]["r"] == 10
    text = cli(*plan)
    assert "Recommended: SPARe r 10 golomb" in text.stdout
    table = tmp_path / "sweep.csv"
    assert cli("sweep", "--groups", "60", *job, "--mtbf-system", "1h", "-o", str(table)).returncode == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert {row["system_mtbf_s"] for row in rows} == {"300.0", "3600.0"}
    wrong = cli("plan", "--groups", "600", "--restart", "1x", "--checkpoint", "60s", "--mtbf-system", "300s")
    assert wrong.returncode == 1
    assert wrong.stderr == ("prism: error: --restart is '1x': it must be a duration such as 300s, 5min, 1h30m or 2d\n")
