"""`prism inspect`: who does what, on what it rests, and a map of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import prism_core
import pytest
from prism_core import cli
from prism_core.contents import contents_text, facts_of_ranks, runs_text
from prism_core.rolemap import WIDTH, draw, find_axes, letters, role_map

#: Four replicas of two stages, tensor parallel by two: rank = tp + 2 * dp + 8 * stage. The last replica differs.
JOB = """prism-graph 1
world 16
meta "ranks" {facts}
name "gemm"
comm 0-1
comm 2-3
comm 4-5
comm 6-7
comm 8-9
comm 10-11
comm 12-13
comm 14-15
comm 0-6/2
comm 1-7/2
comm 8-14/2
comm 9-15/2
{pairs}
template "first stage"
  +5000 s0 alloc 4096
  +5000 s0 compute 1000000 Gemm Modelled "gemm"
  +5000 s1 AllGather c0 Bfloat16 64 Sum
  +5000 s2 Send c2 Bfloat16 64 peer 1
  +5000 s1 AllReduce c1 Bfloat16 1024 Sum
  +5000 s0 iteration_end
template "last stage"
  +5000 s0 alloc 8192
  +5000 s1 AllGather c0 Bfloat16 64 Sum
  +5000 s2 Recv c2 Bfloat16 64 peer 0
  +5000 s0 compute 2000000 Gemm Measured "gemm"
  +5000 s1 AllReduce c1 Bfloat16 1024 Sum
  +5000 s0 iteration_end
