"""Fault tolerance of a job from its graph: groups, steps with longer stacks, memory, checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prism_core import spare, synthetic
from prism_core._native import Graph
from prism_core.errors import ConfigError
from test_spare import cli


def data_parallel(ranks: int = 12, iterations: int = 3, extra: str = "") -> Graph:
    """Forward 3 ms and backward 6 ms, a reduction of 64 MiB, an optimiser of 1 ms; memory of 60 GiB."""
    body = """
  +0 s0 compute 3000000000 Gemm Measured "forward"
  +0 s0 compute 6000000000 Gemm Measured "backward"
  +0 s0 AllReduce c0 Float32 16777216 Sum
  +0 s0 compute 1000000000 Kernel Measured "optimiser"
  +0 s0 iteration_end"""
    return Graph.from_text(
        "prism-graph 1\n"
        f"world {ranks}\n"
        'name "forward"\nname "backward"\nname "optimiser"\n'
        f"comm 0-{ranks - 1}\n"
        'template "all"\n'
        f"  +0 s0 alloc 64424509440\n  +0 s0 training_begin{extra}{body * iterations}\n"
        f"rank 0-{ranks - 1} template 0 comms 0\n"
    )


def test_groups_are_what_gradients_are_summed_between() -> None:
    graph = synthetic.transformer_step(6, 2, 3, 4, 2, iterations=2)
    facts = spare.read_job(graph)
    # Rank tp + TP * (dp + DP * pp): the group of replica 0 is 0, 1, 12, 13, 24, 25.
    assert facts.groups[0] == [0, 1, 12, 13, 24, 25]
    assert (len(facts.groups), facts.gpus_per_group) == (6, 6)
    assert facts.entry_ns + facts.rest_ns == facts.step_ns
    assert facts.reduction_ns > 0
    assert facts.gathers == 0
    with pytest.raises(ConfigError, match="it has 6 groups that reduce gradients, not 4"):
        spare.read_job(graph, groups=4)


def test_experts_join_the_replicas_that_share_them() -> None:
    facts = spare.read_job(synthetic.transformer_step(8, 1, 2, 4, 2, ep=2))
    assert (len(facts.groups), facts.gpus_per_group) == (4, 4)


def test_a_job_of_one_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="all ranks are one group"):
        spare.read_job(synthetic.transformer_step(1, 2, 2, 4, 2))


def test_what_a_step_is_made_of() -> None:
    facts = spare.read_job(data_parallel())
    assert facts.entry_ns == 9_000_000
    assert facts.rest_ns == facts.reduction_ns + 1_000_000
    assert facts.gradient_elements == 16_777_216
    assert facts.peak_bytes == 60 << 30
    assert facts.card_bytes is None
    assert facts.provenance == {"measured": 12 * 10_000_000}


def test_the_reduction_alone_overlaps_with_nothing_of_the_step_before() -> None:
    """As DDP does it: the reduction has a stream of its own, which is free while the optimiser still runs."""
    text = data_parallel().to_text()
    apart = """  +0 s0 event_record e0
  +0 s1 event_wait e0
  +0 s1 AllReduce c0 Float32 16777216 Sum
  +0 s1 event_record e1
  +0 s0 event_wait e1
