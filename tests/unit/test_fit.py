"""Fits or does not, by how much: measured ranks against the card, and closed forms from arguments."""

from __future__ import annotations

from typing import Any

import pytest
from prism_core import fit
from prism_core.config import parse_device
from prism_core.errors import ConfigError
from prism_core.memory import device_memory
from prism_core.memory_plan import (
    Spread,
    Transformer,
    activation_bytes,
    in_flight,
    parameters,
    plan,
    stage_activations,
    states,
    verdict,
)

MIB, GIB = 1 << 20, 1 << 30
CARD = fit.Card(capacity_bytes=80 * GIB, context_bytes=512 * MIB)


# Closed forms


def test_mem_01_stages_keep_as_many_microbatches_as_are_in_flight() -> None:
    layers = [7, *[6] * 9]
    found = stage_activations(layers, 10)
    assert found.units == [70, 54, 48, 42, 36, 30, 24, 18, 12, 6]
    assert stage_activations(layers, 100).units == found.units
    assert stage_activations(layers, 4).units == [28, 24, 24, 24, 24, 24, 24, 18, 12, 6]
    assert found.candidate == 0
    assert found.verdict.startswith("expected by the schedule: stage 0 is the OOM candidate")


def test_mem_01_a_stage_with_more_layers_may_be_the_candidate() -> None:
    found = stage_activations([2, 9, 2], 8)
    assert (found.units, found.candidate) == ([6, 18, 2], 1)
    assert "falls" not in found.verdict


MOE = Transformer(layers=24, hidden=2048, ffn=0, vocab=102400, experts=64, expert_ffn=1408)


def moe_spread(ep: int) -> Spread:
    return Spread(world=64, tp=2, ep=ep, etp=1, distributed_optimizer=True)


def test_mem_02_routed_experts_are_divided_by_their_own_degrees() -> None:
    counted = parameters(MOE)
    assert (counted.tensor_sharded, counted.replicated, counted.routed) == (822_083_584, 3_246_080, 13_287_555_072)
    assert (moe_spread(8).data_parallel, moe_spread(8).expert_data_parallel) == (32, 8)
    found = states(MOE, moe_spread(8))
    assert (found.parameters, found.total_bytes) == (2_075_232_256, 15_098_168_064)
    wrong = (counted.tensor_sharded + counted.replicated + counted.routed) / 2 * (6 + 12 / 32)
    assert wrong == 44_984_820_096 and found.total_bytes < wrong / 2


def test_mem_02_without_expert_parallelism_nothing_is_left_for_activations() -> None:
    found = states(MOE, moe_spread(1))
    assert found.total_bytes == 84_857_832_192
    assert not verdict(found.total_bytes + GIB, 80 * GIB, CARD.context_bytes).fits


SEVEN_B = {"layers": 32, "hidden": 4096, "ffn": 11008, "vocab": 32000}


@pytest.mark.parametrize(
    ("tied", "count", "size", "replicated_gib"),
    [(True, 6_607_343_616, 49_555_077_120, 110.76), (False, 6_738_415_616, 50_538_117_120, 112.96)],
)
def test_mem_06_states_of_a_7b_model(tied: bool, count: int, size: int, replicated_gib: float) -> None:
    model = Transformer(**SEVEN_B, tied=tied)  # type: ignore[arg-type]
    shared = states(model, Spread(world=8, distributed_optimizer=True))
    assert (shared.parameters, shared.total_bytes) == (count, size)
    everywhere = states(model, Spread(world=8))
    assert everywhere.total_bytes == 18 * count
    assert everywhere.total_bytes / GIB == pytest.approx(replicated_gib, abs=0.005)
    assert not verdict(everywhere.total_bytes, 80 * GIB, 0).fits


