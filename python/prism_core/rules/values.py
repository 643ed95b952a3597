"""Rules for values on the emulated device, where kernels are not run: a TOML file, or these classes.

[[read]]                        # values that the host reads; the first that fits applies
place = "*/train.py:88"         # file:line of the Python code that reads, * for any text
writer = "*reduce_kernel*"      # the kernel that would have written the value
name = "loss"                   # how reports call the rule
type = "float32"                # float32, float64, int32, int64, uint8 or bool
values = [2.5, 2.4, 2.3]        # one for each reading in turn, the last for all further ones
# or, in place of the last three:
policy = "allow"                # stale bytes will do; "stop": end the run, as --strict-values does everywhere

[loss_scale]
overflows = [3, 100]            # updates of the loss scale, from 0, before which gradients overflow

[routing]                       # router logits of mixture-of-experts layers
kind = "zipf"                   # balanced (default), zipf, recorded or off
exponent = 1.2                  # zipf: popularity of the n-th expert is n ** -exponent
seed = 0
counts = [[5, 3], [4, 4]]       # recorded: tokens per expert, a row for each layer in turn
targets = ["my_model:Router.gate"]  # modules or methods that return logits, besides those of known frameworks

[plane]
enabled = true                  # run small operators on the CPU
max_bytes = 1048576             # up to this size of a tensor

[python]
files = ["my_rules.py"]         # each defines `install(rules)`, run inside the program
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from prism_core.errors import ConfigError
from prism_core.settings import read_toml

Policy = Literal["allow", "stop", "value"]
NumberType = Literal["float32", "float64", "int32", "int64", "uint8", "bool"]
RoutingKind = Literal["balanced", "zipf", "recorded", "off"]
_MOST_PLANE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What the host finds where it reads a value that is not known."""

    place: str = "*"
    writer: str = "*"
    policy: Policy = "value"
    name: str = ""
    type: NumberType = "float32"
    values: Sequence[float] = ()

    def __post_init__(self) -> None:
        _check_one_of("policy", self.policy, Policy)
        _check_one_of("type", self.type, NumberType)
        _check_texts(self.place, self.writer, self.name)
        if (self.policy == "value") != bool(self.values):
            raise ConfigError('a [[read]] rule has either `values` or `policy = "allow"` or `"stop"`')
        if self.policy == "value" and not self.name:
            raise ConfigError("a [[read]] rule with values has a `name`, for the report")
        for value in self.values:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"a [[read]] rule's values are numbers, not {value!r}")

    def line(self) -> str:
        """The rule as the preloaded library reads it."""
        parts = [self.policy, self.writer, self.place]
        if self.policy == "value":
            parts += [self.name, self.type, ",".join(repr(float(value)) for value in self.values)]
        return "\t".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """When gradients overflow; in a healthy run they do not."""

    overflows: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not all(isinstance(update, int) and update >= 0 for update in self.overflows):
            raise ConfigError("[loss_scale] overflows are numbers of updates from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which experts tokens go to."""

    kind: RoutingKind = "balanced"
    exponent: float = 1.0
    seed: int = 0
    counts: Sequence[Sequence[int]] = ()
    targets: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check_one_of("kind", self.kind, RoutingKind)
        if (self.kind == "recorded") != bool(self.counts):
            raise ConfigError('[routing] has `counts` if, and only if, it is of kind "recorded"')
        if any(count < 0 for row in self.counts for count in row) or any(sum(row) == 0 for row in self.counts):
            raise ConfigError("[routing] counts are tokens per expert: not negative, and not all zero")
        if not 0 <= self.exponent <= 100:
            raise ConfigError(f"[routing] exponent {self.exponent} is not between 0 and 100")
        for target in self.targets:
            module, _, attribute = target.partition(":")
            if not module or attribute.count(".") != 1:
                raise ConfigError(f"[routing] target '{target}' is not of the form module:Class.method")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRules:
    """All rules of a run. The defaults are those of a run without a file of rules."""

    reads: Sequence[Read] = ()
    loss_scale: LossScale = field(default_factory=LossScale)
    routing: Routing = field(default_factory=Routing)
    plane_enabled: bool = True
    plane_max_bytes: int = 1 << 20
    python_files: Sequence[Path] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.plane_max_bytes <= _MOST_PLANE_BYTES:
            raise ConfigError(f"[plane] max_bytes {self.plane_max_bytes} is not between 0 and {_MOST_PLANE_BYTES}")
        for path in self.python_files:
            if not path.is_file():
                raise ConfigError(f"the file of rules {path} does not exist")

    def read_lines(self) -> str:
        """The rules for reads as the preloaded library takes them."""
        return "".join(read.line() + "\n" for read in self.reads)

    def for_program(self) -> str:
        """The other rules as the part of the hook that runs in the program takes them (JSON)."""
        return json.dumps(
            {
                "overflows": list(self.loss_scale.overflows),
                "routing": asdict(self.routing),
                "plane": {"enabled": self.plane_enabled, "max_bytes": self.plane_max_bytes},
                "python": [str(path.resolve()) for path in self.python_files],
            }
        )


def _check_one_of(what: str, value: object, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ConfigError(f"{what} {value!r} is not one of {', '.join(get_args(allowed))}")


def _check_texts(*texts: str) -> None:
    for text in texts:
        if not isinstance(text, str) or "\t" in text or "\n" in text:
            raise ConfigError(f"{text!r} in a [[read]] rule is not a text of one line")


def load_value_rules(rules: ValueRules | object | None) -> ValueRules:
    """Reads a TOML file of rules; without one, the defaults."""
    if isinstance(rules, ValueRules):
        return rules
    if not isinstance(rules, Path) or rules.suffix == ".py":
        return ValueRules()
    document = read_toml(rules, "the rules")
    try:
        return _parse(document, rules.parent)
    except ConfigError as error:
        raise ConfigError(f"{rules}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{rules}: a value is of the wrong type: {error}") from error


def _parse(document: dict[str, Any], folder: Path) -> ValueRules:
    tables = {name: document.pop(name, {}) for name in ("loss_scale", "routing", "plane", "python")}
    reads = document.pop("read", [])
    document.pop("rule", None)  # those for members
    if document:
        raise ConfigError(f"unknown tables: {', '.join(sorted(document))}")
    if not isinstance(reads, list):
        raise ConfigError("rules for reads are written [[read]]")
    plane = _table("plane", tables["plane"], ("enabled", "max_bytes"))
    python = _table("python", tables["python"], ("files",))
    return ValueRules(
        reads=[Read(**_table("read", read, _names(Read))) for read in reads],
        loss_scale=LossScale(**_table("loss_scale", tables["loss_scale"], _names(LossScale))),
        routing=Routing(**_table("routing", tables["routing"], _names(Routing))),
        plane_enabled=plane.get("enabled", True),
        plane_max_bytes=plane.get("max_bytes", 1 << 20),
        python_files=[folder / name for name in python.get("files", [])],
    )


def _names(kind: type[Read | LossScale | Routing]) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


def _table(name: str, table: Any, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is not a table")
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise ConfigError(f"[{name}] has {', '.join(unknown)}: known are {', '.join(known)}")
    return table
