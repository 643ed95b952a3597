"""Clocks of slices, from Python."""

from __future__ import annotations

import random

import pytest
from prism_core.clocks import align_clocks
from prism_core.errors import ConfigError


def test_injected_skew_is_recovered() -> None:
    generator = random.Random(7)
    skews = {
        "slice 0": (0.0, 0.0),
        "slice 1": (10e9, 200.0),
        "slice 2": (-10e9, -200.0),
        "reference again": (3e9, 20.0),
    }
    ties = []
    for event in range(60):
        moment = 1e9 + event * 5e6
        for name, (offset, drift) in skews.items():
            noise = generator.uniform(-500, 500)
            ties.append((name, ("all_reduce", event), round(moment + offset + moment * drift / 1e6 + noise)))
    clocks = align_clocks(ties)
    assert list(clocks) == list(skews)
    for name, (offset, drift) in skews.items():
        for moment in (1e9, 1.3e9):
            read = moment + offset + moment * drift / 1e6
            assert clocks[name].to_reference(read) == pytest.approx(moment, abs=1000)
        assert clocks[name].drift_ppm == pytest.approx(-drift, abs=2)
        assert clocks[name].ties == 60 and clocks[name].error_ns < 200
    assert align_clocks(ties, reference="slice 1")["slice 1"].drift_ppm == 0.0


def test_slices_without_a_common_event_are_named() -> None:
    ties = [("a", 1, 10), ("b", 1, 20), ("a", 2, 30), ("b", 2, 40), ("c", 3, 5), ("d", 3, 6)]
    with pytest.raises(ConfigError, match="no event ties a, b to c, d: record an event that both see"):
        align_clocks(ties)
    with pytest.raises(ConfigError, match="no event ties c, d to a, b"):
        align_clocks(ties, reference="d")
    with pytest.raises(ConfigError, match="the ties of b do not tell its clock"):
        align_clocks(ties[:2])
    with pytest.raises(ConfigError, match="'e' has no ties; there are a, b, c, d"):
        align_clocks(ties, reference="e")
    with pytest.raises(ConfigError, match="no ties"):
        align_clocks([])
    with pytest.raises(ConfigError, match=r"clock of b would gain .* ppm, more than 100"):
        align_clocks([("a", 1, 0), ("b", 1, 0), ("a", 2, 10**9), ("b", 2, 10**9 + 10**6)], max_drift_ppm=100)
    with pytest.raises(ConfigError, match="out of range"):
        align_clocks([("a", 1, 2**63 - 1)])
