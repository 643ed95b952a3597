"""Values of virtual members (tier T2): what ranks that do not run contribute to a call, by the user's rules.

A rule names calls by communicator, number and kind, and gives a value. Rules come from Python
(`Rules([Rule(...), ...])`), a Python file with a function `values(call)`, or a TOML file with tables `[[rule]]`:

    [[rule]]
    kind = "AllGather"      # or a list; as NCCL spells it, or Recv or Split; any if left out
    size = 64               # members of the communicator
    communicator = 0        # number among those the rank makes
    number = 3              # of the collective on its communicator, or of the message of the pair; or a list
    dtype = "Int64"
    value = [1, 2, 3]       # one number, a row, rows of all virtual members, "mirror", "shape", "rank" or "group_rank"

The first rule that is for a call and gives something counts. Without one, small payloads are mirrored (T1), others
stay as they are (T0).
"""

from __future__ import annotations

import json
import runpy
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError
from prism_core.settings import read_toml

KINDS = (
    "AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "Gather", "Scatter", "Recv", "Split",
)  # fmt: skip
#: How `struct` writes an element; bfloat16 and the 8-bit floats are written as their bits.
_FORMATS = {
    "Int8": "b", "Uint8": "B", "Int32": "i", "Uint32": "I", "Int64": "q", "Uint64": "Q", "Float16": "e", "Float32": "f",
    "Tf32": "f", "Float64": "d", "Bfloat16": "H", "Float8e4m3": "B", "Float8e5m2": "B",
}  # fmt: skip
_FROM_ROOT = ("Recv", "Broadcast", "Scatter")


@dataclass(frozen=True, slots=True)
class Call:
    """One call that virtual members take part in.

    Attributes:
        rank: The rank that asks. The answer may depend on it only where members get different data (ReduceScatter,
            AlltoAll, Scatter, Recv); else the answer to the first who asks is that of all.
        members: Ranks of the communicator in group-rank order.
        communicator: Number of the communicator among those the rank has made.
        number: Number of the collective on its communicator, or of the message of the pair.
        kind: As NCCL spells it (`AllReduce`), `Recv` or `Split`.
        dtype: Element type (`Float32`, `Bfloat16`, ...).
        reduce: `Sum`, `Prod`, `Max`, `Min`, `Avg` or `PreMulSum`; empty where nothing is reduced.
        root: Group rank of the root, or of who sends.
        group_rank: The asking rank's place among the members.
        count: Elements of one row.
        row_bytes: Bytes of one row: what a member contributes, or the part of it that is for the asking rank.
        virtual_ranks: Ranks whose rows are asked for, in group-rank order.
    """

    rank: int
    members: tuple[int, ...]
    communicator: int
    number: int
    kind: str
    dtype: str
    reduce: str
    root: int
    group_rank: int
    count: int
    row_bytes: int
    virtual_ranks: tuple[int, ...]


#: A value, or a function that gives one; see the module. `None` is no value: the next rule is asked.
Value = Any


@dataclass(frozen=True, slots=True)
class Rule:
    """Values for some calls; what is `None` is not looked at."""

    value: Value
    kind: str | Sequence[str] | None = None
    size: int | None = None
    communicator: int | None = None
    number: int | Sequence[int] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        kinds = [self.kind] if isinstance(self.kind, str) else self.kind or []
        for kind in kinds:
            if kind not in KINDS:
                raise ConfigError(f"a rule for {kind!r}: there are {', '.join(KINDS)}")
        if self.dtype is not None and self.dtype not in _FORMATS:
            raise ConfigError(f"a rule for elements of type {self.dtype!r}: there are {', '.join(_FORMATS)}")

    def is_for(self, call: Call) -> bool:
        """Tells whether the rule names this call."""
        return (
            _allows(self.kind, call.kind)
            and _allows(self.size, len(call.members))
            and _allows(self.communicator, call.communicator)
            and _allows(self.number, call.number)
            and _allows(self.dtype, call.dtype)
        )


def _allows(wanted: Any, actual: object) -> bool:
    if wanted is None or wanted == actual:
        return True
    return not isinstance(wanted, str) and isinstance(wanted, Sequence) and actual in wanted


