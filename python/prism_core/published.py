"""Values that running ranks have told for others: flags, sizes and pickled objects that steer a program.

A value belongs to a source, a group and a number; `prism_core.torch.control` asks for it in the program. If its source
does not run, the value of a source with the same place in a group made at the same point of the program stands for it.
"""

from __future__ import annotations

import base64
import json
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prism_core.errors import GraphFormatError

#: How keys of values begin in the store (`prism_core.torch.control`).
KEY_PREFIX = b"prism/value/"
#: All values of a job together.
MAX_TOTAL_BYTES = 1 << 26
#: The graph's meta entry that holds them.
META = "published"


@dataclass(frozen=True, slots=True)
class ValueKey:
    """What a value is called.

    Attributes:
        requester: Who asks or tells.
        source: Whose value it is.
        exact: Group, kind and number among the values of this kind and source.
        role: Place of the source in the group, and of the group among those of the source.
    """

    requester: int
    source: int
    exact: str
    role: str

    @classmethod
    def parse(cls, name: bytes) -> ValueKey | None:
        """Reads the store's key `prism/value/REQUESTER/SOURCE/GROUP/KIND/NUMBER/ROLE`; `None` if it is none."""
        parts = name.removeprefix(KEY_PREFIX).decode(errors="replace").split("/")
        if not name.startswith(KEY_PREFIX) or len(parts) != 6 or not (parts[0].isdigit() and parts[1].isdigit()):
            return None
        requester, source, group, kind, number, role = parts
        return cls(int(requester), int(source), f"{source}/{group}/{kind}/{number}", f"{role}/{number}")


class PublishedValues:
    """All values of a job so far, and who may still tell one. Used by the stores of all ranks that run.

    Args:
        summon: Starts a rank that was not to run, for what it tells; `False` if that cannot be done.
    """

    def __init__(self, summon: Callable[[int], bool] | None = None) -> None:
        self._lock = threading.Lock()
        self._exact: dict[str, bytes] = {}
        #: By place: the lowest source that told one, and its value.
        self._roles: dict[str, tuple[int, bytes]] = {}
        self._running: set[int] = set()
        self._waiting: dict[int, ValueKey] = {}
        self._bytes = 0
        self._summon = summon
        #: Values that nobody told, by what they are called.
        self.missing: dict[str, str] = {}

    def expect(self, ranks: Iterable[int]) -> None:
        """These ranks run, or will."""
        with self._lock:
            self._running.update(ranks)

    def ended(self, rank: int) -> None:
        """A rank will tell nothing more."""
        with self._lock:
            self._running.discard(rank)
            self._waiting.pop(rank, None)

    @property
    def num_waiting(self) -> int:
        """How many ranks wait for a value of another."""
        return len(self._waiting)

    def put(self, key: ValueKey, value: bytes) -> None:
        """A rank tells a value."""
        with self._lock:
            if self._bytes + len(value) > MAX_TOTAL_BYTES:
                self._exact[key.exact] = b"Ethe values that ranks told each other are more than can be kept"
                return
            self._bytes += len(value)
            self._exact[key.exact] = value
            known = self._roles.get(key.role)
            if known is None or key.source < known[0]:
                self._roles[key.role] = (key.source, value)

    def look_up(self, key: ValueKey) -> tuple[bytes | None, int | None]:
        """The value and the rank that stands for its source, if another does; no value as long as it may come."""
        with self._lock:
            answer = self._find(key)
            if answer[0] is None:
                self._waiting[key.requester] = key
            else:
                self._waiting.pop(key.requester, None)
            return answer

    def _find(self, key: ValueKey) -> tuple[bytes | None, int | None]:
        if key.exact in self._exact:
            return self._exact[key.exact], None
        if key.source in self._running:
            return None, None
        if key.role in self._roles:
            source, value = self._roles[key.role]
            return value, source
        others = self._running - {key.requester}
        if any(not self._is_stuck(rank) for rank in others):
            return None, None
        if self._summon is not None and self._summon(key.source):
            self._running.add(key.source)
            return None, None
        text = f"rank {key.source} did not run, and no rank in its place did: add it to the ranks to run"
        self.missing[key.exact] = text
        return b"E" + text.encode(), None

    def _is_stuck(self, rank: int) -> bool:
        """Tells whether the rank waits for one that does not run."""
        seen: set[int] = set()
        while rank in self._waiting and rank not in seen:
            seen.add(rank)
            rank = self._waiting[rank].source
        return rank in seen or rank not in self._running

    def to_meta(self) -> str:
        """For the graph: a first line for people, then the values."""
        with self._lock:
            exact = {key: value for key, value in sorted(self._exact.items()) if value.startswith(b"V")}
            roles = {key: pair for key, pair in sorted(self._roles.items()) if pair[1].startswith(b"V")}
        # Most values are told many times over: each is kept once.
        distinct = sorted({*exact.values(), *(value for _, value in roles.values())})
        number = {value: index for index, value in enumerate(distinct)}
        document = {
            "values": [base64.b64encode(value).decode() for value in distinct],
            "exact": {key: number[value] for key, value in exact.items()},
            "roles": {key: [source, number[value]] for key, (source, value) in roles.items()},
        }
        packed = base64.b64encode(zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 6)).decode()
        return f"{len(exact)} values that ranks told others\n{packed}"

    @classmethod
    def from_meta(cls, text: str) -> PublishedValues:
        """What `to_meta` wrote; nothing if the graph has no such entry.

        Raises:
            GraphFormatError: The entry is damaged.
        """
        known = cls()
        _, _, packed = text.partition("\n")
        if not packed:
            return known
        try:
            plain = zlib.decompressobj().decompress(base64.b64decode(packed, validate=True), 4 * MAX_TOTAL_BYTES)
            document = json.loads(plain)
            values = [base64.b64decode(value, validate=True) for value in document["values"]]
            known._exact = {str(key): values[index] for key, index in document["exact"].items()}
            known._roles = {str(key): (int(rank), values[index]) for key, (rank, index) in document["roles"].items()}
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, zlib.error) as error:
            raise GraphFormatError(f"the graph's entry '{META}' is damaged: {error}") from error
        return known
