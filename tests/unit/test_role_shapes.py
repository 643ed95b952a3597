"""Roles of jobs in which ranks differ in unexpected ways: nobody is given another's program, or it is said."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from prism_core.errors import RoleError
from prism_core.roles import Explanations, Positions, RoleFinder, Roles


@dataclass
class FakeRecording:
    """A program is anything that can be compared; times are told apart from the rest."""

    rank: int
    program: object
    times: object = None

    def digest(self, *, times: bool = True) -> str:
        return str((self.program, self.times if times else None))

    def difference(self, other: FakeRecording, *, times: bool = True) -> str | None:
        if self.digest(times=times) == other.digest(times=times):
            return None
        return f"op 3: {self.program} against {other.program}"


@dataclass(frozen=True)
class Mesh:
    """Megatron's order: tensor, then data, then pipeline; experts over consecutive data-parallel ranks."""

    tp: int
    dp: int
    pp: int
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    def groups(self) -> list[list[int]]:
        def along(size: int, stride: int, block: int | None = None) -> list[list[int]]:
            width = (block or size) * stride
            starts = [rank for rank in range(self.world) if rank % width < stride]
            return [list(range(start + first * stride, start + (first + size) * stride, stride))
                    for start in starts for first in range(0, block or size, size)]  # fmt: skip

        groups = [list(range(self.world)), *along(self.dp, self.tp), *along(self.tp, 1)]
        groups += along(self.pp, self.tp * self.dp)
        if self.ep > 1:
            groups += along(self.ep, self.tp, self.dp)
        return groups


#: Ordinals of a rank's groups in `Mesh.groups`.
DATA, TENSOR, PIPELINE, EXPERT = 1, 2, 3, 4


def roles_of(mesh: Mesh, record: Callable[[int], Any], p2p: Sequence[int], **options: Any) -> tuple[RoleFinder, Roles]:
    """Finds the roles of a job on `mesh` whose rank `r` is recorded as `record(r)`."""
    finder = RoleFinder(
        world_size=mesh.world, gpus_per_node=8, run=lambda ranks: [record(rank) for rank in ranks], **options
    )
    positions = Positions(mesh.groups(), mesh.world)
    base = mesh.world // 2
    first = sorted({0, base, mesh.world - 1})
    return finder, finder.infer(first, base, lambda seen: Explanations(positions, seen.rank, p2p, 8))


def find(
    mesh: Mesh, program_of: Callable[[int], object], p2p: Sequence[int], **options: Any
) -> tuple[RoleFinder, Roles]:
    return roles_of(mesh, lambda rank: FakeRecording(rank, program_of(rank)), p2p, **options)


def assert_right(mesh: Mesh, roles: Roles, program_of: Callable[[int], object]) -> None:
    assert [program_of(rank) for rank in roles.assignment] == [program_of(rank) for rank in range(mesh.world)]


def test_uneven_pipelines() -> None:
    """Stages of 5, 6, 6, 6, 6, 6, 6 and 5 layers, as 46 layers over 8 stages with light ends."""
    mesh = Mesh(tp=8, dp=64, pp=8)

    def program_of(rank: int) -> object:
        stage = mesh.place(rank)[2]
        return "first" if stage == 0 else "last" if stage == 7 else "middle", 5 if stage in (0, 7) else 6

    search, roles = find(mesh, program_of, [PIPELINE])
    assert_right(mesh, roles, program_of)
    assert roles.num_roles == 3 and len(search.recordings) <= 15


def test_tied_embeddings() -> None:
    """First and last stage share the embedding's gradient, in a group that the stages between do not have."""
    mesh = Mesh(tp=2, dp=8, pp=4)

    def program_of(rank: int) -> object:
        stage = mesh.place(rank)[2]
        return stage, "embedding all-reduce" if stage in (0, 3) else ""

    _, roles = find(mesh, program_of, [PIPELINE])
    assert_right(mesh, roles, program_of)
    assert roles.num_roles == 4


@pytest.mark.parametrize("routing", ["by position in the expert group", "the first expert is shared", "all alike"])
def test_mixtures_of_experts(routing: str) -> None:
    """Counts of tokens depend on which experts a rank has, or one of them is everybody's."""
    mesh = Mesh(tp=2, dp=16, pp=2, ep=8)

    def program_of(rank: int) -> object:
        _, data, stage = mesh.place(rank)
        expert = data % mesh.ep
        kind = {"by": expert, "the": expert == 0, "all": 0}[routing.split()[0]]
        return stage, kind

    search, roles = find(mesh, program_of, [PIPELINE], num_verified=8)
    assert_right(mesh, roles, program_of)
    assert len(search.recordings) <= mesh.world


