"""What may tell the roles of ranks apart: places in process groups and on nodes, and what explains best.

Groups that are made for every rank alike, such as those of one axis of a mesh, are a *family*: equal sizes, equal
distances between neighbours, no member in common. A rank's place in its group of a family is a coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

#: A place in a larger group distinguishes too many ranks to run one of each.
SMALL_GROUP = 64
#: How many ranks may be run as representatives.
MAX_REPRESENTATIVES = 64
#: How many families may explain differences.
MAX_FAMILIES = 32
#: So many traits are tried together to explain a difference.
MAX_TRAITS = 3

RoleKey = tuple[int, ...]
#: Place of a rank that has no such group.
NO_POSITION = -1


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """The groups of one kind, by rank.

    Attributes:
        size: Members of a group.
        stride: Distance of neighbours, or 0 if it varies.
        places: Group rank of every rank that is in one.
        members: Members of its group, likewise.
    """

    size: int
    stride: int
    places: dict[int, int]
    members: dict[int, Sequence[int]]

    def place(self, rank: int) -> int:
        """Group rank of a rank, or `NO_POSITION`."""
        return self.places.get(rank, NO_POSITION)

    def describe(self) -> str:
        """Which groups these are, in words."""
        return f"{self.size} ranks" + (f" (every {self.stride})" if self.stride else "")


class Positions:
    """Every rank's places in the process groups of a job.

    Args:
        groups: Member lists in order of creation; no groups stand for one of all ranks.
        world_size: Ranks of the job.
    """

    def __init__(self, groups: Sequence[Sequence[int]], world_size: int) -> None:
        self.world_size = world_size
        self.families: list[Family] = []
        #: Family and group rank for each group of a rank, in order of creation.
        self._own: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
        alike: dict[tuple[int, ...], list[int]] = {}
        for members in groups or [range(world_size)]:
            distances = tuple(right - left for left, right in pairwise(members))
            number = self._family(alike.setdefault((len(members), *distances), []), members, distances)
            family = self.families[number]
            for place, rank in enumerate(members):
                family.places[rank] = place
                family.members[rank] = members
                self._own[rank].append((number, place))

    def _family(self, alike: list[int], members: Sequence[int], distances: tuple[int, ...]) -> int:
        """The first family of this shape that has none of the members, or a new one."""
        for number in alike:
            if self.families[number].places.keys().isdisjoint(members):
                return number
        stride = distances[0] if len(set(distances)) == 1 else 0
        self.families.append(Family(len(members), stride, {}, {}))
        alike.append(len(self.families) - 1)
        return alike[-1]

    def small(self) -> list[Family]:
        """Families of groups of 2 to `SMALL_GROUP` members, but not of the whole job; of equal ones the first.

        Of very many those that most ranks are in.
        """
        found: dict[tuple[tuple[int, int], ...], Family] = {}
        for family in self.families:
            if self._is_small(family):
                found.setdefault(tuple(sorted(family.places.items())), family)
        chosen = sorted(found.values(), key=lambda family: -len(family.places))[:MAX_FAMILIES]
        return [family for family in found.values() if family in chosen]

    def _is_small(self, family: Family) -> bool:
        return 1 < family.size <= SMALL_GROUP and family.size < self.world_size

    def with_messages(self, rank: int, ordinals: Iterable[int]) -> list[Family]:
        """The small families that carry messages, by the ordinals of a rank's groups that do.

        Messages in a large group: the small ones are all that may explain who sends to whom.
        """
        own = self._own[rank]
        chosen = [(ordinal, self.families[own[ordinal][0]]) for ordinal in ordinals if ordinal < len(own)]
        small = self.small()
        if not all(self._is_small(family) for _, family in chosen):
            return small
        found: list[Family] = []
        for ordinal, family in chosen:
            whole = family if len(family.places) == self.world_size else self._by_ordinal(ordinal, family.size)
            equal = next((other for other in small if other.places == whole.places), whole)
            if equal not in found:
                found.append(equal)
        return found

    def _by_ordinal(self, ordinal: int, size: int) -> Family:
        """Groups of unlike shapes, as families of ranks that made them at the same point of their programs."""
        places = {rank: own[ordinal][1] for rank, own in enumerate(self._own) if ordinal < len(own)}
        members = {rank: self.families[self._own[rank][ordinal][0]].members[rank] for rank in places}
        return Family(size, 0, places, members)


@dataclass(frozen=True, slots=True, eq=False)
class Trait:
    """Something about a rank that may decide what it does.

    Attributes:
        name: In words.
        values: By rank.
        family: The groups that it is about, if any.
    """

    name: str
    values: Sequence[int]
    family: Family | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Distinction:
    """One way to tell roles apart: ranks that are equal in all of some traits are taken for equal.

    Attributes:
        base: What is always told apart.
        added: What is told apart because ranks were seen to differ.
    """

    base: tuple[Trait, ...]
    added: tuple[Trait, ...] = ()

    @property
    def name(self) -> str:
        """What tells them apart, in words."""
        parts = [*(f"place among {trait.name}" for trait in self.base), *(trait.name for trait in self.added)]
        return ", ".join(parts) or "nothing: all ranks are alike"

    def key_of(self, rank: int) -> RoleKey:
        """The role of a rank."""
        return tuple(trait.values[rank] for trait in (*self.base, *self.added))

    def num_roles(self) -> int:
        """How many roles there are."""
        values = [trait.values for trait in (*self.base, *self.added)]
        return len(set(zip(*values, strict=True))) if values else 1


class Explanations:
    """The distinctions that are worth trying for a job.

    Args:
        positions: Where ranks are.
        rank: One that was run.
        p2p_ordinals: Which of its groups carry messages.
        gpus_per_node: Devices of a node.
    """

    def __init__(self, positions: Positions, rank: int, p2p_ordinals: Sequence[int], gpus_per_node: int) -> None:
        self.world_size = positions.world_size
        messages = positions.with_messages(rank, sorted(set(p2p_ordinals)))
        self.coarsest = Distinction(
            tuple(
                Trait(f"{family.describe()} that exchange messages", self._values(family), family)
                for family in messages
            )
        )
        self._axes = positions.small()
        self._others = [family for family in self._axes if family not in messages]
        self._traits = list(self._possible_traits(gpus_per_node))
        self.typical = self._typical() if messages else rank

    def _values(self, family: Family) -> list[int]:
        return [family.place(rank) for rank in range(self.world_size)]

    def _possible_traits(self, gpus_per_node: int) -> Iterator[Trait]:
        for family in self._others:
            name = f"of its small process groups of {family.describe()}"
            places = self._values(family)
            yield Trait(f"first {name}", [int(place == 0) for place in places], family)
            yield Trait(f"last {name}", [int(place == family.size - 1) for place in places], family)
            if NO_POSITION in places:
                yield Trait(f"member {name}", [int(place != NO_POSITION) for place in places], family)
            yield Trait(f"place in those {name}", places, family)
        if 1 < gpus_per_node < self.world_size:
            yield Trait("place on its node", [rank % gpus_per_node for rank in range(self.world_size)])

    def _typical(self) -> int:
        """A rank that is neither first nor last of as many of its groups as possible."""
        inside = [0] * self.world_size
        for family in self._axes:
            for rank, place in family.places.items():
                inside[rank] += int(0 < place < family.size - 1)
        # Two thirds: a place in the middle of every axis of powers of two.
        middle = 2 * self.world_size // 3
        return max(range(self.world_size), key=lambda rank: (inside[rank], -abs(rank - middle), -rank))

    def distance(self, rank: int, other: int) -> int:
        """In how many families the places of two ranks differ."""
        return sum(family.place(rank) != family.place(other) for family in self._axes)

    def steps(self, start: int, end: int) -> list[int]:
        """Ranks that are like `start` but for one place, in which they are like `end`."""
        found: list[int] = []
        for family in self._others:
            there = family.place(end)
            if there not in (NO_POSITION, family.place(start)) and start in family.members:
                rank = family.members[start][there]
                if rank not in (start, end, *found):
                    found.append(rank)
        return found

    def simplest(self, is_possible: Callable[[Distinction], bool], min_traits: int = 0) -> list[Distinction]:
        """Distinctions that are possible, all with the fewest traits, those of the fewest roles first."""
        for count in range(min_traits, MAX_TRAITS + 1):
            ways = (
                Distinction(self.coarsest.base, added)
                for added in combinations(self._traits, count)
                if len({trait.family for trait in added}) == count
            )
            sized = [(way.num_roles(), place, way) for place, way in enumerate(ways) if is_possible(way)]
            found = [way for size, _, way in sorted(sized, key=lambda entry: entry[:2]) if size <= MAX_REPRESENTATIVES]
            if found:
                return found
        if self.world_size <= MAX_REPRESENTATIVES:
            return [Distinction((), (Trait("none: every rank was run", range(self.world_size)),))]
        return []