def test_mem_06_what_these_arguments_need_and_what_that_rests_on() -> None:
    model = Transformer(**SEVEN_B, tied=True)  # type: ignore[arg-type]
    assert activation_bytes(model, 4096, 2) == 32_086_491_136
    answer = plan(
        model, Spread(world=8, distributed_optimizer=True), seq=4096, micro_batch=2,
        capacity_bytes=80 * GIB, context_bytes=512 * MIB,
    )  # fmt: skip
    assert answer["total_bytes"] == 49_555_077_120 + 32_086_491_136
    assert answer["total_bytes"] / GIB == pytest.approx(76.04, abs=0.01)
    assert (
        answer["fits"] and "only without fragmentation and NCCL buffers: use a smaller micro batch" in answer["verdict"]
    )
    assert any("vocabulary 32000, embeddings tied" in line for line in answer["assumptions"])
    assert any("not counted: NCCL" in line for line in answer["assumptions"])


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="no multiple of 3"):
        states(MOE, Spread(world=64, tp=3))
    with pytest.raises(ConfigError, match="expert_ffn"):
        parameters(Transformer(layers=1, hidden=8, ffn=8, vocab=8, experts=2))
    with pytest.raises(ConfigError, match="at least one stage"):
        in_flight(0, 4)
    with pytest.raises(ConfigError, match="collect it"):
        plan(MOE, moe_spread(8), seq=1, micro_batch=1, capacity_bytes=1, context_bytes=0)


# Ranks that ran


def rank(number: int, gib: int, stage: int | None, **more: Any) -> dict[str, Any]:
    found = {
        "rank": number, "peak_allocated_bytes": gib * GIB - MIB, "peak_reserved_bytes": gib * GIB,
        "peak_device_bytes": gib * GIB, "workspace_bytes": 32 * MIB, "nccl_buffer_bytes": 256 * MIB,
        "pipeline_stage": stage, "notes": {}, **more,
    }  # fmt: skip
    return {**found, "memory": fit.rank_memory(found, CARD)}


def test_parts_are_apart_and_say_what_they_rest_on() -> None:
    memory = rank(3, 70, None, peak_device_bytes=70 * GIB + 3 * MIB, communicators=[{"size": 1}, {"size": 8}])["memory"]
    parts = {part["name"]: (part["bytes"], part["basis"]) for part in memory["parts"]}
    assert parts == {
        "allocator": (70 * GIB, "recorded"),
        "driver allocations beside it": (3 * MIB, "recorded"),
        "NCCL buffers": (256 * MIB, "modelled"),
        "CUDA context and library images": (512 * MIB, "assumed"),
    }
    assert memory["total_bytes"] == 70 * GIB + 771 * MIB and memory["workspace_bytes"] == 32 * MIB
    assert memory["free_bytes"] == 80 * GIB - memory["total_bytes"] and memory["fits"]
    nccl = next(part for part in memory["parts"] if part["name"] == "NCCL buffers")
    assert nccl["remark"] == "without 1 of a single rank: unknown"


def test_mem_05_the_framework_s_number_alone_is_never_the_memory() -> None:
    memory = device_memory(70 * GIB, [2, 4, 1], {2: 544 * MIB, 4: 688 * MIB, 1: 512 * MIB})
    lines = dict(memory.lines())
    assert lines["framework peak"] == "70.00 GiB, recorded"
    assert lines["communicator buffers"] == "1744 MiB (1.703 GiB), given"
    assert lines["total"] == "71.703 GiB + context"
    assert dict(device_memory(70 * GIB, [2, 4, 1]).lines())["total"] == "unknown + 70.00 GiB"
    assert rank(0, 70, None)["memory"]["total_bytes"] > 70 * GIB


def test_the_verdict_is_by_stage_and_for_the_worst_rank() -> None:
    ranks = [rank(0, 81, 0), rank(1, 60, 0), rank(8, 40, 1), rank(12, 44, 1)]
    ranks[1]["notes"] = {"rule routing (zipf): router logits of 8 experts are given by the rule": 1}
    job = fit.job_memory(ranks, CARD)
    assert [(stage["stage"], stage["rank"], stage["fits"]) for stage in job["stages"]] == [(0, 0, False), (1, 12, True)]
    assert not job["fits"] and job["worst_rank"] == 0 and job["routing"] == ["zipf"]
    assert job["free_bytes"] == -(GIB + 768 * MIB) and job["verdict"] == "does not fit: 1.75 GiB too much"
    rows = dict(fit.job_rows(job))
    assert rows["memory"] == (
        "does not fit: 1.75 GiB too much of 80 GiB (worst of the ranks run: rank 0, routing zipf)"
    )
    assert rows["memory, stage 1"] == "fits, 35.25 GiB free: 44.75 GiB on rank 12"
    assert fit.from_meta(fit.to_meta(job)) == job
    assert list(fit.job_rows(fit.from_meta(""))) == []


def test_the_card_is_the_profile_s() -> None:
    card = fit.Card.of_profile(parse_device("emulated:h100-sxm").profile)
    assert card.capacity_bytes > 79 * GIB and 400 * MIB < card.context_bytes < GIB
