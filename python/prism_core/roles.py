"""Which ranks do the same: run one of each role, let it stand for the others, check on ranks drawn at random.

A rank's *role key* is its place in some of its process groups. The groups that carry point-to-point messages always
count (a pipeline stage does what its place says). Where ranks differ that should be equal, ranks are run that differ
from one of the two in a single place, and the simplest distinction that explains all that was seen is tried next.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from prism_core.errors import RoleError
from prism_core.traits import MAX_REPRESENTATIVES, Distinction, Explanations, Positions, RoleKey

__all__ = ["MAX_REPRESENTATIVES", "Explanations", "Positions", "RoleFinder", "Roles"]

#: How many ranks may be run only to choose between explanations.
MAX_EXPERIMENTS = 8
#: How many ranks may be run in all before differences are no longer looked into.
MAX_RUN = 3 * MAX_REPRESENTATIVES


@dataclass(slots=True)
class Roles:
    """Who stands for whom.

    Attributes:
        assignment: For every rank, the rank whose recording stands for it.
        verified: Ranks that were run only to check the inference.
        distinction: How roles are told apart.
        num_roles: Different programs among the representatives.
        differences: Of ranks that were taken for equal at first: what made the distinction finer.
        farthest: Of the ranks that were run and are not quite like the one that stands for their role: that which is
            farthest from it, that one, and the distance in millionths. None where roles are exact.
    """

    assignment: list[int]
    verified: list[int]
    distinction: str
    num_roles: int
    differences: list[str] = field(default_factory=list)
    farthest: tuple[int, int, int] | None = None


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
        tolerance_ppm: Ranks that communicate alike count as alike up to this distance (`Recording.distance_ppm`).
    """

    world_size: int
    gpus_per_node: int
    run: Callable[[Sequence[int]], Sequence[Any]]
    num_verified: int = 2
    seed: int = 0
    may_add: bool = True
    compares_times: bool = True
    tolerance_ppm: int = 0
    recordings: dict[int, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    #: Ends of the job that are unlike all others, and ranks next to them that are like those ends.
    _alone: set[int] = field(default_factory=set)
    _num_experiments: int = 0
    #: Distances of recordings that are not equal; none where they communicate differently.
    _distances: dict[tuple[int, int], int | None] = field(default_factory=dict)

    def _run(self, ranks: Iterable[int]) -> None:
        missing = sorted(set(ranks) - set(self.recordings))
        if missing:
            self.recordings.update({recording.rank: recording for recording in self.run(missing)})

    def run_all(self) -> Roles:
        """Runs every rank: nothing is inferred."""
        self._run(range(self.world_size))
        return self._roles(list(range(self.world_size)), [], "none: every rank was run")

    def infer(self, first: Sequence[int], base: int, explanations: Callable[[Any], Explanations]) -> Roles:
        """Runs `first`, then what the roles need, and checks.

        Args:
            first: Ranks to begin with.
            base: The one of them that is typical.
            explanations: Gives the distinctions to try, from the recording of `base`.

        Raises:
            RoleError: Ranks differ and no distinction says why, or there are too many roles.
        """
        self._run(first)
        generator = random.Random(self.seed)
        known = explanations(self.recordings[base])
        way = known.coarsest
        verified: set[int] = set()
        while True:
            representatives = self._represent(way, known)
            if self.may_add and (better := self._explain(way, representatives, known)) is not way:
                way = better
                continue
            stand_ins = self._stand_ins(way, representatives, known)
            if self.may_add and self._odd(way, representatives):
                continue  # what was run beside an end of the job bears out a role of its own
            drawn = self._draw(generator, way, stand_ins)
            self._run(drawn)
            verified.update(drawn)
            problem = self._first_difference(sorted(verified), stand_ins)
            if not problem:
                farthest = self._farthest(stand_ins)
                return self._roles(self._assign(stand_ins), sorted(verified), way.name, farthest)
            self._alone.clear()  # what was thought of the ends may be wrong as well
            if (better := self._explain(way, representatives, known)) is way:
                raise RoleError(_unlike(problem))
            way = better

    # Differences and what explains them

    def _explain(self, way: Distinction, representatives: Mapping[RoleKey, int], known: Explanations) -> Distinction:
        """A distinction that agrees with all recordings; the one that is given, if it does.

        Raises:
            RoleError: There is none.
        """
        odd = self._odd(way, representatives)
        if not odd:
            return way
        ends = {0, self.world_size - 1}
        rank, other = min(odd, key=lambda pair: (pair[0] in ends, pair))
        self.differences.append(self._difference(rank, other))
        steps = known.steps(other, rank) if self.may_add and len(self.recordings) < MAX_RUN else []
        self._run(steps)
        has_effect = not all(self._is_like(step, other) for step in steps)
        found = self._decide(known, 0 if has_effect or rank in ends else 2)
        if not found or (found[0].key_of(rank) == found[0].key_of(other) and rank not in ends):
            raise RoleError(_unlike(self.differences[-1]))
        if found[0].key_of(rank) == found[0].key_of(other):
            self._alone.add(rank)  # or with many at that end: bisection will tell
        return found[0]

    def _decide(self, known: Explanations, min_traits: int) -> list[Distinction]:
        """The simplest explanations, after ranks were run about which the first one and others disagree.

        Args:
            known: All explanations.
            min_traits: Of the others: no single trait made a difference, so several together may.
        """
        while True:
            found = known.simplest(self._agrees)
            others = found[1:] + (known.simplest(self._agrees, min_traits) if min_traits else [])
            if not self.may_add or self._num_experiments >= MAX_EXPERIMENTS:
                return found
            crucial = (self._crucial(found[0], way) for way in others[:MAX_EXPERIMENTS])
            rank = next((rank for rank in crucial if rank is not None), None)
            if rank is None:
                return found
            self._num_experiments += 1
            self._run([rank])

    def _crucial(self, way: Distinction, other: Distinction) -> int | None:
        """A rank that is like one recording if the first explanation holds, and like a different one by the other."""
        mine, theirs = self._programs(way), self._programs(other)
        for rank in range(1, self.world_size - 1):
            one, two = mine.get(way.key_of(rank)), theirs.get(other.key_of(rank))
            if one is None or two is None or rank in self.recordings:
                continue
            if not self._is_like(one, two):
                return rank
        return None

    def _programs(self, way: Distinction) -> dict[RoleKey, int]:
        return {way.key_of(rank): rank for rank in self._shared()}

    def _shared(self) -> list[int]:
        """Ranks that were run and may be like others. An end of the job may be special: others have to bear it out."""
        special = {0, self.world_size - 1, *self._alone} if self.world_size > 2 else self._alone
        return [rank for rank in self.recordings if rank not in special]

    def _agrees(self, way: Distinction) -> bool:
        """Tells whether all recordings of a role are alike."""
        first: dict[RoleKey, int] = {}
        return all(self._is_like(rank, first.setdefault(way.key_of(rank), rank)) for rank in self._shared())

    def _odd(self, way: Distinction, representatives: Mapping[RoleKey, int]) -> list[tuple[int, int]]:
        """Ranks that are not like the representative of their role, with that one."""
        pairs = [(rank, representatives[way.key_of(rank)]) for rank in self.recordings if rank not in self._alone]
        return sorted(pair for pair in pairs if not self._is_like(*pair))

    # Who is run, and for whom it stands

    def _represent(self, way: Distinction, known: Explanations) -> dict[RoleKey, int]:
        """One rank per role, run if it has not been.

        Raises:
            RoleError: There are too many roles, or the user's ranks miss one.
        """
        ranks_of: dict[RoleKey, list[int]] = {}
        for rank in range(self.world_size):
            ranks_of.setdefault(way.key_of(rank), []).append(rank)
        if len(ranks_of) > MAX_REPRESENTATIVES:
            raise RoleError(_unlike(f"there are too many roles to run one rank of each ({len(ranks_of)}: {way.name})"))
        chosen = {key: self._choose(ranks, known, bool(way.base)) for key, ranks in ranks_of.items()}
        absent = sorted(set(chosen.values()) - set(self.recordings))
        if absent and not self.may_add:
            raise RoleError(f"the ranks to run miss a role: add rank {absent[0]} ({way.name})")
        self._run(absent)
        return chosen

    def _choose(self, ranks: Sequence[int], known: Explanations, has_stages: bool) -> int:
        """The typical one of equal ranks: not the first or last of the job, run already, near the typical one of all.

        Of stages those are compared that are equal in all other places, whatever was run before. Of ranks that the user
        chose, that should be equal and are not, it is one of the majority: the odd one may be what the user is after.
        """
        ends = (0, self.world_size - 1)
        programs = Counter(self.recordings[rank].digest() for rank in ranks if rank in self.recordings)

        def cost(rank: int) -> tuple[int, ...]:
            not_run, is_end = rank not in self.recordings, rank in ends
            place = known.distance(rank, known.typical)
            first: tuple[int, ...] = (is_end, place, not_run) if has_stages else (is_end, not_run, place)
            if not self.may_add:
                first = (not_run, 0 if not_run else -programs[self.recordings[rank].digest()], is_end)
            return *first, abs(rank - known.typical), rank

        return min(ranks, key=cost)

    def _stand_ins(
        self, distinction: Distinction, representatives: Mapping[RoleKey, int], known: Explanations
    ) -> list[int]:
        """For every rank the rank that stands for it if it is not run itself."""
        stand_ins = [representatives[distinction.key_of(rank)] for rank in range(self.world_size)]
        if self.may_add:
            for end in (0, self.world_size - 1):
                self._explain_end(end, distinction, stand_ins, known)
        return stand_ins

    def _explain_end(self, end: int, distinction: Distinction, stand_ins: list[int], known: Explanations) -> None:
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
        if not self._is_like(between[differs], end) and self._is_borne_out(between[differs], known):
            return  # it would be like that anywhere: no matter of the end
        while same - differs > 1 and len(self.recordings) < MAX_REPRESENTATIVES:
            middle = (differs + same) // 2
            self._run([between[middle]])
            if self._is_like(between[middle], representative):
                same = middle
            else:
                differs = middle
        self._alone.update(between[: differs + 1])
        nearest = between[1]
        for rank in between[1 : differs + 1]:
            nearest = rank if rank in self.recordings else nearest
            stand_ins[rank] = nearest

    def _is_borne_out(self, rank: int, known: Explanations) -> bool:
        """Tells whether a rank is like one far from it, which it should be by the simplest explanation of all seen."""
        found = known.simplest(self._agrees)
        if not found:
            return False
        ends, key = (0, self.world_size - 1), found[0].key_of(rank)
        alike = [
            other for other in range(self.world_size) if found[0].key_of(other) == key and other not in (rank, *ends)
        ]
        if not alike:
            return False
        far = min(alike, key=lambda other: (abs(other - known.typical), other))
        self._run([far])
        return self._is_like(far, rank)

    def _is_like(self, rank: int, other: int) -> bool:
        """Tells whether two ranks are equal, or near enough to each other."""
        if self._is_equal(rank, other):
            return True
        if not self.tolerance_ppm:
            return False
        distance = self._distance(rank, other)
        return distance is not None and distance <= self.tolerance_ppm

    def _is_equal(self, rank: int, other: int) -> bool:
        return self._digest(self.recordings[rank]) == self._digest(self.recordings[other])

    def _distance(self, rank: int, other: int) -> int | None:
        """How far apart two ranks are that are not equal; none if they communicate differently."""
        pair = min(rank, other), max(rank, other)
        if pair not in self._distances:
            one, two = (self.recordings[rank] for rank in pair)
            self._distances[pair] = one.distance_ppm(two, times=self.compares_times)
        return self._distances[pair]

    def _farthest(self, stand_ins: Sequence[int]) -> tuple[int, int, int] | None:
        """Of the ranks that are near enough to the one that stands for them, but not equal, the farthest."""
        unequal = ((rank, stand_ins[rank]) for rank in sorted(self.recordings))
        found = [
            (rank, other, self._distance(rank, other) or 0)
            for rank, other in unequal
            if not self._is_equal(rank, other) and self._is_like(rank, other)
        ]
        return max(found, key=lambda entry: (entry[2], -entry[0]), default=None)

    def _digest(self, recording: Any) -> str:
        digest: str = recording.digest() if self.compares_times else recording.digest(times=False)
        return digest

    def _draw(self, generator: random.Random, way: Distinction, stand_ins: Sequence[int]) -> list[int]:
        """Ranks to check: some of all that are inferred, and as many of uncommon kinds of rank, the rarest first."""
        inferred = [rank for rank in range(self.world_size) if rank not in self.recordings]
        kinds = [tuple(trait.values[rank] for trait in way.added) or stand_ins[rank] for rank in range(self.world_size)]
        drawn = set(generator.sample(inferred, min(self.num_verified, len(inferred))))
        sizes = Counter(kinds)
        usual = sizes.most_common(1)[0][0]
        generator.shuffle(inferred)
        inferred.sort(key=lambda rank: sizes[kinds[rank]])
        unusual: dict[Any, list[int]] = {}
        for rank in inferred:
            if kinds[rank] != usual and rank not in drawn:
                unusual.setdefault(kinds[rank], []).append(rank)
        in_turn = [rank for turn in zip_longest(*unusual.values()) for rank in turn if rank is not None]
        return sorted({*drawn, *in_turn[: self.num_verified]})

    def _assign(self, stand_ins: Sequence[int]) -> list[int]:
        return [rank if rank in self.recordings else stand_ins[rank] for rank in range(self.world_size)]

    def _first_difference(self, verified: Sequence[int], stand_ins: Sequence[int]) -> str:
        unlike = (rank for rank in verified if not self._is_like(rank, stand_ins[rank]))
        return next((self._difference(rank, stand_ins[rank]) for rank in unlike), "")

    def _difference(self, rank: int, other: int) -> str:
        """In what two recordings differ."""
        mine, theirs = self.recordings[rank], self.recordings[other]
        found = mine.difference(theirs) if self.compares_times else mine.difference(theirs, times=False)
        how = found or "their digests differ"
        if self.tolerance_ppm:
            distance = self._distance(rank, other)
            apart = "they communicate differently" if distance is None else f"{distance / 10_000:g} % apart"
            how = f"{apart}; {how}"
        return f"rank {rank} is not like rank {other} ({how})"

    def _roles(
        self, assignment: list[int], verified: list[int], name: str, farthest: tuple[int, int, int] | None = None
    ) -> Roles:
        different: list[int] = []
        for rank in self.recordings:
            if not any(self._is_like(rank, other) for other in different):
                different.append(rank)
        if self.tolerance_ppm:
            share = f"{self.tolerance_ppm / 10_000:g} %"
            name += f" (ranks that communicate alike and are at most {share} apart are taken for one)"
        return Roles(assignment, verified, name, len(different), self.differences, farthest)


def _unlike(problem: str) -> str:
    return (
        f"ranks that look equal are not: {problem}; collect with --ranks all, name the ranks to run, or let small "
        "differences pass with --role-tolerance"
    )
