"""The hook's part in values that ranks tell each other: PyTorch's own functions, a store of ours, no other rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from prism_core.published import PublishedValues
from prism_core.store import RendezvousServer
from test_hook import library, run_program, torch_works  # noqa: F401 - fixtures
from test_store import FakeAuthority

# ruff: noqa: F811 - fixtures of another file are arguments

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_works")]

#: What both ranks do; values differ between them.
PROGRAM = """
    import os
    import torch, torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    rank = int(os.environ["PRISM_RANK"])
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    group = dist.new_group([0, 4])
    flags = torch.tensor([rank + 1, 0, 7])
    dist.broadcast(flags, 0)
    scores = torch.full((3,), float(rank))
    dist.broadcast(scores, 0)
    objects = [{"rank": rank}, "x" * rank]
    dist.broadcast_object_list(objects, src=0, group=group, device=torch.device("cpu"))
    piece = torch.zeros(2, dtype=torch.int64)
    dist.scatter(piece, [torch.tensor([i, i * i]) for i in range(8)] if rank == 0 else None, src=0)
    if rank == 0:
        dist.send_object_list([["shape", (2, 3)]], dst=4, device=torch.device("cpu"))
        dist.send(torch.tensor([11]), 4)
        received, number = None, None
    else:
        received = [None]
        dist.recv_object_list(received, src=0, device=torch.device("cpu"))
        number = torch.zeros(1, dtype=torch.int64)
        dist.recv(number, 0)
    total = torch.tensor([rank + 1.0])
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    everyone = [None] * 8
    dist.all_gather_object(everyone, ("mine", rank))
    dist.barrier()
    print(flags.tolist(), scores.tolist(), objects, piece.tolist(), received, number, total.item(), everyone[7])
"""


def run(rank: int, store: RendezvousServer, tmp_path: Path, library: Path, program: str = PROGRAM) -> tuple[str, str]:
    variables = {"PRISM_RANK": str(rank), "PRISM_STORE": f"{store.host}:{store.port}"}
    child, _ = run_program(program, tmp_path, library, **variables)
    return child.stdout.strip(), child.stderr


@pytest.fixture
def told() -> PublishedValues:
    values = PublishedValues()
    values.expect([0, 4])
    return values


def test_a_rank_gets_what_another_told(tmp_path: Path, library: Path, told: PublishedValues) -> None:
    with RendezvousServer(FakeAuthority(), world_size=8, num_live=1, told=told) as store:
        source, _ = run(0, store, tmp_path, library)
        told.ended(0)
        out, err = run(4, store, tmp_path, library)
    assert source == "[1, 0, 7] [0.0, 0.0, 0.0] [{'rank': 0}, ''] [0, 0] None None 8.0 ('mine', 0)", err
    # Floating-point values are left alone: they are the work of kernels.
    expected = "[1, 0, 7] [4.0, 4.0, 4.0] [{'rank': 0}, ''] [4, 16] [['shape', (2, 3)]] tensor([11]) 40.0 ('mine', 4)"
    assert out == expected, err


def test_a_value_that_is_not_known_stops_the_program(
    tmp_path: Path,
    library: Path,
    told: PublishedValues,
) -> None:
    told.ended(0)
    with RendezvousServer(FakeAuthority(), world_size=8, num_live=1, told=told) as store:
        out, err = run(4, store, tmp_path, library)
    assert out == ""
    assert "prism: the value of the broadcast from rank 0 is not known: rank 0 did not run" in err
    assert told.missing