"""
    together = "  +0 s0 AllReduce c0 Float32 16777216 Sum\n"
    assert text.count(together) == 3
    facts, same_stream = (
        spare.read_job(graph) for graph in (Graph.from_text(text.replace(together, apart)), data_parallel())
    )
    assert facts.reduction_ns == same_stream.reduction_ns > 100_000
    assert (facts.entry_ns, facts.rest_ns) == (same_stream.entry_ns, same_stream.rest_ns)


def test_replayed_failures_agree_with_the_closed_form() -> None:
    found = spare.replayed(data_parallel(), {2: [5]}, r=3, detection_s=0.5, shrink_s=0.1)
    rows = found["iterations"]
    assert [row["stacks"] for row in rows] == [1, 1, 2, 2, 2]
    assert [row["live"] for row in rows] == [12, 12, 11, 11, 11]
    assert rows[2]["action"] == "reorder"
    # The reduction among 11 ranks is not that among 12: the closed form does not know that.
    fewer = rows[3]["time_ns"] - 2 * 9_000_000 - 1_000_000
    for row in rows[:2]:
        assert row["time_ns"] == row["closed_form_ns"]
    for row in rows[2:]:
        assert row["time_ns"] - row["closed_form_ns"] == fewer - found["job"]["reduction_ns"]
    assert rows[2]["closed_form_ns"] == 2 * 9_000_000 + found["delay_ns"] + found["job"]["rest_ns"]


def test_replayed_failures_of_a_job_with_all_kinds_of_parallelism() -> None:
    graph = synthetic.transformer_step(8, 2, 2, 4, 2, iterations=2)
    found = spare.replayed(graph, {1: [3], 4: [0, 6]}, r=3, placement="contiguous", iterations=7)
    for row in found["iterations"]:
        assert row["time_ns"] == pytest.approx(row["closed_form_ns"], rel=0.01)
    times = [row["time_ns"] for row in found["iterations"]]
    assert times[0] < times[2] < times[1]
    assert times[3] < times[4]
    slow = spare.replayed(
        graph, {1: [3]}, r=3, iterations=3, perturb=[{"kind": "straggler", "ranks": [0], "factor": 2.0}]
    )
    assert slow["iterations"][2]["time_ns"] > 1.3 * times[2]


def test_ranks_with_durations_of_their_own_keep_them() -> None:
    # The forward pass of the third iteration, which stands for all that follow: 9 ms longer on rank 2.
    slow = Graph.from_text(data_parallel(6).to_text() + "override 2 op 12 12000000000\n")
    times, plain = (
        [row["time_ns"] for row in spare.replayed(graph, {3: [4]}, r=2, placement="contiguous")["iterations"]]
        for graph in (slow, data_parallel(6))
    )
    # In the iteration of the failure group 3 computes an entry more, as long as rank 2's one.
    longer = [a - b for a, b in zip(times, plain, strict=True)]
    assert longer == pytest.approx([0, 0, 9_000_000, 0, 18_000_000, 18_000_000], abs=10_000)


def test_a_wipe_out_is_no_step() -> None:
    graph = data_parallel(8)
    with pytest.raises(ConfigError, match="leaves no host for type"):
        spare.replayed(graph, {0: [2], 1: [1]}, r=2, placement="contiguous")
    with pytest.raises(ConfigError, match="failed already"):
        spare.replayed(graph, {0: [2], 1: [2]}, r=3, placement="contiguous")
    with pytest.raises(ConfigError, match="iteration 7, but only 3"):
        spare.replayed(graph, {7: [2]}, r=3, placement="contiguous", iterations=3)
    with pytest.raises(ConfigError, match="at most 3"):
        spare.replayed(graph, {0: [2]}, r=4)
    for late in (-1.0, float("nan"), 1e300):
        with pytest.raises(ConfigError, match=r"detection_s is .* must be 0 to"):
            spare.replayed(graph, {0: [2]}, r=3, placement="contiguous", detection_s=late)
    with pytest.raises(ConfigError, match=r"the groups \[-1\] fail in iteration 0"):
        spare.replayed(graph, {0: [-1]}, r=3, placement="contiguous")
    with pytest.raises(ConfigError, match="the groups are 0 to 7"):
        spare.replayed(graph, {0: [8]}, r=3, placement="contiguous")
    with pytest.raises(ConfigError, match="there must be 1 to 10000"):
        spare.replayed(graph, {10**12: [2]}, r=3, placement="contiguous")


def test_memory_is_checked_against_the_card_and_unknown_where_it_is() -> None:
    facts = spare.read_job(synthetic.transformer_step(6, 1, 1, 1, 2))
    assert facts.peak_bytes is None
    assert "unknown" in spare.stacking_memory(facts)["verdict"]
    profile = synthetic.transformer_step(2, 1, 1, 1, 1).meta["profile"]
    with_card = Graph.from_text(
        data_parallel().to_text().replace("comm 0-11", f'meta "profile" {json.dumps(profile)}\ncomm 0-11', 1)
    )
    facts = spare.read_job(with_card)
    assert facts.card_bytes == 84_942_979_072
    memory = spare.stacking_memory(facts, data_bytes_per_type=4e9)
    assert memory["fits_memory"] == 1 + (84_942_979_072 - (60 << 30)) // 4_000_000_000
    assert spare.stacking_memory(facts, 0)["fits_memory"] is None
    assert "unknown" in spare.stacking_memory(facts)["verdict"]
    options = {"restart_s": 600.0, "system_mtbf_s": 300.0, "checkpoint_s": 20.0, "steps": 200, "seeds": 4}
    found = spare.plan_job(with_card, data_bytes_per_type=9e9, **options)
    assert found["best"]["r"] <= 3
    with pytest.raises(ConfigError, match="no second type fits"):
        spare.plan_job(with_card, data_bytes_per_type=30e9, **options)
    too_much = Graph.from_text(with_card.to_text().replace("alloc 64424509440", "alloc 94424509440"))
    with pytest.raises(ConfigError, match="does not fit even without redundancy"):
        spare.plan_job(too_much, **options)


def test_a_plan_from_a_graph_invents_no_checkpoint() -> None:
    options = {"restart_s": 600.0, "system_mtbf_s": 300.0, "steps": 200, "seeds": 4}
    with pytest.raises(ConfigError, match="the graph does not say what a checkpoint holds"):
        spare.plan_job(data_parallel(), **options)
    with pytest.raises(ConfigError, match="storage_bytes_per_s is missing"):
        spare.plan_job(data_parallel(), bytes_per_parameter=14, **options)
    found = spare.plan_job(data_parallel(), bytes_per_parameter=14, storage_bytes_per_s=1e9, **options)
    assert found["checkpoint"]["save_s"] == pytest.approx(14 * 16_777_216 / 1e9)
    assert {"fits_memory", "cost_per_gpu_hour"} <= set(found["unknown"])
    assert found["job"]["groups"] == 12
    timed = spare.plan_job(data_parallel(), checkpoint_s=3.0, **options)
    assert "size_bytes" in timed["unknown"]


def test_the_command_line_of_a_job(tmp_path: Path) -> None:
    path, report = tmp_path / "job.prism", tmp_path / "plan.html"
    synthetic.transformer_step(12, 2, 2, 4, 2, iterations=2).save(str(path))
    plan = cli(
        "from", str(path), "--restart", "10min", "--mtbf-system", "300s", "--checkpoint", "20s", "--steps", "300",
        "--seeds", "4", "--report", str(report),
    )  # fmt: skip
    assert plan.returncode == 0, plan.stderr
    assert "12 groups of 4 ranks" in plan.stdout
    assert "unknown" in plan.stdout
    page = report.read_text()
    assert page.count("<svg") == 2
    assert "What it depends on" in page
    replay = cli("replay", str(path), "-r", "3", "--fail", "1:5", "--fail", "2:7,9", "--json")
    assert replay.returncode == 0, replay.stderr
    assert [row["live"] for row in json.loads(replay.stdout)["iterations"]] == [12, 11, 9, 9, 9]
    assert "groups 5 die" in cli("replay", str(path), "-r", "3", "--fail", "1:5").stdout
    wrong = cli("replay", str(path), "-r", "3", "--fail", "x")
    assert wrong.returncode == 1
    assert "3:17" in wrong.stderr
