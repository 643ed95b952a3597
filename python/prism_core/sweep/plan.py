"""What a sweep file asks for: its values, and every configuration that comes of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prism_core.errors import ConfigError
from prism_core.settings import apply_settings, read_toml
from prism_core.sweep.expression import Value, evaluate

#: Configurations at most: a product of axes grows fast.
MAX_CONFIGURATIONS = 100_000

_TABLES = {"sweep", "axes", "derived", "config", "collect", "replay", "layout"}
_SOURCES = ("command", "graph", "layout")
_SWEEP = {*_SOURCES, "require", "samples", "card", "keep_graphs"}
_COLLECT = {
    "world_size", "device", "ranks", "verify", "seed", "jobs", "host_time", "kernels", "rules", "strict_values",
}  # fmt: skip
_REPLAY = {"slow", "perturb", "nccl", "tuning", "contention", "overlap", "messages", "profile"}
_NAME = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Configuration:
    """One thing to try."""

    #: What the axes and derived values are here.
    values: Mapping[str, Value]
    #: The training program; nothing if a graph is given.
    command: Sequence[str]
    #: Options of `prism collect`.
    collect: Mapping[str, Any]
    #: Options of `prism_core.replay`, and `profile`.
    replay: Mapping[str, Any]
    graph: str | None = None
    #: A layout file without a program (`prism estimate`), and what differs in its table `[layout]`.
    layout: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    #: Samples (or tokens) of an iteration, if the file says so.
    samples: float | None = None
    card: str | None = None
    #: Folder in which collected graphs are kept, by the configuration's key.
    keep_graphs: str | None = None

    def document(self) -> dict[str, Any]:
        """All that the result depends on, but for the files it names."""
        found = {
            "values": dict(self.values), "command": list(self.command), "collect": dict(self.collect),
            "replay": dict(self.replay), "graph": self.graph, "samples": self.samples, "card": self.card,
        }  # fmt: skip
        return found if self.layout is None else found | {"layout": self.layout, "changes": dict(self.changes)}

    def key(self, folder: Path) -> str:
        """A name of the configuration and of the contents of the files it names."""
        digest = hashlib.sha256(json.dumps(self.document(), sort_keys=True).encode())
        for path in sorted(self._files(folder)):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:16]

    def _files(self, folder: Path) -> Iterator[Path]:
        named = [self.graph, self.layout, *(self.replay.get(name) for name in ("perturb", "overlap", "profile"))]
        named += [*self.command, self.collect.get("rules"), *self.collect.get("kernels", ())]
        for text in named:
            if isinstance(text, str) and "\n" not in text and (folder / text).is_file():
                yield folder / text

    def name(self) -> str:
        """The values in a line."""
        return " ".join(f"{name}={value}" for name, value in self.values.items()) or "as it is"


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A sweep file, read."""

    folder: Path
    configurations: Sequence[Configuration]
    #: Combinations left out by `require`.
    left_out: int
    axes: Sequence[str] = field(default_factory=list)


def read_plan(path: Path, settings: Sequence[str] = ()) -> SweepPlan:
    """Reads a sweep file.

    Args:
        path: The TOML file (docs/sweep.md).
        settings: `key=value` items that change it, as `--set` takes them.

    Raises:
        ConfigError: The file cannot be read, or says something that cannot be.
    """
    return plan_of(apply_settings(read_toml(path), settings), path.parent)


def plan_of(document: Mapping[str, Any], folder: Path) -> SweepPlan:
    """As `read_plan`, from the file's contents; paths in it are relative to `folder`."""
    _known(document, _TABLES, "the sweep file")
    sweep = _table(document, "sweep")
    _known(sweep, _SWEEP, "[sweep]")
    _known(_table(document, "collect"), _COLLECT, "[collect]")
    _known(_table(document, "replay"), _REPLAY, "[replay]")
    _check_source(document, sweep)
    wanted = [_derived(values, document) for values in _combinations(document)]
    require = _texts(sweep.get("require", []), "sweep.require")
    kept = [values for values in wanted if all(evaluate(text, values, "sweep.require") for text in require)]
    if not kept:
        raise ConfigError(f"no configuration is left: sweep.require leaves out all {len(wanted)}")
    configurations = [_configuration(values, document) for values in kept]
    axes = list(dict.fromkeys(name for configuration in configurations for name in configuration.values))
    return SweepPlan(folder, configurations, len(wanted) - len(kept), axes)


