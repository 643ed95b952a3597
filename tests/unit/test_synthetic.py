"""The made-up workloads against the formula that defines them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from prism_core import ConfigError, replay
from prism_core.synthetic import transformer_step

ORACLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "synthetic" / "ref_model.py"


def oracle(*arguments: int) -> float:
    """Seconds of a step by the contention-free formula."""
    if not ORACLE.exists():
        pytest.skip(f"{ORACLE.name} is not here")
    command = [sys.executable, str(ORACLE), "step", *map(str, arguments)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "microbatches", "layers"),
    [(1, 8, 8, 16, 2), (8, 8, 8, 16, 2), (16, 8, 8, 16, 2), (4, 2, 3, 5, 1), (2, 1, 4, 2, 3), (128, 8, 8, 16, 2)],
)
def test_a_step_takes_what_the_formula_says(dp: int, tp: int, pp: int, microbatches: int, layers: int) -> None:
    expected = oracle(dp, tp, pp, microbatches, layers)
    result = replay(transformer_step(dp, tp, pp, microbatches, layers))
    assert result.world_size == dp * tp * pp
    assert sum(result.iteration_time_ns) * 1e-9 == pytest.approx(expected, rel=1e-6)


def test_the_reference_workload_without_the_oracle() -> None:
    # 64 ranks; the number is the formula's.
    [duration] = replay(transformer_step(1, 8, 8, 16, 2)).iteration_time_ns
    assert duration * 1e-9 == pytest.approx(0.532014088, rel=1e-6)


def test_8192_ranks_are_built_and_replayed_within_a_second_each() -> None:
    start = time.process_time()
    graph = transformer_step(128, 8, 8, 16, 2)
    built = time.process_time()
    assert graph.world_size == 8192
    assert graph.num_ops == 3_497_984
    assert built - start < 1.0
    replay(graph, slow={4242: 1.3})
    assert time.process_time() - built < 1.0


def test_symmetry_changes_what_is_evaluated_and_nothing_else() -> None:
    graph = transformer_step(16, 8, 4, 8, 2, ep=4, interleave=2)
    shared = replay(graph, slow={77: 1.3}).to_dict()
    each = replay(graph, slow={77: 1.3}, symmetry=False).to_dict()
    assert shared["ops_evaluated"] < each["ops_evaluated"] == shared["ops"]
    assert shared["rank_classes"] <= each["rank_classes"] == 512
    varying = {"ops_evaluated", "rank_classes", "wall_ns", "peak_rss_bytes"}
    assert {k: v for k, v in shared.items() if k not in varying} == {k: v for k, v in each.items() if k not in varying}
    assert replay(graph).rank_classes < 512 // 4


def test_interleaving_shortens_the_step() -> None:
    plain, interleaved = (
        replay(transformer_step(2, 2, 4, 8, 4, interleave=n, activation_bytes=1)).iteration_time_ns[0] for n in (1, 4)
    )
    assert interleaved < plain


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"ep": 3}, "ep 3 does not divide dp 8"),
        ({"interleave": 3}, "interleave 3 does not divide layers 2"),
        ({"interleave": 2, "microbatches": 9}, "pp 4 does not divide microbatches 9"),
        ({"tp": 0}, "tp is 0"),
        ({"tp": -1}, "tp is -1"),
        ({"layers": 1.5}, "layers is 1.5"),
        ({"dp": 1 << 40}, "transformer_step"),
        ({"microbatches": 1 << 31}, "ops"),
        ({"bytes_per_s": 0}, "bytes_per_s is 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, int], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        transformer_step(**{"dp": 8, "tp": 2, "pp": 4, "microbatches": 8, "layers": 2, **changed})
