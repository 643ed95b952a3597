"""Step times from operator models: what must hold whatever the constants are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prism_core.config import read_profile
from prism_core.errors import ConfigError
from prism_core.estimate import Layout, bubble, estimate, parameters_per_rank, parts, useful_flop

H100 = read_profile("h100-sxm")
LAYOUT = Layout(layers=8, hidden=4096, heads=32, seq=4096, global_batch=32, tp=2, pp=2, dp=2)


def step(**changes: object) -> int:
    """Step time of the layout with other numbers, ns."""
    return int(estimate(replace(LAYOUT, **changes), H100)["iteration_time_ns"])  # type: ignore[arg-type]


def test_parameters_and_flop_are_those_of_the_formula() -> None:
    """Twelve times the square of the hidden size a layer, and the embedding; six FLOP per parameter and token."""
    assert parameters_per_rank(LAYOUT) == (12 * 4096**2 * 4 + 51200 * 4096) // 2
    tokens = 32 * 4096
    dense = 6 * (12 * 4096**2 * 8 + 51200 * 4096) * tokens
    assert useful_flop(LAYOUT) == dense + 6 * 8 * 4096 * 4096 * tokens
    assert bubble(LAYOUT) == 1 / 16


@pytest.mark.parametrize(
    "slower",
    [
        {"recompute": True},
        {"fixed_ns": 1_000_000},
        {"global_batch": 64},
        {"dropout": True, "fused_attention": False},
        {"gradient_bytes_per_parameter": 4},
        {"gated": True},
        {"rotary": True},
        {"fused_loss": False},
    ],
)
def test_more_work_takes_longer(slower: dict[str, object]) -> None:
    """Each change adds work, bytes or time."""
    assert step(**slower) > step()


def test_parameters_gathered_in_8_bits_are_not_cast() -> None:
    """Six bytes of each parameter of a stage, once a step; sharded in 16 bits, in every forward pass."""
    cast = estimate(replace(LAYOUT, dtype="fp8"), H100)["optimizer_ns"]
    ready = estimate(replace(LAYOUT, dtype="fp8", parameter_bytes=1), H100)["optimizer_ns"]
    assert cast - ready == pytest.approx(6 * 12 * 4096**2 * 4 / 2 / (3352.32 * 0.88), rel=0.02)
    plain = parts(replace(LAYOUT, dtype="fp8", pp=1))
    assert len(parts(replace(LAYOUT, dtype="fp8", pp=1, fully_sharded=True)).forward) == len(plain.forward) + 1


def test_untied_ends_are_twice_the_parameters_of_a_single_stage() -> None:
    """The last stage of a pipeline has the head, the first the embedding."""
    ends = 51200 * 4096 // 2
    alone = replace(LAYOUT, pp=1)
    assert parameters_per_rank(replace(alone, untied_embeddings=True)) - parameters_per_rank(alone) == ends
    assert parameters_per_rank(replace(LAYOUT, untied_embeddings=True)) == parameters_per_rank(LAYOUT)


@pytest.mark.parametrize(
    "faster",
    [
        {"vp": 2},
        {"dtype": "fp8"},
        {"sequence_parallel": True},
        {"tp_overlap": 0.5},
        {"dp_overlap": True},
        {"distributed_optimizer": True},
        {"cp": 2},
    ],
)
def test_what_is_hidden_or_spread_is_faster(faster: dict[str, object]) -> None:
    """Overlap, sharding, a shorter bubble."""
    assert step(**faster) < step()


def test_a_slow_host_bounds_the_step() -> None:
    """A layer takes no less than the launches of its kernels."""
    slow = H100.replace("kernel_launch_ns = 4500", "kernel_launch_ns = 1000000")
    found, alone = parts(LAYOUT), estimate(LAYOUT, slow)
    assert alone["forward_layer_ns"] == len(found.forward) * 1_000_000
    assert alone["backward_layer_ns"] == len(found.backward) * 1_000_000


def test_fully_sharded_layers_wait_for_their_parameters() -> None:
    """With little to compute the gathers decide, with much they are hidden."""
    small = replace(LAYOUT, tp=1, pp=1, dp=64, seq=128, global_batch=64)
    sharded = estimate(replace(small, fully_sharded=True), H100)
    assert sharded["forward_layer_ns"] > estimate(small, H100)["forward_layer_ns"]
    large = replace(small, seq=32768)
    hidden = estimate(replace(large, fully_sharded=True, dp_sms=0), H100)
    assert hidden["forward_layer_ns"] == estimate(large, H100)["forward_layer_ns"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"global_batch": 33}, "global batch"),
        ({"layers": 9}, "evenly over 2 stages"),
        ({"heads": 31}, "31 heads"),
        ({"cp": 3}, "over 3 ranks"),
        ({"tp_overlap": 1.5}, "tp_overlap is 1.5"),
        ({"fully_sharded": True}, "not modelled"),
        ({"cp": 2, "fused_attention": False}, "fused attention"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(changes: dict[str, object], text: str) -> None:
    """The message names the number."""
    with pytest.raises(ConfigError, match=text):
        step(**changes)
