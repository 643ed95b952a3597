"""Replay: the iteration time of a whole job from its graph, no process run."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from prism_core import _native
from prism_core.config import check_ranks, check_slow, read_profile
from prism_core.contents import describe
from prism_core.errors import ConfigError
from prism_core.messages import inspect_program, is_message_program, refuse_message_program, replay_program
from prism_core.nccl import DEFAULT_PROFILE, differences, merged, settings_of_profile, with_settings
from prism_core.perturb import Perturb, perturbation_text, split_group_failures

Contention = Literal["none", "fair-share", "fifo"]
Messages = Literal["fine", "coarse"]
Overlap: TypeAlias = str | os.PathLike[str] | Mapping[str, float]


class ReplayResult:
    """What a replay found; its attributes are the keys of `prism replay --json`."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Takes the engine's document."""
        self._document = dict(document)

    def __getattr__(self, name: str) -> Any:
        """An entry of the document."""
        try:
            return self.__dict__["_document"][name]
        except KeyError:
            raise AttributeError(f"a replay has no {name}") from None

    def __dir__(self) -> list[str]:
        """The document's keys, for completion."""
        return [*super().__dir__(), *self._document]

    def __repr__(self) -> str:
        """The figures one looks at first."""
        return f"ReplayResult(world_size={self.world_size}, iteration_time_ns={self.iteration_time_ns})"

    def to_dict(self) -> dict[str, Any]:
        """The whole document."""
        return dict(self._document)


def overlap_text(overlap: Overlap | None) -> str | None:
    """Factors of overlap as TOML text.

    Args:
        overlap: As `replay` takes it.

    Raises:
        ConfigError: A file cannot be read, or a factor is no number.
    """
    if overlap is None:
        return None
    if isinstance(overlap, Mapping):
        if any(isinstance(factor, bool) or not isinstance(factor, (int, float)) for factor in overlap.values()):
            raise ConfigError(f"overlap is {dict(overlap)}: it must be numbers by class of work")
        return "[overlap]\n" + "".join(f"{json.dumps(name)} = {float(factor)!r}\n" for name, factor in overlap.items())
    if isinstance(overlap, str) and "\n" in overlap:
        return overlap
    try:
        return Path(overlap).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read {overlap}: {reason}") from error


def open_graph(path: str | os.PathLike[str]) -> _native.Graph:
    """Opens a graph file; `.txt` files are read as the text form."""
    location = Path(path)
    refuse_message_program(location)
    try:
        if location.suffix == ".txt":
            return _native.Graph.from_text(location.read_text(encoding="utf-8"))
        return _native.Graph.open(str(location))
    except OSError as error:
        raise ConfigError(f"cannot open {location}: {error.strerror or error}") from error