def test_ranks_that_differ_in_sizes_alone() -> None:
    """4,100 rows over 1,024 ranks: five rows for the first 820, none for those from 820 on."""
    mesh = Mesh(tp=1, dp=1024, pp=1)

    def program_of(rank: int) -> object:
        return min(5, max(0, 4100 - 5 * rank))

    search, roles = find(mesh, program_of, [])
    assert_right(mesh, roles, program_of)
    assert len(search.recordings) <= 24


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("ep", [1, 2])
def test_the_first_tensor_parallel_rank_of_every_stage_has_the_data(special: bool, ep: int) -> None:
    """Megatron among 8,192: for every stage one rank of the first tensor-parallel position, and one of all others."""
    mesh = Mesh(tp=8, dp=64, pp=16, ep=ep)

    def program_of(rank: int) -> object:
        tensor, _, stage = mesh.place(rank)
        return stage, "broadcasts" if tensor == 0 else "is told", special and rank == 0

    search, roles = find(mesh, program_of, [PIPELINE])
    assert_right(mesh, roles, program_of)
    assert "first of its small process groups of 8 ranks (every 1)" in roles.distinction
    assert "is told" in roles.differences[0]
    assert len(search.recordings) <= 44


@pytest.mark.parametrize("odd", ["last of data", "first of both", "place in tensor"])
def test_what_differs_is_told_apart_and_nothing_else(odd: str) -> None:
    mesh = Mesh(tp=4, dp=32, pp=4)

    def program_of(rank: int) -> object:
        tensor, data, stage = mesh.place(rank)
        return stage, {"last": data == 31, "first": tensor == data == 0, "place": tensor}[odd.split()[0]]

    search, roles = find(mesh, program_of, [PIPELINE])
    assert_right(mesh, roles, program_of)
    assert len(search.recordings) <= 32


def test_groups_of_unlike_shapes_are_found_by_the_point_at_which_they_were_made() -> None:
    """Two pipelines, of neighbours and of ranks at other distances: the third stage of both does the same."""
    pipelines = [[0, 1, 2, 3], [4, 6, 5, 7]]
    stage_of = {rank: stage for ranks in pipelines for stage, rank in enumerate(ranks)}
    known = Explanations(Positions([list(range(8)), *pipelines], 8), 4, [1], 8)
    assert [known.coarsest.key_of(rank) for rank in range(8)] == [(stage_of[rank],) for rank in range(8)]


def test_a_rank_that_disagrees_with_its_role_is_named_with_the_op() -> None:
    mesh = Mesh(tp=1, dp=128, pp=1)
    with pytest.raises(RoleError) as caught:
        find(mesh, lambda rank: "odd" if rank == 77 else "usual", [], num_verified=127)
    text = str(caught.value)
    assert re.search(r"rank 77 is not like rank \d+ \(op 3: odd against usual\)", text)
    assert text.endswith("or let small differences pass with --role-tolerance")


def test_measured_times_make_no_roles() -> None:
    """No two ranks take the same time; they are equal all the same, and differ where their calls do."""
    mesh = Mesh(tp=1, dp=64, pp=4)

    def run(ranks: Sequence[int]) -> list[FakeRecording]:
        return [FakeRecording(rank, mesh.place(rank)[2], times=rank) for rank in ranks]

    def infer(**options: object) -> tuple[RoleFinder, Roles]:
        search = RoleFinder(world_size=mesh.world, gpus_per_node=8, run=run, **options)  # type: ignore[arg-type]
        positions = Positions(mesh.groups(), mesh.world)
        ways = lambda recording: Explanations(positions, recording.rank, [PIPELINE], 8)  # noqa: E731
        return search, search.infer([0, 128, 255], 128, ways)

    search, roles = infer(compares_times=False)
    assert roles.num_roles == 4 and len(search.recordings) <= 11
    assert all(mesh.place(roles.assignment[rank])[2] == mesh.place(rank)[2] for rank in range(mesh.world))
    with pytest.raises(RoleError, match="ranks that look equal are not"):
        infer(compares_times=True)


