"""Which ranks are run, and whom they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prism_core.errors import RoleError
from prism_core.roles import MAX_REPRESENTATIVES, Explanations, Positions, RoleFinder


@dataclass
class FakeRecording:
    rank: int
    program: object

    def digest(self) -> str:
        return str(self.program)

    def difference(self, other: FakeRecording) -> str | None:
        return None if self.program == other.program else f"{self.program} against {other.program}"


def pipeline_groups(world_size: int, stages: int) -> list[list[int]]:
    """Default group, one group per replica, one per stage: in the order a program makes them."""
    replicas = [list(range(first, first + stages)) for first in range(0, world_size, stages)]
    return [list(range(world_size)), *replicas, *(list(range(stage, world_size, stages)) for stage in range(stages))]


def finder(world_size: int, program_of: Callable[[int], object], **options: object) -> RoleFinder:
    def run(ranks: Sequence[int]) -> list[FakeRecording]:
        return [FakeRecording(rank, program_of(rank)) for rank in ranks]

    return RoleFinder(world_size=world_size, gpus_per_node=8, run=run, **options)  # type: ignore[arg-type]


def infer(search: RoleFinder, groups: list[list[int]], p2p: list[int], base: int | None = None) -> object:
    world_size = search.world_size
    base = world_size // 2 if base is None else base
    positions = Positions(groups, world_size)
    first = sorted({0, base, world_size - 1})
    return search.infer(first, base, lambda recording: Explanations(positions, recording.rank, p2p, 8))


def test_a_data_parallel_job_needs_three_ranks_and_two_checks() -> None:
    search = finder(8192, lambda rank: "ddp")
    roles = infer(search, [], [])
    assert len(search.recordings) == 5
    assert len(roles.verified) == 2
    assert roles.assignment[4097] == 4096
    assert roles.num_roles == 1


def test_ranks_that_were_run_stand_for_themselves() -> None:
    search = finder(64, lambda rank: "first" if rank == 0 else "ddp")
    roles = infer(search, [], [])
    assert all(roles.assignment[rank] == rank for rank in search.recordings)
    assert set(search.recordings) >= {0, 1, 32}, "rank 1 is run to see whether rank 0 is alone"
    assert roles.assignment[2] == 32, "rank 0 is special and stands for nobody else"


@pytest.mark.parametrize(("world_size", "boundary"), [(8192, 512), (8192, 8000), (1024, 17), (64, 2)])
def test_ranks_that_hold_no_shard_differ_from_those_that_do(world_size: int, boundary: int) -> None:
    """512 rows over 8,192 ranks: a row for each of the first, nothing for the others."""

    def program_of(rank: int) -> str:
        return "row" if rank < boundary else "no row"

    search = finder(world_size, program_of)
    roles = infer(search, [], [])
    assert [program_of(rank) for rank in roles.assignment] == [program_of(rank) for rank in range(world_size)]
    assert len(search.recordings) <= 24


def test_a_rank_at_the_boundary_may_be_unlike_both_sides() -> None:
    def program_of(rank: int) -> str:
        return "rows" if rank < 511 else "half a row" if rank == 511 else "no row"

    roles = infer(finder(8192, program_of), [], [])
    assert [program_of(rank) for rank in roles.assignment] == [program_of(rank) for rank in range(8192)]


def test_a_pipeline_runs_one_rank_of_each_stage() -> None:
    search = finder(64, lambda rank: f"stage {rank % 4}")
    roles = infer(search, pipeline_groups(64, 4), p2p=[1])
    assert {rank % 4 for rank in search.recordings} == {0, 1, 2, 3} and len(search.recordings) <= 11
    for rank in range(64):
        assert roles.assignment[rank] % 4 == rank % 4
    assert roles.num_roles == 4


def test_a_failed_check_makes_the_distinction_finer() -> None:
    """The programs depend on a group without messages: the first check fails, the second distinction explains it."""
    search = finder(64, lambda rank: f"position {rank % 4}", num_verified=8)
    roles = infer(search, pipeline_groups(64, 4), p2p=[])
    assert "small process groups" in roles.distinction
    assert all(roles.assignment[rank] % 4 == rank % 4 for rank in range(64))


def test_a_dependence_on_the_local_rank_is_found() -> None:
    search = finder(64, lambda rank: f"local {rank % 8}", num_verified=8)
    roles = infer(search, [], [])
    assert "node" in roles.distinction
    assert all(roles.assignment[rank] % 8 == rank % 8 for rank in range(64))


def test_an_unexplained_difference_is_an_error_that_names_it() -> None:
    search = finder(128, lambda rank: "odd one" if rank == 13 else "ddp", num_verified=125)
    with pytest.raises(RoleError, match=r"rank 13 is not like rank .*odd one against ddp.*--ranks all"):
        infer(search, [], [])


def test_of_chosen_ranks_the_odd_one_stands_for_itself_only() -> None:
    """Somebody who looks for a mistake of rank 65 names it beside two others: they stand for the rest."""
    search = finder(128, lambda rank: "mistake" if rank == 65 else "right", num_verified=0)
    search.may_add = False
    roles = search.infer([0, 65, 127], 65, lambda _: Explanations(Positions([], 128), 65, [], 8))
    assert [rank for rank in range(128) if roles.assignment[rank] == 65] == [65]


def test_a_small_job_falls_back_to_running_every_rank() -> None:
    search = finder(64, lambda rank: "odd one" if rank == 13 else "ddp", num_verified=61)
    roles = infer(search, [], [])
    assert roles.assignment == list(range(64))


def test_too_many_roles_are_an_error() -> None:
    search = finder(4096, lambda rank: rank, num_verified=1)
    with pytest.raises(RoleError, match="--ranks all"):
        infer(search, [], [0])
    assert len(search.recordings) <= 3 + 3 + MAX_REPRESENTATIVES


def test_a_given_list_is_not_extended_by_roles() -> None:
    search = finder(64, lambda rank: f"stage {rank % 4}", may_add=False)
    positions = Positions(pipeline_groups(64, 4), 64)
    with pytest.raises(RoleError, match="add rank"):
        search.infer([32, 33], 32, lambda recording: Explanations(positions, recording.rank, [1], 8))


def test_all_ranks_run_leave_nothing_to_infer() -> None:
    search = finder(16, lambda rank: rank)
    roles = search.run_all()
    assert roles.assignment == list(range(16))
    assert roles.verified == []


def test_the_draw_depends_on_the_seed_alone() -> None:
    drawn = []
    for seed in (1, 1, 2):
        search = finder(8192, lambda rank: "ddp", seed=seed)
        drawn.append(infer(search, [], []).verified)
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tiny_jobs(world_size: int) -> None:
    search = finder(world_size, lambda rank: "ddp")
    roles = infer(search, [], [])
    assert roles.assignment == list(range(world_size))


@settings(deadline=None, max_examples=40)
@given(stages=st.sampled_from([1, 2, 4, 8, 16]), replicas=st.integers(1, 20), seed=st.integers(0, 5))
def test_nobody_is_given_a_program_of_another_stage(stages: int, replicas: int, seed: int) -> None:
    world_size = stages * replicas
    search = finder(world_size, lambda rank: f"stage {rank % stages}", seed=seed)
    roles = infer(search, pipeline_groups(world_size, stages), p2p=[1] if stages > 1 else [])
    assert all(roles.assignment[rank] % stages == rank % stages for rank in range(world_size))
