"""Perturbations from Python: typed, as text, as files; the engine has the last word."""

from pathlib import Path
from typing import Any

import prism_core
import pytest
from prism_core.errors import ConfigError, DeadlockError
from prism_core.perturb import (
    Imbalance,
    Jitter,
    Perturb,
    RankDeath,
    SlowLink,
    Straggler,
    ThermalThrottle,
    perturbation_text,
    to_toml,
)

GPU: dict[str, Any] = {
    "ambient_c": 30.0, "throttle_c": 70.0, "hysteresis_c": 5.0, "resistance_c_per_w": 0.1, "capacitance_j_per_c": 10.0,
    "idle_w": 0.0, "power_w": 500.0, "clocks": [1.0, 0.8], "period_ns": 100_000_000,
}  # fmt: skip

ONE_OF_EACH = [
    Straggler(ranks=[1], factor=1.3, iterations=(0, 2), classes=["gemm"], names=["*gemm*", 'quo"te\\']),
    ThermalThrottle(ranks="all", class_power_w={"memcpy": 200.0}, **GPU),
    SlowLink(nodes=[0], nics=[1], bandwidth_factor=0.5, added_latency_ns=500, time_ns=(0, 10)),
    Jitter(stride=(1, 2), distribution="normal", mean=1.0, std=0.02, mode="multiply", seed=7),
    RankDeath(rank=1, iteration=1000),
    Imbalance(ranks=[0, 1], zipf=1.2, seed=3, names=["expert*"]),
]


GRAPH = """prism-graph 1
world 2
name "gemm"
comm 0-1
template "ddp"
  +0 s0 compute 100000000 Gemm Measured "gemm"
  +0 s0 AllReduce c0 Float32 1024 Sum
  +0 s0 iteration_end
  +0 s0 compute 100000000 Gemm Measured "gemm"
  +0 s0 AllReduce c0 Float32 1024 Sum
  +0 s0 iteration_end
rank 0-1 template 0 comms 0
"""


@pytest.fixture(scope="module")
def graph() -> prism_core.Graph:
    """Two ranks, two iterations of 100 us and an all-reduce."""
    return prism_core.Graph.from_text(GRAPH)


def test_one_of_each_is_accepted(graph: prism_core.Graph, tmp_path: Path) -> None:
    text = to_toml(ONE_OF_EACH)
    (tmp_path / "p.toml").write_text(text)
    forms: list[Perturb] = [ONE_OF_EACH, text, tmp_path / "p.toml", str(tmp_path / "p.toml")]
    forms.append([perturbation.to_dict() for perturbation in ONE_OF_EACH])
    results = [prism_core.replay(graph, perturb=form).iteration_time_ns for form in forms]
    assert all(result == results[0] for result in results)
    assert results[0] != prism_core.replay(graph).iteration_time_ns


def test_a_straggler_is_a_slow_rank(graph: prism_core.Graph) -> None:
    perturbed = prism_core.replay(graph, perturb=[Straggler(ranks=[1], factor=1.3)]).to_dict()
    slow = prism_core.replay(graph, slow={1: 1.3}).to_dict()
    for key in ("wall_ns", "peak_rss_bytes"):
        del perturbed[key], slow[key]
    assert perturbed == slow
    healthy = prism_core.replay(graph).iteration_time_ns
    assert slow["iteration_time_ns"] == [time + 30_000 for time in healthy]
    window = prism_core.replay(graph, perturb=[Straggler(ranks=[1], factor=1.3, iterations=(1, 2))])
    assert window.iteration_time_ns == [healthy[0], slow["iteration_time_ns"][1]]
    assert prism_core.replay(graph, perturb="[slow]\n1 = 1.3").iteration_time_ns == slow["iteration_time_ns"]


def test_a_dead_rank_is_the_reason(graph: prism_core.Graph) -> None:
    with pytest.raises(DeadlockError, match="waits for rank 1; dead: 1"):
        prism_core.replay(graph, perturb=[RankDeath(rank=1, iteration=1)])


@pytest.mark.parametrize(
    ("perturb", "message"),
    [
        ([Straggler(ranks=[4242], factor=1.3)], "rank 4242 does not exist: the world has 2 ranks"),
        ([{"kind": "flood"}], "unknown kind"),
        ([{"kind": "straggler", "ranks": [0], "factor": 2.0, "facto": 1}], "unknown key `facto`"),
        ([Straggler(factor=2.0)], "names no rank"),
        ("= nothing", "perturbations: TOML parse error"),
        ([{"kind": object()}], "cannot be part of a perturbation"),
        (Path("missing.toml"), "cannot read missing.toml"),
    ],
)
def test_what_is_wrong_is_named(graph: prism_core.Graph, perturb: Perturb, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prism_core.replay(graph, perturb=perturb)


def test_texts_and_paths(tmp_path: Path) -> None:
    assert perturbation_text(None) is None
    assert perturbation_text("[slow]\n") == "[slow]\n"
    assert to_toml([]) == ""
    assert 'names = ["*gemm*", "quo\\"te\\\\"]' in to_toml(ONE_OF_EACH)
    assert "stride = { first = 1, step = 2 }" in to_toml(ONE_OF_EACH)
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(ConfigError, match="is not TOML"):
        perturbation_text(tmp_path / "latin.toml")
