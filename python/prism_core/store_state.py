"""What the rendezvous store holds, and the rules for what absent ranks would have put into it. No sockets here."""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Protocol

from prism_core.published import KEY_PREFIX, PublishedValues, ValueKey

_NCCL_ID_KEY = re.compile(rb"(?:^|//)cuda//(?:\d+|\d+:\d+|UniqueNCCLID:\d+)$|(?:^|/)UniqueNCCLID:\d+$")
#: Keys the last rank to arrive at a barrier sets, with the value it would set.
_BARRIER_KEYS = (
    (re.compile(rb"store_based_barrier_key:.*:last_worker$"), b"1"),
    (re.compile(rb"(?:^|/)last_member$"), b"<val_ignored>"),
)


class KeyAuthority(Protocol):
    """The part of a session the store needs."""

    def store_set(self, key: bytes, value: bytes) -> bytes:
        """Sees every value set and says which value to keep."""
        ...

    def absent_value(self, key: bytes) -> bytes | None:
        """Gives the value of a key that only an absent rank would set."""
        ...


def key_name(key: bytes) -> bytes:
    """The key as the program names it: clients put a slash in front."""
    return key.removeprefix(b"/")


def is_nccl_id_key(name: bytes) -> bool:
    """Tells whether one rank publishes an NCCL unique id under this key."""
    return _NCCL_ID_KEY.search(name) is not None


class StoreState:
    """Keys and values, and the rules for what absent ranks would have set.

    Args:
        authority: Gives and replaces NCCL unique ids (a session).
        world_size: Ranks of the target job.
        num_live: How many of them run.
        published: What running ranks set with plain SETs; shared between the stores of ranks that run apart.
        told: Values that ranks told others; shared likewise.
    """

    def __init__(
        self,
        authority: KeyAuthority,
        world_size: int,
        num_live: int,
        published: dict[bytes, bytes] | None = None,
        told: PublishedValues | None = None,
    ) -> None:
        self._authority = authority
        self.world_size = world_size
        #: Are there ranks to answer for?
        self.has_absent = num_live < world_size
        self._num_live = num_live
        self.values: dict[bytes, bytes] = {}
        self._published = {} if published is None else published
        self._told = PublishedValues() if told is None else told
        self.queues: dict[bytes, deque[bytes]] = {}
        #: What was set for others to see: values told, and plain SETs.
        self.said: dict[bytes, bytes] = {}
        self.rules_used: Counter[tuple[str, str]] = Counter()
        self._counters: dict[bytes, bool] = {}

    def _used(self, rule: str, key: bytes) -> None:
        self.rules_used[rule, key_name(key).decode(errors="replace")] += 1

    def set(self, key: bytes, value: bytes) -> None:
        """A running rank sets a key."""
        told = ValueKey.parse(key_name(key))
        if told is not None:
            self._told.put(told, value)
            self.said[key] = value
            return
        self.values[key] = self._authority.store_set(key_name(key), value)
        if not is_nccl_id_key(key_name(key)):
            self._published[key] = value
            self.said[key] = value

    def lookup(self, key: bytes) -> bytes | None:
        """The value of `key`, made up by rule if only absent ranks would have set it."""
        told = ValueKey.parse(key_name(key))
        if told is not None:
            return self._told_value(told)
        if key not in self.values:
            made_up = self._published.get(key) or self._absent_value(key)
            if made_up is None:
                return None
            self.values[key] = made_up
        return self.values[key]

    def _told_value(self, key: ValueKey) -> bytes | None:
        value, stand_in = self._told.look_up(key)
        if stand_in is not None:
            series = key.exact.rpartition("/")[0].partition("/")[2]
            self.rules_used[f"value of rank {stand_in} for that of rank {key.source}", series] += 1
        return value

    def _absent_value(self, key: bytes) -> bytes | None:
        if is_nccl_id_key(key_name(key)):
            return self._authority.absent_value(key_name(key))
        if self.has_absent:
            for pattern, value in _BARRIER_KEYS:
                if pattern.search(key):
                    self._used("barrier", key)
                    return value
        return None

    def is_published(self, key: bytes) -> bool:
        """Tells whether some running rank has set the key, in this store or another one of the job."""
        if key_name(key).startswith(KEY_PREFIX):
            return self.lookup(key) is not None
        return key in self._published

    def is_available(self, key: bytes) -> bool:
        """Tells whether a wait for the key is over."""
        return bool(self.queues.get(key)) or self.lookup(key) is not None

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Sets the key if it has the expected value (or none and none is expected); returns what it has then."""
        current = self.values.get(key)
        if current is None:
            if expected:
                return expected
            self.set(key, desired)
        elif current == expected:
            self.set(key, desired)
        return self.values[key]

    def add(self, key: bytes, amount: int) -> int:
        """Adds to a counter and returns it."""
        total = amount + int(self.values.get(key, b"0"))
        self.values[key] = str(total).encode()
        counts_arrivals = amount in (0, 1) and self._counters.get(key, True)
        self._counters[key] = counts_arrivals
        return total

    def delete(self, key: bytes) -> bool:
        """Forgets a key, for other ranks as well; tells whether there was one."""
        self._published.pop(key, None)
        self.said.pop(key, None)
        return self.values.pop(key, None) is not None

    def append(self, key: bytes, value: bytes) -> None:
        """Puts the value behind the one that is there."""
        self.values[key] = self.values.get(key, b"") + value

    def arrive(self, key: bytes, group_size: int) -> bool:
        """Counts one more rank at a barrier; tells whether it is complete."""
        count = self.add(key, 1)
        if count < group_size and self.has_absent:
            self._used("barrier", key)
            return True
        return count >= group_size

    def is_arrival_counter(self, key: bytes) -> bool:
        """Tells whether each running rank added at most one, so that absent ranks are what is missing."""
        count = self.values.get(key, b"")
        return self.has_absent and self._counters.get(key, False) and 0 < int(count) <= self._num_live

    def complete_counter(self, key: bytes) -> int:
        """The count a poller of this counter waits for: the absent ranks have arrived too."""
        self._used("polled counter", key)
        self.values[key] = str(self.world_size).encode()
        return self.world_size