template "with another shard"
  +5000 s0 alloc 16384
  +5000 s1 AllGather c0 Bfloat16 64 Sum
  +5000 s2 Recv c2 Bfloat16 64 peer 0
  +5000 s0 compute 3000000 Gemm Measured "gemm"
  +5000 s1 AllReduce c1 Bfloat16 1024 Sum
  +5000 s0 iteration_end
{ranks}
"""


def job() -> prism_core.Graph:
    facts = facts_of_ranks(
        [
            {"rank": 2, "peak_allocated_bytes": 3 << 20, "peak_reserved_bytes": 4 << 20, "tiers": []},
            {
                "rank": 15,
                "peak_allocated_bytes": 5 << 20,
                "peak_reserved_bytes": 6 << 20,
                "tiers": [{"communicator": 0, "size": 2, "call": "ncclAllGather", "tier": "T0", "count": 3}],
            },
        ]
    )
    ranks = []
    for rank in range(16):
        template = 0 if rank < 8 else 2 if rank >= 14 else 1
        data = 8 + rank % 2 + 2 * (rank // 8)
        ranks.append(f"rank {rank} template {template} comms {rank // 2} {data} {12 + rank % 8}")
    pairs = "\n".join(f"comm {rank} {rank + 8}" for rank in range(8))
    text = JOB.format(facts=json.dumps(facts), pairs=pairs, ranks="\n".join(ranks))
    return prism_core.Graph.from_text(text)


def test_roles_are_told_with_their_ranks_sizes_and_peaks() -> None:
    document = prism_core.inspect(job())
    first, last, more = document["roles"]
    assert (first["letter"], first["ranks"], first["rank_runs"]) == ("A", 8, [[0, 7, 1]])
    assert (more["letter"], more["rank_runs"], more["iterations"]) == ("C", [[14, 15, 1]], 1)
    assert (first["peak_device_bytes"], last["peak_device_bytes"]) == (4096, 8192)
    assert (first["peak_allocated_bytes"], last["peak_allocated_bytes"], more["peak_reserved_bytes"]) == (
        3 << 20, None, 6 << 20,
    )  # fmt: skip
    assert (first["compute_ns"], last["compute_ns"]) == (1000, 2000)
    assert first["payload_bytes"] == 2 * (64 + 64 + 1024)
    assert document["tiers"] == [{"tier": "T0", "call": "ncclAllGather", "count": 3}]


def test_communicators_are_told_by_what_is_called_on_them() -> None:
    families = {(entry["size"], entry["stride"]): entry for entry in prism_core.inspect(job())["communicators"]}
    assert {key: entry["count"] for key, entry in families.items()} == {(2, 1): 8, (4, 2): 4, (2, 8): 8}
    assert families[2, 1]["calls"] == {"all_gather": 16}
    assert families[4, 2]["calls"] == {"all_reduce": 16}
    assert families[2, 8]["calls"] == {"send": 8, "recv": 8}


def test_the_map_has_stages_down_and_replicas_across() -> None:
    found = prism_core.inspect(job())["role_map"]
    assert [(axis["kind"], axis["size"], axis["stride"]) for axis in found["axes"]] == [
        ("shard", 2, 1), ("data", 4, 2), ("pipeline", 2, 8),
    ]  # fmt: skip
    assert found["collapsed"] == [0]
    assert [(row["places"], row["cells"]) for row in found["rows"]] == [([0], [[0, 4]]), ([1], [[1, 3], [2, 1]])]
    assert draw(found) == [
        "down: pipeline 2 (every 8); across: data 4 (every 2)",
        "alike along shard 2 (every 1)",
        "pipeline 0  AAAA",
        "pipeline 1  BBBC",
    ]


def test_the_text_has_all_of_it() -> None:
    text = contents_text(prism_core.inspect(job()))
    for part in (
        "role A            ranks 0-7 (8): 6 ops on 3 streams",
        "peaks 0.00 MiB driver, 4.00 MiB reserved, 3.00 MiB allocated",
        "8 of 2 ranks every 8: recv 8, send 8",
        "all_reduce        16, 0.03 MiB",
        "compute measured  ",
        "values            ncclAllGather T0: 3",
        "roles by place\ndown: pipeline 2",
        "pipeline 1  BBBC",
    ):
        assert part in text, f"{part!r} in\n{text}"
    assert "meta ranks" not in text


def test_equal_rows_and_equal_neighbours_are_drawn_once() -> None:
    """8,192 ranks with equal middle stages fit on a page."""
    graph = prism_core.synthetic.transformer_step(dp=64, tp=8, pp=16, microbatches=2, layers=1)
    document = prism_core.inspect(graph)
    lines = draw(document["role_map"])
    assert [axis["size"] for axis in document["role_map"]["axes"]] == [8, 64, 16]
    assert lines[:2] == [
        "down: pipeline 16 (every 512); across: -", "alike along tensor 8 (every 1), data 64 (every 8)",
    ]  # fmt: skip
    assert len(lines) <= 18 and max(map(len, lines)) <= WIDTH
    assert document["roles"][0]["rank_runs"] == [[0, 511, 1]]


def test_a_job_of_one_axis_is_a_line() -> None:
    roles = [0] + [1] * 509 + [2, 2]
    family = {"size": 512, "stride": 1, "calls": {"all_reduce": 512}}
    found = role_map(512, roles, [family])
    assert draw(found) == ["down: -; across: data 512 (every 1)", "all  A B*509 C*2"]
    assert draw(role_map(1, [0], [])) == ["A"]


def test_axes_that_no_communicator_tells_are_filled_in() -> None:
    def family(size: int, stride: int, **calls: int) -> dict[str, Any]:
        return {"size": size, "stride": stride, "calls": calls}

    def sizes(world: int, *families: dict[str, Any]) -> list[tuple[str, int, int]]:
        return [(axis.kind, axis.size, axis.stride) for axis in find_axes(world, families)]

    assert sizes(24, family(4, 6, all_reduce=1)) == [("rest", 6, 1), ("data", 4, 6)]
    # Neighbours exchange messages in pairs: a pipeline of as many as the next group is apart.
    assert sizes(64, family(2, 1, send=1, recv=1), family(16, 4, all_reduce=1)) == [("pipeline", 4, 1), ("data", 16, 4)]
    assert sizes(32, family(8, 1, all_to_all=1, all_gather=1), family(32, 1, all_reduce=1)) == [
        ("exchange", 8, 1), ("rest", 4, 8),
    ]  # fmt: skip
    assert sizes(7) == [("rest", 7, 1)]
    # Strides that do not divide each other tell no mesh.
    assert sizes(12, family(2, 5, all_reduce=1)) == [("rest", 12, 1)]


def test_several_axes_down_the_page() -> None:
    """Every place along pipeline and tensor axis has a row, unless it is like the one before."""
    families = [
        {"size": 2, "stride": 1, "calls": {"all_gather": 1}},
        {"size": 40, "stride": 2, "calls": {"all_reduce": 1}},
        {"size": 2, "stride": 80, "calls": {"send": 1, "recv": 1}},
    ]
    roles = [2 if rank >= 80 else int(rank != 0) for rank in range(160)]
    assert draw(role_map(160, roles, families)) == [
        "down: pipeline 2 (every 80), shard 2 (every 1); across: data 40 (every 2)",
        "0/0         A" + 39 * "B",
        "0/1         " + 40 * "B",
        "1/0 .. 1/1  " + 40 * "C",
    ]
    assert draw(role_map(160, roles, families), 30)[1:] == [
        "0/0         A B*39", "0/1         B*40", "1/0 .. 1/1  C*40",
    ]  # fmt: skip


@pytest.mark.parametrize(("number", "name"), [(0, "A"), (25, "Z"), (26, "AA"), (701, "ZZ"), (702, "AAA")])
def test_names_of_roles(number: int, name: str) -> None:
    assert letters(number) == name


def test_runs_of_ranks() -> None:
    assert runs_text([[0, 56, 8], [3, 3, 1], [9, 11, 1]], 12) == "ranks 0-56/8,3,9-11"
    assert runs_text([[5, 5, 1]], 1) == "rank 5"
    assert runs_text([[rank, rank, 1] for rank in range(0, 70, 7)], 10).endswith("35,...")


def test_two_graphs_are_compared_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def prism(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["prism", "inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), capfd.readouterr().out

    left, right = tmp_path / "left.prism", tmp_path / "right.prism"
    job().save(str(left))
    prism_core.Graph.from_text(job().to_text().replace("3000000 Gemm", "3000001 Gemm")).save(str(right))
    assert prism(left, "--against", left) == (0, "equal: 16 ranks, 96 ops\n")
    code, text = prism(left, "--against", right)
    assert code == 1
    assert text.splitlines()[:3] == [
        "not equal: 2 of 16 ranks differ; 96 and 96 ops",
        "  duration: 2 ops",
        "rank 14 and 1 more, op 3, duration:",
    ]
    code, text = prism(left, "--against", right, "--json")
    document = json.loads(text)
    assert code == 1 and not document["equal"] and document["differing"] == {"duration": 2}
    assert document["meta"] == [] and document["first"][0]["ranks"] == 2
    code, text = prism(left, "--against", right, "--ignore", "durations")
    assert (code, text) == (0, "equal (durations ignored): 16 ranks, 96 ops\n")
    code, text = prism(left, "--against", right, "--ignore", "time", "--json")
    assert code == 1 and "cannot leave 'time' out" in json.loads(text)["error"]["message"]
    small = tmp_path / "small.prism"
    prism_core.synthetic.transformer_step(dp=1, tp=2, pp=1, microbatches=1, layers=1).save(str(small))
    code, text = prism(left, "--against", small)
    assert (code, text) == (1, "jobs of 16 and 2 ranks are not compared\n")