class Rules:
    """Answers the engine with the first rule's value."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = list(rules)

    def __call__(self, text: str) -> str | bytes | None:
        """The answer for the call described by a JSON text: bytes of rows, `mirror`, `shape`, or `None` for no rule."""
        document = json.loads(text)
        call = Call(**{one.name: _hashable(document[one.name]) for one in fields(Call)})
        for rule in self._rules:
            if rule.is_for(call):
                answer = _answer(rule.value, call)
                if answer is not None:
                    return answer
        return None


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _answer(value: Value, call: Call) -> str | bytes | None:
    if callable(value):
        value = value(call)
    if value is None:
        return None
    if isinstance(value, str) and value == "rank":
        value = [rank for rank in call.virtual_ranks for _ in range(call.count)]
    elif isinstance(value, str) and value == "group_rank":
        place = {rank: at for at, rank in enumerate(call.members)}
        value = [place[rank] for rank in call.virtual_ranks for _ in range(call.count)]
    if isinstance(value, str):
        if value not in ("mirror", "shape"):
            raise ConfigError(f"a rule's value is {value!r}: a text must be mirror, shape, rank or group_rank")
        if value == "mirror" and call.kind in _FROM_ROOT:
            raise ConfigError(f"a rule mirrors {call.kind}: nobody who runs has what a virtual rank sends")
        return value
    return encode(value, call)


def encode(value: Any, call: Call) -> bytes:
    """The bytes of a value: raw bytes, a number for all elements, or a (nested) list or array of elements."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if hasattr(value, "tolist"):
        array_bytes = _bytes_of_array(value, call)
        if array_bytes is not None:
            return array_bytes
        value = value.tolist()
    elements = list(_flat(value))
    if len(elements) == 1:
        elements *= call.count
    convert = _bfloat16 if call.dtype == "Bfloat16" else _plain(call.dtype)
    try:
        return struct.pack(f"={len(elements)}{_FORMATS[call.dtype]}", *map(convert, elements))
    except (struct.error, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"a rule's value does not fit {call.dtype} of {call.kind} {call.number}: {error}") from error


def _bytes_of_array(array: Any, call: Call) -> bytes | None:
    """An array whose elements are stored as NCCL stores them."""
    name = {"Bfloat16": "uint16", "Float8e4m3": "uint8", "Float8e5m2": "uint8", "Tf32": "float32"}.get(
        call.dtype, call.dtype.lower()
    )
    if str(getattr(array, "dtype", "")) != name or getattr(array, "size", 0) == 1:
        return None
    return bytes(array.tobytes())


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def _plain(dtype: str) -> Callable[[Any], Any]:
    """Numbers as `struct` wants them; the 8-bit floats only as their codes."""
    return float if _FORMATS[dtype] in "efd" else int


def _bfloat16(value: Any) -> int:
    """The bits of the nearest bfloat16, ties to even."""
    bits: int = struct.unpack("=I", struct.pack("=f", float(value)))[0]
    if bits & 0x7FFFFFFF > 0x7F800000:
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def load_rules(rules: Rules | object | None) -> Rules | None:
    """Reads a TOML or Python file of rules; `None` where there is none for members.

    Other tables of a TOML file are those of `prism_core.rules.values`.
    """
    if isinstance(rules, Rules):
        return rules
    if not isinstance(rules, Path):
        return None
    try:
        if rules.suffix == ".py":
            values = runpy.run_path(str(rules)).get("values")
            if not callable(values):
                raise ConfigError(f"{rules} has no function `values(call)`")
            return Rules([Rule(values)])
    except OSError as error:
        raise ConfigError(f"cannot read the rules {rules}: {error.strerror}") from error
    document = read_toml(rules, "the rules")
    tables = document.get("rule")
    if tables is None:
        return None
    if not isinstance(tables, list):
        raise ConfigError(f"the rules {rules}: rules for members are written [[rule]]")
    return Rules([_rule_of(table, rules) for table in tables])


def _rule_of(table: Any, source: Path) -> Rule:
    known = {one.name for one in fields(Rule)}
    unknown = sorted(set(table) - known) if isinstance(table, dict) else ["(no table)"]
    if unknown:
        raise ConfigError(f"{source}: a rule has {', '.join(unknown)}: known are {', '.join(sorted(known))}")
    if "value" not in table:
        raise ConfigError(f"{source}: a rule has no value")
    return Rule(**table)
