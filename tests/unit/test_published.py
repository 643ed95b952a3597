"""Values that ranks tell each other, when most of them do not run."""

from __future__ import annotations

import pytest
from prism_core.errors import GraphFormatError
from prism_core.published import KEY_PREFIX, PublishedValues, ValueKey
from prism_core.store_state import StoreState
from test_store import FakeAuthority


def key(requester: int, source: int, number: int = 0, role: str = "broadcast:1:8:0") -> ValueKey:
    name = f"{source}/3/broadcast/{number}/{role}"
    parsed = ValueKey.parse(KEY_PREFIX + f"{requester}/{name}".encode())
    assert parsed is not None
    return parsed


def test_a_value_comes_from_its_source() -> None:
    told = PublishedValues()
    told.expect([0, 5])
    assert told.look_up(key(5, 0)) == (None, None), "rank 0 may still tell it"
    assert told.num_waiting == 1
    told.put(key(0, 0), b"Vtrain")
    assert told.look_up(key(5, 0)) == (b"Vtrain", None)
    assert told.num_waiting == 0


def test_a_source_in_the_same_place_stands_for_one_that_does_not_run() -> None:
    told = PublishedValues()
    told.expect([0, 4321])
    assert told.look_up(key(4321, 4320)) == (None, None)
    told.put(key(8, 8), b"Veight")
    told.put(key(0, 0), b"Vzero")
    assert told.look_up(key(4321, 4320)) == (b"Vzero", 0), "the lowest, whoever came first"
    assert told.look_up(key(4321, 4320, number=1)) == (None, None), "another value"


def test_a_value_that_nobody_will_tell_is_an_error_that_names_the_rank() -> None:
    told = PublishedValues()
    told.expect([5, 6])
    assert told.look_up(key(5, 0)) == (None, None)
    told.ended(6)
    value, _ = told.look_up(key(5, 0))
    assert value is not None and value.startswith(b"Erank 0 did not run") and b"add it" in value
    assert list(told.missing.values()) == [value[1:].decode()]


def test_ranks_that_wait_for_each_other_s_stand_ins_do_not_wait_for_ever() -> None:
    told = PublishedValues()
    told.expect([5, 6])
    assert told.look_up(key(5, 0)) == (None, None)
    value, _ = told.look_up(key(6, 1, role="broadcast:2:4:0"))
    assert value is not None and value.startswith(b"Erank 1 did not run")


def test_a_missing_source_is_run_if_it_can_be() -> None:
    asked: list[int] = []

    def summon(rank: int) -> bool:
        asked.append(rank)
        return rank == 3

    told = PublishedValues(summon)
    told.expect([4])
    assert told.look_up(key(4, 3)) == (None, None)
    assert told.look_up(key(4, 3)) == (None, None) and asked == [3], "it is expected from now on"
    told.put(key(3, 3), b"Vshape")
    assert told.look_up(key(4, 3)) == (b"Vshape", None)
    value, _ = told.look_up(key(4, 2, role="send:0:8:2:3"))
    assert value is None, "rank 3 still runs"
    told.ended(3)
    value, _ = told.look_up(key(4, 2, role="send:0:8:2:3"))
    assert value is not None and value.startswith(b"Erank 2")


def test_values_go_into_the_graph_and_come_back() -> None:
    told = PublishedValues()
    for number in range(50):
        told.put(key(0, 0, number), b"V" + bytes([number % 3]) * 100)
    told.put(key(1, 1), b"Etoo large")
    text = told.to_meta()
    assert text.startswith("50 values that ranks told others\n") and len(text) < 1500, "each kept once"
    again = PublishedValues.from_meta(text)
    again.expect([9])
    assert again.look_up(key(9, 0, 4)) == (b"V" + b"\1" * 100, None)
    assert again.look_up(key(9, 8, 5)) == (b"V" + b"\2" * 100, 0)
    assert again.look_up(key(9, 1))[0] == b"V" + b"\0" * 100, "an error is not kept, so a stand-in is found"


@pytest.mark.parametrize("text", ["3 values\n!!", "3 values\neJw=", "x\neJyrVipLLVKyqlZKrSgpUbJSUqoFACgBBHc="])
def test_a_damaged_entry_is_an_error(text: str) -> None:
    with pytest.raises(GraphFormatError, match="entry 'published' is damaged"):
        PublishedValues.from_meta(text)


def test_a_graph_without_the_entry_has_no_values() -> None:
    assert PublishedValues.from_meta("").look_up(key(5, 0))[0] is not None


def test_the_store_says_which_rank_stood_for_which() -> None:
    told = PublishedValues()
    told.put(key(0, 0), b"Vzero")
    state = StoreState(FakeAuthority(), 16, 1, told=told)
    name = KEY_PREFIX + b"9/8/3/broadcast/0/broadcast:1:8:0"
    assert state.lookup(b"/" + name) == b"Vzero"
    assert state.rules_used == {("value of rank 0 for that of rank 8", "3/broadcast"): 1}
    state.set(KEY_PREFIX + b"2/2/3/broadcast/0/broadcast:1:8:1", b"Vtwo")
    assert state.lookup(KEY_PREFIX + b"9/2/3/broadcast/0/broadcast:1:8:1") == b"Vtwo"


@pytest.mark.parametrize("name", [b"prism/value/", b"prism/value/x/0/3/b/0/r", b"prism/value/1/0/3/b/0", b"other"])
def test_other_keys_are_not_values(name: bytes) -> None:
    assert ValueKey.parse(name) is None
