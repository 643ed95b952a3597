"""The models of collectives and matching: tables made elsewhere, hand-made cases, laws, and refusals by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prism_core import ConfigError, DeadlockError, MismatchError
from prism_core.collectives import completion, models

TABLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "collectives" / "vectors.json"


def table() -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads(TABLE.read_text()) if TABLE.exists() else []
    return vectors


@pytest.mark.skipif(not TABLE.exists(), reason=f"{TABLE.name} is not here")
def test_the_table_covers_every_model() -> None:
    assert {vector["model"] for vector in table()} == set(models())


@pytest.mark.parametrize("vector", table(), ids=lambda vector: vector["id"])
def test_vector(vector: dict[str, Any]) -> None:
    answer = completion(vector["model"], **vector["inputs"])
    assert answer == vector["expect"]
    assert json.dumps(answer) == json.dumps(vector["expect"])


def test_models_need_no_torch() -> None:
    code = "import sys; from prism_core.collectives import models; assert models(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Rings, chains and trees by their definition, message by message.


def slow_ring(inputs: dict[str, Any]) -> list[int]:
    arrivals, latency, q = inputs["arrival_ns"], inputs["latency_ns_of_incoming_link"], inputs["slices_per_step"]
    slots, credit = inputs["credits"], inputs["credit_latency_ns"]
    phases = zip(inputs["messages_per_phase"], inputs["occ_ns_per_phase_per_sender"], strict=True)
    costs = [costs for count, costs in phases for _ in range(count)]
    n, total = len(arrivals), len(costs)
    ready: list[list[int]] = []
    departed: list[list[int]] = []
    for j in range(total + q):
        row = list(ready[-1]) if ready else list(arrivals)
        for p in range(n):
            if j >= q:
                row[p] = max(row[p], departed[j - q][p - 1] + latency[p])
            if slots and slots <= j < total:
                row[p] = max(row[p], ready[j - slots + q][(p + 1) % n] + credit)
        ready.append(row)
        if j < total:
            departed.append([max([row[p], *([departed[-1][p]] if departed else [])]) + costs[j][p] for p in range(n)])
    return [max(ready[-1][p], departed[-1][p]) if total else arrivals[p] for p in range(n)]


def slow_chain(inputs: dict[str, Any]) -> list[int]:
    arrivals, occupancy, latency = (
        inputs[key] for key in ("arrival_ns", "occ_ns_of_sender", "latency_ns_of_incoming_link")
    )
    n, slots = len(arrivals), inputs["credits"]
    ready: list[list[int]] = []
    departed = [-(1 << 62)] * n
    for j in range(inputs["chunks"]):
        row = list(ready[-1]) if ready else list(arrivals)
        for p in range(n):
            if p > 0:
                row[p] = max(row[p], departed[p - 1] + latency[p])
            if slots and j >= slots and p + 1 < n:
                row[p] = max(row[p], ready[j - slots][p + 1] + inputs["credit_latency_ns"])
            departed[p] = max(departed[p], row[p]) + occupancy[p]
        ready.append(row)
    return [max(ready[-1][p], departed[p]) if p + 1 < n else ready[-1][p] for p in range(n)]


def slow_tree(inputs: dict[str, Any]) -> list[int]:
    parent, arrivals = inputs["parent"], inputs["arrival_ns"]
    occupancy, latency = inputs["occ_ns_edge_to_parent_and_back"], inputs["latency_ns_edge"]
    n, chunks, split = len(parent), inputs["chunks"], inputs["mode"] == "split"

    def depth(rank: int) -> int:
        return 0 if parent[rank] < 0 else 1 + depth(parent[rank])

    order = sorted(range(n), key=depth)
    sent = [[0] * chunks for _ in range(n)]
    done = list(arrivals)
    for j in range(chunks):
        for rank in reversed(order):
            children = (sent[child][j] + latency[child] for child in range(n) if parent[child] == rank)
            reduced = max([arrivals[rank], *children])
            sent[rank][j] = max([reduced, *([sent[rank][j - 1]] if j and parent[rank] >= 0 else [])])
            if parent[rank] >= 0:
                sent[rank][j] += occupancy[rank]
            done[rank] = max(done[rank], sent[rank][j])
    root = order[0]
    has = [[0] * chunks for _ in range(n)]
    left = [-(1 << 62)] * n
    for j in range(chunks):
        has[root][j] = sent[root][j if split else chunks - 1]
        for rank in order[1:]:
            up = parent[rank]
            left[rank] = max(left[rank], has[up][j]) + occupancy[rank]
            has[rank][j] = left[rank] + latency[rank]
            done[up] = max(done[up], left[rank])
            done[rank] = max(done[rank], has[rank][j])
    return done


COST = st.integers(0, 5000)


def times(n: int) -> st.SearchStrategy[list[int]]:
    spread = st.sampled_from([0, 500, 20_000, 1_000_000])
    return spread.flatmap(lambda most: st.lists(st.integers(0, most), min_size=n, max_size=n))


def costs(n: int) -> st.SearchStrategy[list[int]]:
    return st.one_of(COST.map(lambda cost: [cost] * n), st.lists(COST, min_size=n, max_size=n))


@st.composite
def rings(draw: st.DrawFn) -> dict[str, Any]:
    n, phases = draw(st.integers(2, 9)), draw(st.integers(1, 3))
    q = draw(st.integers(1, 4))
    slots = draw(st.one_of(st.just(0), st.integers(q + 1, q + 6)))
    return {
        "n": n,
        "messages_per_phase": draw(st.lists(st.integers(0, 4 * n), min_size=phases, max_size=phases)),
        "occ_ns_per_phase_per_sender": [draw(costs(n)) for _ in range(phases)],
        "slices_per_step": q,
        "credits": slots,
        "credit_latency_ns": draw(COST) if slots else 0,
        "arrival_ns": draw(times(n)),
        "latency_ns_of_incoming_link": draw(costs(n)),
    }


@st.composite
def chains(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 9))
    return {
        "n": n,
        "chunks": draw(st.integers(1, 20)),
        "credits": draw(st.integers(0, 6)),
        "credit_latency_ns": draw(COST),
        "occ_ns_of_sender": draw(costs(n)),
        "latency_ns_of_incoming_link": draw(costs(n)),
        "arrival_ns": draw(times(n)),
    }


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(1, 12))
    name = draw(st.permutations(range(n)))
    parent = [-1] * n
    for rank in range(1, n):
        parent[name[rank]] = name[draw(st.integers(0, rank - 1))]
    return {
        "n": n,
        "parent": parent,
        "chunks": draw(st.integers(1, 9)),
        "mode": draw(st.sampled_from(["split", "up_then_down"])),
        "occ_ns_edge_to_parent_and_back": draw(costs(n)),
        "latency_ns_edge": draw(costs(n)),
        "arrival_ns": draw(times(n)),
    }


@st.composite
def others(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    n = draw(st.integers(1, 9))
    square = st.lists(st.lists(COST, min_size=n, max_size=n), min_size=n, max_size=n)
    local = draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    link = st.fixed_dictionaries({"occ_ns": COST, "lat_ns": COST})
    inputs: dict[str, dict[str, Any]] = {
        "ring_multi_channel": {
            "n": n,
            "orders": draw(st.lists(st.permutations(range(n)), max_size=3)),
            "occ_ns": draw(COST),
            "latency_ns": draw(COST),
        },
        "double_tree_allreduce": {
            "n": n,
            "chunks_per_tree": draw(st.integers(1, 9)),
            "occ_ns": draw(COST),
            "latency_ns": draw(COST),
            "trees": "NCCL ncclGetDtree",
        },
        "hierarchical_allreduce": {"local": local, "nodes": n // local, "intra": draw(link), "inter": draw(link)},
        "alltoall_round_sync": {"n": n, "cost_ns": draw(COST), "rounds": draw(st.integers(0, n))},
        "alltoallv_port": {"cost_ns_src_dst": draw(square)},
    }
    model = draw(st.sampled_from(sorted(inputs)))
    return model, {**inputs[model], "arrival_ns": draw(times(n))}


ANY = st.one_of(
    rings().map(lambda inputs: ("ring_credits", inputs)),
    chains().map(lambda inputs: ("chain_broadcast", inputs)),
    trees().map(lambda inputs: ("tree_allreduce", inputs)),
    others(),
)


@given(rings())
@settings(max_examples=300, deadline=None)
def test_rings_are_their_recurrence(inputs: dict[str, Any]) -> None:
    expected = slow_ring(inputs)
    for model in ("ring_allreduce_uniform", "ring_two_level", "ring_hetero_two_phase", "ring_credits"):
        assert completion(model, **inputs) == expected


@given(chains())
@settings(max_examples=300, deadline=None)
def test_chains_are_their_recurrence(inputs: dict[str, Any]) -> None:
    assert completion("chain_broadcast", **inputs) == slow_chain(inputs)


@given(trees())
@settings(max_examples=300, deadline=None)
def test_trees_are_their_recurrence(inputs: dict[str, Any]) -> None:
    assert completion("tree_allreduce", **inputs) == slow_tree(inputs)


@given(ANY, st.integers(-50_000, 50_000), st.data())
@settings(max_examples=300, deadline=None)
def test_laws(case: tuple[str, dict[str, Any]], shift: int, data: st.DataObject) -> None:
    model, inputs = case
    arrivals = inputs["arrival_ns"]
    ends = completion(model, **inputs)
    assert all(end >= arrival for end, arrival in zip(ends, arrivals, strict=True))
    moved = completion(model, **{**inputs, "arrival_ns": [arrival + shift for arrival in arrivals]})
    assert moved == [end + shift for end in ends]
    late, delay = data.draw(st.integers(0, len(arrivals) - 1)), data.draw(st.integers(0, 100_000))
    delayed = completion(model, **{**inputs, "arrival_ns": [a + delay * (r == late) for r, a in enumerate(arrivals)]})
    assert all(0 <= after - before <= delay for after, before in zip(delayed, ends, strict=True))


RING = {
    "n": 3,
    "messages_per_phase": [4],
    "occ_ns_per_phase_per_sender": [[10, 10, 10]],
    "slices_per_step": 1,
    "credits": 0,
    "credit_latency_ns": 0,
    "arrival_ns": [0, 0, 0],
    "latency_ns_of_incoming_link": [5, 5, 5],
}


def test_a_ring_by_hand() -> None:
    # Four steps of 10 + 5, one after the other.
    assert completion("ring_allreduce_uniform", **RING) == [60, 60, 60]
    assert completion("ring_allreduce_uniform", **{**RING, "arrival_ns": [0, 0, 100]}) == [160, 150, 155]
    assert completion("ring_credits", **{**RING, "credits": None}) == [60, 60, 60]


def test_credits_hold_a_fast_sender_where_no_closed_form_does() -> None:
    slow_reader = {"chunks": 3, "credits": 1, "credit_latency_ns": 7, "arrival_ns": [0, 100]}
    links = {"occ_ns_of_sender": [10, 10], "latency_ns_of_incoming_link": [5, 5]}
    # The second chunk leaves when the reader, who came at 100, has taken the first: 107; the third 22 later.
    assert completion("chain_broadcast", **slow_reader, **links) == [139, 144]


def test_the_way_down_may_wait_for_the_whole_way_up() -> None:
    tree = {"parent": [-1, 0], "chunks": 2, "latency_ns_edge": [0, 5], "arrival_ns": [0, 0]}
    tree["occ_ns_edge_to_parent_and_back"] = [0, 10]
    assert completion("tree_allreduce", mode="split", **tree) == [35, 40]
    assert completion("tree_allreduce", mode="up_then_down", **tree) == [45, 50]


def test_arrays_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    arrays = {key: numpy.array(value) if isinstance(value, list) else value for key, value in RING.items()}
    assert completion("ring_credits", **arrays) == [60, 60, 60]


# Matching and deadlock.

SUM = ["allreduce", 8, "f32", "sum", -1]


def matching(*programs: list[Any], p2p: str = "500+bytes//10, rendezvous", **comms: list[int]) -> dict[str, Any]:
    comms = {"w": list(range(len(programs))), "x": [0, 1], "y": [0, 1], **comms}
    answer: dict[str, Any] = completion(
        "matching", comms=comms, programs=list(programs), collective_cost_ns=1000, p2p_cost_ns=p2p, name="made by hand"
    )
    return answer


def result(
    finish: list[int], stuck: list[int], cycle: int = 0, missing: int = 0, mismatches: Any = ()
) -> dict[str, Any]:
    return {
        "finish_ns": finish,
        "stuck": stuck,
        "mismatches": list(mismatches),
        "cycle_length": cycle,
        "n_missing": missing,
    }


def test_two_blocking_sends_face_to_face_are_a_cycle_and_grouped_they_are_not() -> None:
    def program(peer: int) -> list[Any]:
        return [["send", "x", peer, 100], ["recv", "x", peer, 100]]

    assert matching(program(1), program(0)) == result([0, 0], [0, 1], cycle=2)
    assert matching([["group", program(1)]], [["group", program(0)]]) == result([510, 510], [])
    assert matching(program(1), program(0), p2p="500+bytes//10, eager") == result([510, 510], [])


def test_receives_face_to_face_are_a_cycle_even_if_eager() -> None:
    programs = [["recv", "x", 1, 4], ["send", "x", 1, 4]], [["recv", "x", 0, 4], ["send", "x", 0, 4]]
    for p2p in ("500", "500, eager"):
        assert matching(*programs, p2p=p2p) == result([0, 0], [0, 1], cycle=2)


def test_a_circle_of_three_and_its_victim() -> None:
    programs = [[["recv", "w", (rank + 2) % 3, 4], ["send", "w", (rank + 1) % 3, 4]] for rank in range(3)]
    victim = [["comp", 7], ["recv", "w", 0, 4]]
    assert matching(*programs, victim) == result([0, 0, 0, 7], [0, 1, 2, 3], cycle=3)


@pytest.mark.parametrize(
    "odd", [["allreduce", 8, "f16", "sum", -1], ["allreduce", 8, "f32", "max", -1], ["reduce", 8, "f32", "sum", 2]]
)
def test_any_difference_of_a_collective_is_a_mismatch(odd: list[Any]) -> None:
    programs = [[["coll", "w", *(odd if rank == 2 else SUM)]] for rank in range(4)]
    assert matching(*programs) == result([1000] * 4, [], mismatches=["('C', 'w', 0)"])


def test_message_halves_of_different_size_are_a_mismatch_at_the_senders_cost() -> None:
    answer = matching([["send", "x", 1, 100]], [["recv", "x", 0, 200]])
    assert answer == result([510, 510], [], mismatches=["('P', 'x', 0, 1, 0)"])


def test_messages_of_a_pair_match_in_order() -> None:
    programs = [["send", "x", 1, 10], ["send", "x", 1, 20]], [["recv", "x", 0, 10], ["comp", 50], ["recv", "x", 0, 20]]
    assert matching(*programs) == result([501 + 50 + 502, 501 + 50 + 502], [])


def test_a_message_to_oneself_needs_a_group() -> None:
    halves = [["send", "w", 0, 10], ["recv", "w", 0, 10]]
    assert matching([["comp", 3], *halves], []) == result([3, 0], [0], cycle=1)
    assert matching([["group", halves]], []) == result([501, 0], [])


def test_a_message_nobody_takes_is_missing() -> None:
    assert matching([["send", "x", 1, 10]], [["comp", 9]]) == result([0, 9], [0], missing=1)


def test_one_rank_that_calls_twice_waits_for_all_others() -> None:
    once = [["coll", "w", *SUM]]
    assert matching(once * 2, once, once, once) == result([1000] * 4, [0], missing=3)


def test_a_group_over_communicators_ends_with_its_last_call() -> None:
    both = [["coll", "x", *SUM], ["coll", "y", *SUM]]
    late = [["comp", 30], ["group", both[::-1]]]
    assert matching([["group", both]], late, []) == result([1030, 1030, 0], [])


def test_messages_are_not_counted_as_collectives() -> None:
    program = [["group", [["send", "x", 1, 0], ["recv", "x", 1, 0]]], ["coll", "x", *SUM]]
    other = [["group", [["recv", "x", 0, 0], ["send", "x", 0, 0]]], ["coll", "x", *SUM]]
    assert matching(program, other) == result([1500, 1500], [])


def test_a_cycle_behind_which_a_call_is_missing_too() -> None:
    cross = [["coll", "x", *SUM], ["coll", "y", *SUM]]
    answer = matching(cross, cross[::-1], [["coll", "w", *SUM]], [["comp", 1]])
    assert answer == result([0, 0, 0, 1], [0, 1, 2], cycle=2, missing=1)


Key = tuple[Any, ...]


class Passing:
    """Programs by passing over all ranks until nothing changes: no queue, no order."""

    def __init__(self, comms: dict[str, list[int]], programs: list[list[Any]]) -> None:
        self.comms, self.programs = comms, programs
        self.posts: dict[Key, dict[Any, tuple[int, Any]]] = {}
        self.counts: dict[Key, int] = {}
        self.at, self.now = [0] * len(programs), [0] * len(programs)
        self.held: list[list[Key]] = [[] for _ in programs]
        while any([self.step(rank) for rank in range(len(programs))]):
            pass
        self.stuck = [rank for rank, program in enumerate(programs) if self.at[rank] < len(program)]

    def step(self, rank: int) -> bool:
        if self.at[rank] == len(self.programs[rank]):
            return False
        op = self.programs[rank][self.at[rank]]
        if op[0] == "comp":
            self.now[rank] += op[1]
        else:
            comes = not self.held[rank]
            if comes:
                self.held[rank] = [self.post(rank, call) for call in (op[1] if op[0] == "group" else [op])]
            ends = [self.end(key) for key in self.held[rank]]
            if None in ends:
                return comes
            self.now[rank] = max([self.now[rank], *(end for end in ends if end is not None)])
            self.held[rank] = []
        self.at[rank] += 1
        return True

    def post(self, rank: int, call: list[Any]) -> Key:
        kind, comm = call[0], call[1]
        me = self.comms[comm].index(rank)
        if kind == "coll":
            stem, member, said = ("C", comm), me, call[2:]
        else:
            ends = (me, call[2]) if kind == "send" else (call[2], me)
            stem, member, said = ("P", comm, *ends), kind, call[3]
        number = self.counts.get((stem, member), 0)
        self.counts[stem, member] = number + 1
        self.posts.setdefault((*stem, number), {})[member] = (self.now[rank], said)
        return (*stem, number)

    def end(self, key: Key) -> int | None:
        there = self.posts[key]
        if len(there) < (len(self.comms[key[1]]) if key[0] == "C" else 2):
            return None
        cost = 1000 if key[0] == "C" else 500 + there["send"][1] // 10
        return max(time for time, _ in there.values()) + cost

    def absent(self, key: Key) -> set[int]:
        members = self.comms[key[1]]
        wanted = dict(enumerate(members)) if key[0] == "C" else {"send": members[key[2]], "recv": members[key[3]]}
        return {rank for member, rank in wanted.items() if member not in self.posts[key]}

    def answer(self) -> dict[str, Any]:
        waited_for = {key for rank in self.stuck for key in self.held[rank] if self.end(key) is None}
        odd = (key for key, there in self.posts.items() if len({str(said) for _, said in there.values()}) > 1)
        return {
            "finish_ns": self.now,
            "stuck": self.stuck,
            "mismatches": [str(key) for key in sorted(odd)],
            "n_missing": sum(len(self.absent(key) - set(self.stuck)) for key in waited_for),
        }


@st.composite
def programs(draw: st.DrawFn) -> list[list[Any]]:
    """Steps of several ranks in a row, with mistakes."""
    ranks: list[list[Any]] = [[] for _ in range(4)]
    for _ in range(draw(st.integers(0, 8))):
        comm, members = draw(st.sampled_from(sorted(COMMS.items())))
        if draw(st.booleans()):
            for rank in members:
                ranks[rank].append(["coll", comm, "allreduce", draw(st.sampled_from([8] * 9 + [9])), "f32", "sum", -1])
        else:
            source, target = draw(st.permutations(range(len(members))))[:2]
            size = draw(st.sampled_from([100] * 9 + [200]))
            halves = [["send", comm, target, 100], ["recv", comm, target, 100]]
            others = [["recv", comm, source, size], ["send", comm, source, size]]
            both = draw(st.booleans())
            ranks[members[source]].append(["group", halves] if both else halves[0])
            ranks[members[target]].append(["group", others] if both else others[0])
        ranks[draw(st.integers(0, 3))].append(["comp", draw(st.integers(0, 3000))])
    for _ in range(draw(st.integers(0, 2))):
        program = draw(st.sampled_from(ranks))
        if program:
            op = program.pop(draw(st.integers(0, len(program) - 1)))
            if draw(st.booleans()):
                program.insert(draw(st.integers(0, len(program))), op)
    return ranks


COMMS = {"w": [0, 1, 2, 3], "x": [0, 1], "z": [3, 1, 2]}


@given(programs())
@settings(max_examples=400, deadline=None)
def test_matching_is_what_passing_over_all_ranks_gives(programs: list[list[Any]]) -> None:
    answer = completion(
        "matching", comms=COMMS, programs=programs, collective_cost_ns=1000, p2p_cost_ns="500+bytes//10, rendezvous"
    )
    cycle = answer.pop("cycle_length")
    assert answer == Passing(COMMS, programs).answer()
    assert bool(answer["stuck"]) == (cycle > 0 or answer["n_missing"] > 0)


JOB = {
    "comms": {"a": [0, 1], "ev": [0, 2]},
    "programs": [
        [["comp", 10], ["send", "ev", 1, 0], ["coll", "a", 7, 0, 0, 0, 0], ["recv", "ev", 1, 2], ["comp", 1]],
        [["comp", 20], ["coll", "a", 7, 0, 0, 0, 0]],
        [["recv", "ev", 0, 0], ["comp", 30], ["send", "ev", 0, 2]],
    ],
}


def test_a_job_by_hand() -> None:
    assert completion("job_explicit", **JOB) == [43, 27, 40]


def test_a_job_that_cannot_finish_says_who_waits_for_whom() -> None:
    comms, call = {"a": [0, 1], "b": [0, 1]}, [0, 0, 0, 0]
    programs = [[["coll", "a", 1, *call], ["coll", "b", 1, *call]], [["coll", "b", 1, *call], ["coll", "a", 1, *call]]]
    with pytest.raises(DeadlockError, match=r"rank 0 at op 0 waits on \('C', 'a', 0\) for rank 1 at op 0"):
        completion("job_explicit", comms=comms, programs=programs)
    with pytest.raises(DeadlockError, match=r"rank 1 ended without the call that \('C', 'a', 0\) waits for"):
        completion("job_explicit", comms=comms, programs=[programs[0], []])
    with pytest.raises(MismatchError, match=r"\('C', 'a', 0\): rank 1 calls 2 0 0 0 0, others 1 0 0 0 0"):
        completion("job_explicit", comms=comms, programs=[[["coll", "a", 1, *call]], [["coll", "a", 2, *call]]])


# Refusals.


def test_an_unknown_model_is_told_the_known_ones() -> None:
    with pytest.raises(ConfigError) as error:
        completion("ring_of_fire", arrival_ns=[0])
    assert all(name in str(error.value) for name in ["ring_of_fire", *models()])
    assert len(models()) == 14


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"n": 4}, "`arrival_ns` has 3 entries, expected 4"),
        ({"arrival_ns": []}, "`arrival_ns` has 0 entries"),
        ({"arrival_ns": [0, 0, 1 << 61]}, "`arrival_ns` of rank 2 is"),
        ({"arrival_ns": [0, 0, 1 << 70]}, "`arrival_ns` does not fit"),
        ({"arrival_ns": [0, 0.5, 0]}, "`arrival_ns` does not fit"),
        ({"arrival_ns": [0, float("nan"), 0]}, "ring_credits: inputs must be"),
        ({"arrival_ns": [0, None, 0]}, "`arrival_ns` does not fit"),
        ({"arrival_ns": object()}, "a object is none"),
        ({"messages_per_phase": [4, 4]}, "`occ_ns_per_phase_per_sender` has 1 entries, expected 2"),
        ({"messages_per_phase": [-1]}, "`messages_per_phase` is -1"),
        ({"messages_per_phase": [1 << 59]}, "times may exceed 2\\^60"),
        ({"occ_ns_per_phase_per_sender": [[10, -1, 10]]}, "`occ_ns_per_phase_per_sender` of rank 1 is -1"),
        ({"occ_ns_per_phase_per_sender": [[10, 1 << 58, 10]]}, "times may exceed 2\\^60"),
        ({"latency_ns_of_incoming_link": [5, 5]}, "`latency_ns_of_incoming_link` has 2 entries, expected 3"),
        ({"slices_per_step": 0}, "`slices_per_step` is 0"),
        ({"slices_per_step": True}, "`slices_per_step` does not fit"),
        ({"credits": -1}, "`credits` is -1"),
        ({"credits": 1, "credit_latency_ns": -3}, "`credit_latency_ns` is -3"),
        ({"credits": 1}, "`credits` does not fit: a ring whose connections hold 1 messages"),
        ({"credits": 5, "messages_per_phase": [1 << 40], "credit_latency_ns": 1000}, "too many to be evaluated"),
        ({"colour": "red"}, "`colour` is not an input of the model; its inputs are: arrival_ns, credit_latency_ns"),
        ({"note": 5}, "`note` must be text"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        completion("ring_credits", **{**RING, **changed})


@pytest.mark.parametrize("key", sorted(set(RING) - {"n", "credits", "credit_latency_ns"}))
def test_what_is_missing_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"`{key}` is missing"):
        completion("ring_two_level", **{name: value for name, value in RING.items() if name != key})


@pytest.mark.parametrize(
    ("model", "inputs", "what"),
    [
        (
            "ring_multi_channel",
            {"orders": [[0, 0]], "occ_ns": 1, "latency_ns": 1, "arrival_ns": [0, 0]},
            "rank 0 twice",
        ),
        (
            "ring_multi_channel",
            {"orders": [[0, 2]], "occ_ns": 1, "latency_ns": 1, "arrival_ns": [0, 0]},
            "names rank 2",
        ),
        (
            "hierarchical_allreduce",
            {
                "local": 3,
                "nodes": 1 << 62,
                "intra": {"occ_ns": 1, "lat_ns": 1},
                "inter": {"occ_ns": 1, "lat_ns": 1},
                "arrival_ns": [0, 0],
            },
            "expected `local` 3 times",
        ),
        (
            "double_tree_allreduce",
            {"chunks_per_tree": 0, "occ_ns": 1, "latency_ns": 1, "arrival_ns": [0]},
            "`chunks_per_tree` is 0",
        ),
        (
            "double_tree_allreduce",
            {"chunks_per_tree": 1, "occ_ns": 1, "latency_ns": 1, "arrival_ns": [0], "trees": "oak"},
            '`trees` is "oak"',
        ),
        (
            "alltoall_round_sync",
            {"cost_ns": 1, "rounds": 3, "arrival_ns": [0, 0]},
            "`rounds` is 3, more than the 2 ranks",
        ),
        ("alltoallv_port", {"cost_ns_src_dst": [[0, 1]], "arrival_ns": [0, 0]}, "`cost_ns_src_dst` has 1 entries"),
        ("alltoallv_port", {"cost_ns_src_dst": [[0, -1], [0, 0]], "arrival_ns": [0, 0]}, "of rank 1 is -1"),
        ("job_explicit", {"comms": {"a": [0, 9]}, "programs": [[]]}, '"a" has rank 9, which has no program'),
        ("job_explicit", {"comms": {"a": [0, 0]}, "programs": [[]]}, '"a" has rank 0 twice'),
        ("job_explicit", {"comms": {}, "programs": [[["comp", -1]]]}, "of rank 0, op 0: -1 is not a whole number"),
        ("job_explicit", {"comms": {}, "programs": [[["coll", "a", 1, 0, 0, 0, 0]]]}, 'communicator "a" is not in'),
        ("job_explicit", {"comms": {"a": []}, "programs": [[["coll", "a", 1, 0, 0, 0, 0]]]}, 'it is no member of "a"'),
        ("job_explicit", {"comms": {"a": [0]}, "programs": [[["send", "a", 1, 0]]]}, "peer 1 is not a group rank"),
        ("job_explicit", {"comms": {"a": [0]}, "programs": [[["fly"]]]}, '"fly" is not known'),
        ("job_explicit", {"comms": {}, "programs": [[["group", [["comp", 1]]]]]}, "cannot be in a group"),
        ("job_explicit", {"comms": {}, "programs": [[["comp", 1 << 60], ["comp", 1]]]}, "times that may exceed 2\\^60"),
        ("job_explicit", {"comms": {}, "programs": [], "tp": 0}, "`tp` is 0"),
        (
            "matching",
            {"comms": {}, "programs": [], "collective_cost_ns": 1, "p2p_cost_ns": "free"},
            '`p2p_cost_ns` is "free"',
        ),
    ],
)
def test_other_models_refuse_by_name_too(model: str, inputs: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        completion(model, **inputs)


@pytest.mark.parametrize(
    ("parent", "what"),
    [([1, 0], "not one tree"), ([-1, -1], "not one tree"), ([-1, 7], "of rank 1 is 7"), ([-2, 0], "of rank 0 is -2")],
)
def test_what_is_no_tree_is_refused(parent: list[int], what: str) -> None:
    tree = {"chunks": 1, "latency_ns_edge": [0, 0], "occ_ns_edge_to_parent_and_back": [0, 0], "arrival_ns": [0, 0]}
    with pytest.raises(ConfigError, match=what):
        completion("tree_allreduce", parent=parent, mode="split", **tree)
    with pytest.raises(ConfigError, match='`mode` is "sideways"'):
        completion("tree_allreduce", parent=[-1, 0], mode="sideways", **tree)
