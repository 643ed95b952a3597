"""A node that is too hot only at full load: `python examples/thermal_throttling.py`.

One node of eight GPUs gets warm air (46 degrees). In a trial run, one pipeline with a few microbatches, its GPUs idle
in the pipeline's bubble and stay cool enough; in the whole job of 8,192 ranks they hardly idle, and throttle.
"""

from prism_core import Graph, diagnose, replay
from prism_core.perturb import ThermalThrottle
from prism_core.synthetic import transformer_step

TP, PP = 8, 8


def job(dp: int, microbatches: int) -> Graph:
    """Two steps on `dp` pipelines of 8 stages; each stage is a node of 8 GPUs."""
    return transformer_step(
        dp, TP, PP, microbatches, layers=2, iterations=2, forward_ns=5_000_000, backward_ns=10_000_000,
        tensor_bytes=2 << 20, activation_bytes=4 << 20,
    )  # fmt: skip


def warm(node: int) -> list[ThermalThrottle]:
    """GPUs of 700 W that get 0.075 degrees per watt hotter than the air, and throttle in steps at 85 degrees."""
    return [
        ThermalThrottle(
            ranks=range(TP * node, TP * (node + 1)), ambient_c=46, throttle_c=85, hysteresis_c=5,
            resistance_c_per_w=0.075, capacitance_j_per_c=20, idle_w=90, power_w=700,
            clocks=[1.0, 0.93, 0.86, 0.79, 0.72], period_ns=100_000_000,
        )
    ]  # fmt: skip


for name, dp, microbatches, node in (("trial run", 1, 4, 4), ("whole job", 128, 32, 512)):
    step = job(dp, microbatches)
    usual, slowed = (replay(step, perturb=perturb).iteration_time_ns[-1] / 1e9 for perturb in (None, warm(node)))
    print(f"{name}, {step.world_size:,} ranks: {usual:.3f} s a step, {slowed:.3f} s with warm air at node {node}")
    found = diagnose(step, perturb=warm(node), sensitivities=False)
    print(f"  {found['headline']}")
    if found["waiting"]["culprit"] is not None:
        print(f"  what takes longer there: {found['waiting']['culprit']['longer']['class']}")
