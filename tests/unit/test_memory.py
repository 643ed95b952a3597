"""Device memory in three lines: what the program took, what NCCL takes, and the sum."""

from __future__ import annotations

import pytest
from prism_core.memory import device_memory

GIB, MIB = 1 << 30, 1 << 20
TABLE = {1: 512 * MIB, 2: 544 * MIB, 4: 688 * MIB}


def test_a_table_of_the_machine_gives_the_buffers() -> None:
    memory = device_memory(70 * GIB, [2, 4, 1], TABLE)
    assert memory.communicator_bytes == 1744 * MIB
    assert memory.lines() == [
        ("framework peak", "70.00 GiB, recorded"),
        ("communicator buffers", "1744 MiB (1.703 GiB), given"),
        ("total", "71.703 GiB + context"),
    ]


@pytest.mark.parametrize("table", [None, {2: 544 * MIB, 4: 688 * MIB}])
def test_what_is_not_known_is_never_left_out_of_the_total(table: dict[int, int] | None) -> None:
    memory = device_memory(70 * GIB, [2, 4, 1], table)
    assert memory.total_bytes is None
    lines = dict(memory.lines())
    assert lines["total"] == "unknown + 70.00 GiB"
    assert lines["communicator buffers"].startswith("unknown")
    if table is not None:
        assert "no communicator of 1 ranks" in lines["communicator buffers"]


def test_the_model_does_not_call_a_single_rank_free() -> None:
    lines = dict(device_memory(GIB, [2, 1], modelled_bytes=294 * MIB).lines())
    assert lines["communicator buffers"] == "294 MiB (0.287 GiB), modelled (without 1 of a single rank: unknown)"
    assert lines["total"] == "1.287 GiB + context"