def _check_source(document: Mapping[str, Any], sweep: Mapping[str, Any]) -> None:
    """Raises ConfigError unless there is one thing to vary, and only what goes with it."""
    sources = [name for name in _SOURCES if name in sweep]
    if len(sources) != 1:
        raise ConfigError(
            "[sweep] must have one of command (a program), graph (a collected job) and layout (for prism estimate)"
        )
    source = sources[0]
    if source == "command" and "world_size" not in _table(document, "collect"):
        raise ConfigError("[collect] must have world_size: how many ranks the job has")
    if source != "command" and "keep_graphs" in sweep:
        raise ConfigError("[sweep] has keep_graphs: that is for programs, whose graphs are collected")
    if source != "command" and document.get("collect"):
        raise ConfigError(f"[collect] is for programs: with {source} nothing is collected")
    if source != "layout" and "layout" in document:
        raise ConfigError(f"[layout] changes a layout file: there is none with {source}")
    if source == "layout" and (others := _table(document, "replay").keys() - {"profile"}):
        raise ConfigError(f"[replay] has {sorted(others)[0]}: with layout it can have profile alone")


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} must be a table: [{name}]")
    return table


def _known(table: Mapping[str, Any], names: set[str], where: str) -> None:
    for name in table:
        if name not in names:
            raise ConfigError(f"{where} has {name!r}: it can have {', '.join(sorted(names))}")


def _texts(value: Any, field: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{field} must be a text or a list of texts")
    return texts


def _values(table: Mapping[str, Any], where: str) -> dict[str, Value]:
    for name, value in table.items():
        if not isinstance(value, (str, int, float)):
            raise ConfigError(f"{where}.{name} is {value!r}: it must be a number, a text or a truth value")
    return dict(table)


def _combinations(document: Mapping[str, Any]) -> list[dict[str, Value]]:
    """The product of the axes, and the configurations that are written out."""
    axes, explicit = _table(document, "axes"), document.get("config", [])
    if not isinstance(explicit, list) or not all(isinstance(one, dict) for one in explicit):
        raise ConfigError("config must be a list of tables: [[config]]")
    count = 1
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"axes.{name} is {values!r}: it must be a list of values to try")
        count *= len(values)
    if count > MAX_CONFIGURATIONS:
        raise ConfigError(f"the axes make {count:,} configurations: at most {MAX_CONFIGURATIONS:,}")
    found = [_values(dict(zip(axes, each, strict=True)), "axes") for each in itertools.product(*axes.values())]
    if explicit and not axes:
        found = []
    return found + [_values(one, "config") for one in explicit]


def _derived(values: dict[str, Value], document: Mapping[str, Any]) -> dict[str, Value]:
    found = dict(values)
    for name, text in _table(document, "derived").items():
        if name in found:
            raise ConfigError(f"derived.{name} is also an axis")
        found[name] = evaluate(text, found, f"derived.{name}") if isinstance(text, str) else text
    return _values(found, "derived")


def _configuration(values: dict[str, Value], document: Mapping[str, Any]) -> Configuration:
    sweep = _table(document, "sweep")
    command = sweep.get("command", [])
    samples = sweep.get("samples")
    count = evaluate(samples, values, "sweep.samples") if isinstance(samples, str) else samples
    if count is not None and (not isinstance(count, (int, float)) or not 0 < count < float("inf")):
        raise ConfigError(f"sweep.samples is {count!r}: it must be a number above 0")
    return Configuration(
        values=values,
        command=_command(command, values),
        collect=_filled(_table(document, "collect"), values, "collect"),
        replay=_filled(_table(document, "replay"), values, "replay"),
        graph=_filled(sweep.get("graph"), values, "sweep.graph"),
        layout=_filled(sweep.get("layout"), values, "sweep.layout"),
        changes=_filled(_table(document, "layout"), values, "layout"),
        samples=count,
        card=_filled(sweep.get("card"), values, "sweep.card"),
        keep_graphs=_filled(sweep.get("keep_graphs"), values, "sweep.keep_graphs"),
    )


def _command(command: Any, values: Mapping[str, Value]) -> list[str]:
    """The words of the program. In a text, `{name}` alone becomes as many words as its value has: none, or several."""
    if not isinstance(command, str):
        return [str(_filled(word, values, "sweep.command")) for word in _texts(command, "sweep.command")]
    words: list[str] = []
    for word in shlex.split(command):
        filled = str(_filled(word, values, "sweep.command"))
        words += shlex.split(filled) if _NAME.fullmatch(word) else [filled]
    return words


def _filled(value: Any, values: Mapping[str, Value], where: str) -> Any:
    """Texts with `{name}` replaced by values; a text that is nothing but `{name}` becomes the value itself."""
    if isinstance(value, dict):
        return {key: _filled(one, values, f"{where}.{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, values, where) for one in value]
    if not isinstance(value, str):
        return value

    def of(name: str) -> Value:
        if name not in values:
            raise ConfigError(
                f"{where} names {{{name}}}: it is none of {', '.join(values) or 'the axes (there are none)'}"
            )
        return values[name]

    if whole := _NAME.fullmatch(value):
        return of(whole[1])
    return _NAME.sub(lambda match: str(of(match[1])), value)
