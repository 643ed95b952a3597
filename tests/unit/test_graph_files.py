"""Graph files from Python: opened without being read, damage named when it shows, neighbours of a sandbox listed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import prism_core
import pytest
from prism_core import cli
from prism_core.errors import ConfigError, GraphFormatError


def step(**degrees: int) -> prism_core.Graph:
    return prism_core.synthetic.transformer_step(**{"microbatches": 1, "layers": 1, **degrees})


def test_a_damaged_file_opens_and_every_use_names_the_section(tmp_path: Path) -> None:
    path = tmp_path / "job.prism"
    graph = step(dp=2, tp=2, pp=2)
    graph.save(str(path))
    content = bytearray(path.read_bytes())
    content[-5] ^= 0xFF
    damaged = tmp_path / "damaged.prism"
    damaged.write_bytes(content)
    opened = prism_core.Graph.open(str(damaged))
    assert (opened.world_size, opened.num_ops, opened.graph_bytes) == (8, graph.num_ops, len(content))
    for use in (prism_core.replay, prism_core.inspect, prism_core.diagnose, lambda job: job.to_text()):
        with pytest.raises(GraphFormatError, match=r"section \w+: it is damaged"):
            use(opened)
    with pytest.raises(GraphFormatError, match="another kind of file"):
        damaged.write_bytes(b"x" * 4096)
        prism_core.Graph.open(str(damaged))


def test_virtual_ranks_around_a_sandbox() -> None:
    """Eight ranks of a node: per rank two ring neighbours and a parent or child in a tree, and the next stage."""
    counts = set()
    for dp in (64, 512):
        graph = step(dp=dp, tp=8, pp=2)
        found = prism_core.inspect(graph, sandbox=range(8))
        assert found["sandbox"] == list(range(8))
        ranks = found["materialised_ranks"]
        assert ranks == sorted(set(ranks)) and not set(ranks) & set(range(8))
        assert set(range(8 * dp, 8 * dp + 8)) <= set(ranks), "the next stage"
        counts.add(len(ranks))
    assert len(counts) == 1, "the number does not depend on the size of the job"
    assert "materialised_ranks" not in prism_core.inspect(graph)
    with pytest.raises(ConfigError, match="outside the job"):
        prism_core.inspect(graph, sandbox=[graph.world_size])


def test_the_command_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.prism"
    step(dp=1, tp=2, pp=2).save(str(path))
    for flags in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["prism", "inspect", str(path), "--sandbox", "0", *flags])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert not caught.value.code
    text, document = capfd.readouterr().out.split("\n{", 1)
    assert "rank 0; 2 virtual ranks materialised: ranks 1-2" in text
    assert json.loads("{" + document)["materialised_ranks"] == [1, 2]
