"""Which ranks do the same: run one of each role, let it stand for the others, check on ranks drawn at random.

A rank's *role key* is its position in some of its process groups. The groups that carry point-to-point messages always
count (a pipeline stage does what its position says); others only when the check shows that they must.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prism_core.errors import RoleError

#: A position in a larger group distinguishes too many ranks to run one of each.
SMALL_GROUP = 64
#: How many ranks may be run as representatives.
MAX_REPRESENTATIVES = 64

RoleKey = tuple[int, ...]
#: Position of a rank that has no such group.
NO_POSITION = -1


class Positions:
    """Every rank's group ranks, in the order in which its groups were created.

    Args:
        groups: Member lists in order of creation; no groups stand for one of all ranks.
        world_size: Ranks of the job.
    """

    def __init__(self, groups: Sequence[Sequence[int]], world_size: int) -> None:
        self.world_size = world_size
        self._group_ranks: list[list[int]] = [[] for _ in range(world_size)]
        self._members: list[list[Sequence[int]]] = [[] for _ in range(world_size)]
        for members in groups or [range(world_size)]:
            for group_rank, rank in enumerate(members):
                self._group_ranks[rank].append(group_rank)
                self._members[rank].append(members)

    def key(self, rank: int, ordinals: Iterable[int]) -> RoleKey:
        """Positions in the groups with these ordinals (counted among the groups that contain the rank)."""
        own = self._group_ranks[rank]
        return tuple(own[ordinal] if ordinal < len(own) else NO_POSITION for ordinal in ordinals)

    def is_first(self, rank: int, ordinals: Iterable[int]) -> RoleKey:
        """Whether it is the first of the groups with these ordinals: the one that reads data and tells others."""
        return tuple(int(position == 0) for position in self.key(rank, ordinals))

    def small_ordinals(self, rank: int) -> list[int]:
        """Ordinals of the rank's groups of at most `SMALL_GROUP` members, but not of the whole job."""
        sizes = [len(members) for members in self._members[rank]]
        return [ordinal for ordinal, size in enumerate(sizes) if 1 < size <= SMALL_GROUP and size < self.world_size]

    def peers(self, rank: int, ordinals: Iterable[int]) -> frozenset[int]:
        """The members of the rank's groups with these ordinals."""
        return frozenset(peer for ordinal in ordinals for peer in self._members[rank][ordinal])


@dataclass(frozen=True, slots=True)
class Distinction:
    """One way to tell roles apart.

    Attributes:
        name: What tells them apart, in words.
        key_of: The role key of a rank.
        preferred: Ranks to run first, all else being equal.
    """

    name: str
    key_of: Callable[[int], RoleKey]
    preferred: frozenset[int] = frozenset()


def distinctions(positions: Positions, base: int, p2p_ordinals: Sequence[int], gpus_per_node: int) -> list[Distinction]:
    """Ways to tell roles apart, from coarse to fine."""
    small = positions.small_ordinals(base)
    messages = sorted(set(p2p_ordinals) & set(small))
    if set(p2p_ordinals) - set(small):
        messages = small  # messages in a large group: the small ones are all that may explain who sends to whom
    ways = [
        Distinction(
            "position among those it exchanges messages with",
            lambda rank: positions.key(rank, messages),
            positions.peers(base, messages),
        ),
        Distinction(
            "position among those it exchanges messages with, and whether it is the first of its small process groups",
            lambda rank: (*positions.key(rank, messages), *positions.is_first(rank, small)),
        ),
        Distinction(
            "position in its small process groups",
            lambda rank: positions.key(rank, small),
            positions.peers(base, small),
        ),
        Distinction(
            "position in its small process groups and on its node",
            lambda rank: (*positions.key(rank, small), rank % gpus_per_node),
        ),
    ]
    if positions.world_size <= MAX_REPRESENTATIVES:
        ways.append(Distinction("none: every rank was run", lambda rank: (rank,)))
    return ways