def replay(
    graph_or_path: _native.Graph | _native.MessageProgram | str | os.PathLike[str],
    contention: Contention = "none",
    symmetry: bool = True,
    slow: Mapping[int, float] | None = None,
    perturb: Perturb | None = None,
    nccl: Mapping[str, str] | None = None,
    tuning: str | None = None,
    loggops: str | Mapping[str, float] | None = None,
    *,
    overlap: Overlap | None = None,
    messages: Messages = "fine",
    profile: str | None = None,
) -> ReplayResult:
    """Replays a graph from virtual ranks only.

    With contention or overlap every message is evaluated, rank by rank: time and memory grow with messages and ops
    (`docs/contention.md`).

    Args:
        graph_or_path: The graph, or the path of its file; or a message program, or the path of its file (GOAL text or
            the stored form), which takes `loggops` and nothing else.
        contention: How messages share network cards and NVLink ports: `none` (each has them to itself), `fair-share`
            (evenly while they overlap) or `fifo` (one at a time).
        symmetry: Evaluate equal ranks once.
        slow: Slow-down of single ranks' compute, for example `{4242: 1.3}`.
        perturb: Changes to the job: the path of a TOML file, TOML text, or a list of perturbations
            (`prism_core.perturb`) or of dictionaries like their tables. With `[[group_failure]]` tables the steps
            after the failures are replayed, and the result has `group_failures` (`prism_core.spare.replayed`).
        nccl: NCCL's environment variables that shall be other than when the graph was collected, for example
            `{"NCCL_ALGO": "Ring"}`; an empty value stands for one not set. The result's `notes` name the differences.
        tuning: How algorithms and protocols are chosen, if not as the graph's profile says: `nccl-2.27` (that version
            of NCCL), or `fastest`.
        loggops: Parameters of a message program's evaluation (`prism_core.messages.replay_program`).
        overlap: How many times longer computations take beside communication: the path of a TOML file with a table
            `[overlap]`, TOML text, or factors by class, for example `{"gemm": 1.15}`. By default the profile's own.
        profile: Another cluster's network and NVLink: the name of a built-in profile, or the path of a TOML file.
            Durations of computing stay those of the graph.
        messages: Where messages are evaluated, `fine` cuts rings as NCCL does, `coarse` has one message per ring step.

    Returns:
        The result: iteration times in ns, ops evaluated, wall time, and more.
    """
    if isinstance(graph_or_path, _native.MessageProgram) or (
        not isinstance(graph_or_path, _native.Graph) and is_message_program(graph_or_path)
    ):
        changed = {"contention": contention != "none", "symmetry": not symmetry, "messages": messages != "fine"}
        given = {"overlap": overlap, "nccl": nccl, "tuning": tuning, "profile": profile}
        _refuse_options(slow=slow, perturb=perturb, **given, **changed)
        return ReplayResult(replay_program(graph_or_path, loggops))
    if loggops is not None:
        raise ConfigError("loggops is for message programs (GOAL): an execution graph is replayed with its profile")
    start = time.monotonic_ns()
    graph = graph_or_path if isinstance(graph_or_path, _native.Graph) else open_graph(graph_or_path)
    text, failures = split_group_failures(perturbation_text(perturb))
    if failures is not None:
        how = {"contention": contention, "symmetry": symmetry, "nccl": nccl, "tuning": tuning, "overlap": overlap}
        return _replay_failures(graph, failures, slow=slow, perturb=text, messages=messages, profile=profile, **how)
    options = {
        "slow": check_slow(slow or {}, graph.world_size),
        "perturb": text,
        "contention": contention,
        "symmetry": symmetry,
        "overlap": overlap_text(overlap),
        "messages": messages,
    }
    recorded_profile = graph.meta.get("profile") if profile is None else read_profile(profile)
    recorded = settings_of_profile(recorded_profile) if recorded_profile else {}
    used = merged(recorded, nccl or {})
    if nccl or tuning or profile:
        base = recorded_profile or _native.profile_toml(DEFAULT_PROFILE)
        options["profile"] = with_settings(base, used, tuning)
    document = json.loads(_native.replay_json(graph, json.dumps(options)))
    document["nccl"] = used
    document["notes"] = differences(recorded, used)
    if profile:
        document["notes"].append(f"the network is that of {profile}; computing takes what it takes in the graph")
    document["wall_ns"] = time.monotonic_ns() - start
    document["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return ReplayResult(document)


def _replay_failures(graph: _native.Graph, tables: Mapping[str, Any], **how: Any) -> ReplayResult:
    """The replay of a job of which groups die."""
    from prism_core.spare.failures import group_failures  # It builds on this module.
    from prism_core.spare.job import replay_failures

    return replay_failures(graph, **vars(group_failures(tables)), **how)


def _refuse_options(**given: Any) -> None:
    """Refuses what only the replay of an execution graph has."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name} is for execution graphs: a message program (GOAL) takes only loggops")


def inspect(
    graph_or_path: _native.Graph | _native.MessageProgram | str | os.PathLike[str],
    sandbox: Sequence[int] | None = None,
) -> dict[str, Any]:
    """What is in a graph: ranks, roles, communicators, ops, bytes, provenance. Or in a message program.

    Args:
        graph_or_path: The graph or message program, or the path of its file.
        sandbox: Ranks that would run the program; adds `materialised_ranks`, the virtual ranks they exchange data with.

    Returns:
        The document of `prism inspect --json`.
    """
    if isinstance(graph_or_path, _native.MessageProgram) or (
        not isinstance(graph_or_path, _native.Graph) and is_message_program(graph_or_path)
    ):
        if sandbox is not None:
            raise ConfigError("sandbox is for execution graphs: nobody runs a message program (GOAL)")
        return inspect_program(graph_or_path)
    graph = graph_or_path if isinstance(graph_or_path, _native.Graph) else open_graph(graph_or_path)
    summary = describe(graph)
    if sandbox is not None:
        chosen = check_ranks(sandbox, graph.world_size)
        summary |= {"sandbox": chosen, "materialised_ranks": graph.materialised_ranks(chosen)}
    return summary