def megatron_groups() -> list[list[int]]:
    """Groups of megatron-core with TP 2, DP 4, PP 2 in its order, those of a whole model (TP x PP) among them."""
    data = [[8 * stage + place + 2 * replica for replica in range(4)] for stage in (0, 1) for place in (0, 1)]
    models = [[2 * replica, 2 * replica + 1, 2 * replica + 8, 2 * replica + 9] for replica in range(4)]
    tensor, pipeline = [[rank, rank + 1] for rank in range(0, 16, 2)], [[rank, rank + 8] for rank in range(8)]
    return [list(range(16)), *data, *models, *tensor, *pipeline, list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("seed", range(12))
def test_the_neighbour_of_the_first_rank_may_have_a_role_that_others_have(seed: int) -> None:
    """Tensor pairs whose first rank broadcasts, and rank 0 does more besides: rank 1 is no exception for its place."""

    def program_of(rank: int) -> object:
        return "log" if rank == 0 else (rank % 2, rank // 8)

    def run(ranks: Sequence[int]) -> list[FakeRecording]:
        return [FakeRecording(rank, program_of(rank)) for rank in ranks]

    search = RoleFinder(world_size=16, gpus_per_node=8, run=run, seed=seed)
    positions = Positions(megatron_groups(), 16)
    roles = search.infer([0, 8, 15], 8, lambda seen: Explanations(positions, seen.rank, [4], 8))
    assert [program_of(rank) for rank in roles.assignment] == [program_of(rank) for rank in range(16)]


@dataclass
class PiecesOfOptimizer(FakeRecording):
    """A rank of a stage with so many millionths more to copy than others."""

    extra: int = 0

    def digest(self, *, times: bool = True) -> str:
        return f"{self.program} {self.extra}"

    def distance_ppm(self, other: PiecesOfOptimizer, *, times: bool = True) -> int | None:
        return abs(self.extra - other.extra) if self.program == other.program else None


def find_near(mesh: Mesh, extra_of: Callable[[int], int], tolerance_ppm: int) -> tuple[RoleFinder, Roles]:
    def record(rank: int) -> PiecesOfOptimizer:
        return PiecesOfOptimizer(rank, mesh.place(rank)[2], extra=extra_of(rank))

    return roles_of(mesh, record, [PIPELINE], tolerance_ppm=tolerance_ppm)


def test_ranks_that_communicate_alike_pass_for_one_role_as_far_apart_as_is_said() -> None:
    """The distributed optimizer: every data-parallel rank has pieces of its own; a stage's first rank has the most."""
    mesh = Mesh(tp=2, dp=256, pp=4)
    search, roles = find_near(mesh, lambda rank: mesh.place(rank)[1] % 97, tolerance_ppm=1000)
    assert len(search.recordings) <= 12 and roles.num_roles == 4
    assert all(mesh.place(stand_in)[2] == mesh.place(rank)[2] for rank, stand_in in enumerate(roles.assignment))
    assert roles.farthest is not None
    rank, stand_in, ppm = roles.farthest
    assert ppm == abs(mesh.place(rank)[1] % 97 - mesh.place(stand_in)[1] % 97) > 0
    assert roles.distinction.endswith("are at most 0.1 % apart are taken for one)")


def test_ranks_further_apart_are_still_told_apart_or_named_with_the_distance() -> None:
    mesh = Mesh(tp=2, dp=256, pp=4)
    _, roles = find_near(mesh, lambda rank: 5000 * mesh.place(rank)[0], tolerance_ppm=1000)
    assert all(mesh.place(stand_in)[0] == mesh.place(rank)[0] for rank, stand_in in enumerate(roles.assignment))
    assert roles.num_roles == 8
    with pytest.raises(RoleError, match=r"rank \d+ is not like rank \d+ \([\d.]+ % apart; "):
        find_near(mesh, lambda rank: 5000 * (mesh.place(rank)[1] * 31 % 97), tolerance_ppm=1000)


def test_without_a_tolerance_equal_means_equal() -> None:
    mesh = Mesh(tp=2, dp=256, pp=4)
    with pytest.raises(RoleError, match="ranks that look equal are not"):
        find_near(mesh, lambda rank: mesh.place(rank)[1] * 31 % 97, tolerance_ppm=0)