@dataclass(slots=True)
class Roles:
    """Who stands for whom.

    Attributes:
        assignment: For every rank, the rank whose recording stands for it.
        verified: Ranks that were run only to check the inference.
        distinction: How roles are told apart.
        num_roles: Different programs among the representatives.
    """

    assignment: list[int]
    verified: list[int]
    distinction: str
    num_roles: int


@dataclass(slots=True)
class RoleFinder:
    """Finds out which ranks are equal by running a few.

    Args:
        world_size: Ranks of the job.
        gpus_per_node: Devices of a node.
        run: Runs ranks and returns their recordings.
        num_verified: How many inferred ranks to check at a time.
        seed: For drawing them.
        may_add: May other ranks be run than those that were asked for?
        compares_times: Do other durations and host time make other roles? No where times are measured.
    """

    world_size: int
    gpus_per_node: int
    run: Callable[[Sequence[int]], Sequence[Any]]
    num_verified: int = 2
    seed: int = 0
    may_add: bool = True
    compares_times: bool = True
    recordings: dict[int, Any] = field(default_factory=dict)

    def _run(self, ranks: Iterable[int]) -> None:
        missing = sorted(set(ranks) - set(self.recordings))
        if missing:
            self.recordings.update({recording.rank: recording for recording in self.run(missing)})

    def run_all(self) -> Roles:
        """Runs every rank: nothing is inferred."""
        self._run(range(self.world_size))
        return self._roles(list(range(self.world_size)), [], "none: every rank was run")

    def infer(self, first: Sequence[int], base: int, ways: Callable[[Any], list[Distinction]]) -> Roles:
        """Runs `first`, then what the roles need, and checks.

        Args:
            first: Ranks to begin with.
            base: The one of them that is typical.
            ways: Gives the distinctions to try, from the recording of `base`.
        """
        self._run(first)
        generator = random.Random(self.seed)
        verified: set[int] = set()
        problem = ""
        distinctions = ways(self.recordings[base])
        for index, distinction in enumerate(distinctions):
            pair = distinctions[index : index + 2]
            if self._is_too_coarse(pair):
                continue
            representatives = self._represent(distinction, base)
            if representatives is None or self._is_too_coarse(pair):
                continue
            stand_ins = self._stand_ins(distinction, representatives)
            drawn = self._draw(generator, stand_ins)
            self._run(drawn)
            verified.update(drawn)
            problem = self._first_difference(sorted(verified), stand_ins)
            if not problem:
                return self._roles(self._assign(stand_ins), sorted(verified), distinction.name)
        raise RoleError(
            f"ranks that look equal are not: {problem or 'there are too many roles to run one rank of each'}; "
            "collect with --ranks all, or name the ranks to run"
        )

    def _is_too_coarse(self, pair: Sequence[Distinction]) -> bool:
        """Tells whether recordings differ that the first distinction takes for equal and the next does not."""
        if (
            not self.may_add
            or len(pair) < 2
            or len({pair[1].key_of(rank) for rank in range(self.world_size)}) > MAX_REPRESENTATIVES
        ):
            return False
        coarse, fine = pair
        return any(
            coarse.key_of(rank) == coarse.key_of(other)
            and fine.key_of(rank) != fine.key_of(other)
            and not self._is_like(rank, other)
            for rank in self.recordings
            for other in self.recordings
            if rank < other
        )

    def _represent(self, distinction: Distinction, base: int) -> dict[RoleKey, int] | None:
        """One rank per role, run if it has not been; `None` if there are too many roles."""
        ranks_of: dict[RoleKey, list[int]] = defaultdict(list)
        for rank in range(self.world_size):
            ranks_of[distinction.key_of(rank)].append(rank)
        if len(ranks_of) > MAX_REPRESENTATIVES:
            return None
        chosen = {key: self._choose(ranks, base, distinction.preferred) for key, ranks in ranks_of.items()}
        absent = sorted(set(chosen.values()) - set(self.recordings))
        if absent and not self.may_add:
            raise RoleError(f"the ranks to run miss a role: add rank {absent[0]} ({distinction.name})")
        self._run(absent)
        return chosen

    def _choose(self, ranks: Sequence[int], base: int, preferred: frozenset[int]) -> int:
        """The typical one of equal ranks: not the first or last of the job, run already, near the base.

        Of ranks that the user chose, that should be equal and are not, it is one of the majority: the odd one may be
        what the user is after.
        """
        ends = (0, self.world_size - 1)
        programs = Counter(self.recordings[rank].digest() for rank in ranks if rank in self.recordings)

        def cost(rank: int) -> tuple[int, ...]:
            not_run, is_end = rank not in self.recordings, rank in ends
            first: tuple[int, ...] = (is_end, not_run)
            if not self.may_add:
                first = (not_run, 0 if not_run else -programs[self.recordings[rank].digest()], is_end)
            return *first, rank not in preferred, abs(rank - base), rank

        return min(ranks, key=cost)

    def _stand_ins(self, distinction: Distinction, representatives: dict[RoleKey, int]) -> list[int]:
        """For every rank the rank that stands for it if it is not run itself."""
        stand_ins = [representatives[distinction.key_of(rank)] for rank in range(self.world_size)]
        if self.may_add:
            for end in (0, self.world_size - 1):
                self._explain_end(end, distinction, stand_ins)
        return stand_ins

    def _explain_end(self, end: int, distinction: Distinction, stand_ins: list[int]) -> None:
        """Finds out whether an end of the job that differs from its stand-in is alone, or one of many.

        A sharded dimension smaller than the job gives rows to the first ranks and none to the others: then all ranks
        from the end up to some boundary differ. Bisection finds it.
        """
        representative = stand_ins[end]
        step = 1 if end < representative else -1
        key = distinction.key_of(end)
        between = [rank for rank in range(end, representative + step, step) if distinction.key_of(rank) == key]
        if end not in self.recordings or self._is_like(end, representative) or len(between) < 3:
            return
        differs, same = 1, len(between) - 1
        self._run([between[differs]])
        if self._is_like(between[differs], representative):
            return  # the end alone is special, and stands for nobody else
        while same - differs > 1 and len(self.recordings) < MAX_REPRESENTATIVES:
            middle = (differs + same) // 2
            self._run([between[middle]])
            if self._is_like(between[middle], representative):
                same = middle
            else:
                differs = middle
        nearest = between[1]
        for rank in between[1 : differs + 1]:
            nearest = rank if rank in self.recordings else nearest
            stand_ins[rank] = nearest

    def _is_like(self, rank: int, other: int) -> bool:
        return self._digest(self.recordings[rank]) == self._digest(self.recordings[other])

    def _digest(self, recording: Any) -> str:
        digest: str = recording.digest() if self.compares_times else recording.digest(times=False)
        return digest

    def _draw(self, generator: random.Random, stand_ins: Sequence[int]) -> list[int]:
        """Ranks to check: some of all that are inferred, and as many of those for whom not the typical rank stands."""
        inferred = [rank for rank in range(self.world_size) if rank not in self.recordings]
        usual = Counter(stand_ins).most_common(1)[0][0]
        unusual = [rank for rank in inferred if stand_ins[rank] != usual] if self.num_verified else []
        drawn = generator.sample(inferred, min(self.num_verified, len(inferred)))
        return sorted({*drawn, *generator.sample(unusual, min(self.num_verified, len(unusual)))})

    def _assign(self, stand_ins: Sequence[int]) -> list[int]:
        return [rank if rank in self.recordings else stand_ins[rank] for rank in range(self.world_size)]

    def _first_difference(self, verified: Sequence[int], stand_ins: Sequence[int]) -> str:
        for rank in verified:
            mine, other = self.recordings[rank], self.recordings[stand_ins[rank]]
            if not self._is_like(rank, stand_ins[rank]):
                found = mine.difference(other) if self.compares_times else mine.difference(other, times=False)
                difference = found or "their digests differ"
                return f"rank {rank} is not like rank {other.rank} ({difference})"
        return ""

    def _roles(self, assignment: list[int], verified: list[int], name: str) -> Roles:
        digests = {self._digest(recording) for recording in self.recordings.values()}
        return Roles(assignment, verified, name, len(digests))
