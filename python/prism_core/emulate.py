"""Hybrid emulation: some ranks run the program, all others are replayed from the graph."""

from __future__ import annotations

import json
import logging
import os
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.bootstrap import Bootstrap
from prism_core.collect import memory_figures, tool_version
from prism_core.command import ProgramCommand, check_world_size, parse_command
from prism_core.config import (
    Device,
    EmulateConfig,
    check_ranks,
    check_slow,
    parse_device,
)
from prism_core.environment import Placement
from prism_core.errors import (
    ConfigError,
    DeadlockError,
    InterruptedRunError,
    MismatchError,
    PrismError,
    SessionError,
    error_entry,
)
from prism_core.fit import META as MEMORY_META
from prism_core.fit import Card, from_meta, job_memory, rank_memory
from prism_core.forks import ForkStarter, NoFork, choose_starter
from prism_core.kernels import read_tables
from prism_core.launch import GroupResult, RankGroup, Seat, await_engine, failure_of, log_path, session_status
from prism_core.nccl import differences, settings_of_environment, settings_of_profile, with_environment
from prism_core.page import write_run
from prism_core.perturb import perturbation_text
from prism_core.progress import Progress
from prism_core.published import META, PublishedValues
from prism_core.real import assign_gpus, real_nccl, release_failure
from prism_core.recorded import check_recording, graph_of_run
from prism_core.replay import open_graph
from prism_core.rules import load_rules, load_value_rules
from prism_core.store import RendezvousServer
from prism_core.values import program_variables, split_notes

logger = logging.getLogger(__name__)


def emulate(config: EmulateConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Runs the sandbox ranks against the graph, writes the run folder; returns summary and timing in one.

    If a rank dies or the user ends the run, what is known so far is written before the error is raised.
    """
    start = time.monotonic_ns()
    graph = open_graph(config.graph)
    sandbox = check_ranks(config.sandbox, graph.world_size)
    slow = check_slow(config.slow, graph.world_size)
    perturb = perturbation_text(config.perturb)
    check_recording(config.record, sandbox, graph.world_size)
    program = parse_command(config.command)
    check_world_size(program, graph.world_size, f"{config.graph} is a graph of")
    device = parse_device(config.device or graph.meta.get("device", ""))
    if config.device is None:
        device = replace(device, profile=graph.meta.get("profile", device.profile))
    recorded = settings_of_profile(graph.meta["profile"]) if "profile" in graph.meta else {}
    profile, nccl_notes = with_environment(device.profile, os.environ)
    device = replace(device, profile=profile)
    card = Card.of_profile(profile)
    # The program runs with its environment, whatever the model of the network follows.
    nccl_notes += differences(recorded, settings_of_environment(os.environ))
    materialised = graph.materialised_ranks(sandbox, device.profile)
    gpus = assign_gpus(sandbox) if device.kind == "real" else {}
    value_rules = load_value_rules(config.rules)
    logs = _make_run_folder(config.output)
    variables = program_variables(value_rules, logs, strict=config.strict_values)
    options = {
        "mode": "emulate",
        "world_size": graph.world_size,
        "profile": device.profile,
        "kernels": read_tables(config.kernels) if config.kernels else _recorded_tables(config, graph.meta),
        "host_time": config.host_time,
        "live": sandbox,
        "slow": slow,
        "perturb": perturb,
        "at_once": config.jobs,
        "record": config.record is not None,
    }
    rules = load_rules(config.rules)
    if device.kind != "host" and (rules is not None or config.jobs):
        raise ConfigError("rules for members ([[rule]]) and ranks in turns are for the host device: --device host")
    session = _native.Session(json.dumps(options), graph, rules)
    told = PublishedValues.from_meta(graph.meta.get(META, ""))
    told.expect(sandbox)
    with (
        tempfile.TemporaryDirectory(prefix="prism-") as folder,
        RendezvousServer(session, graph.world_size, len(sandbox), told=told) as store,
        _choose_starter(config, sandbox, device, program) as starter,
    ):
        placement = Placement(
            world_size=graph.world_size,
            gpus_per_node=device.gpus_per_node,
            device=device.kind,
            socket=session.listen(folder),
            store_host=store.host,
            store_port=store.port,
            epoch_ns=time.monotonic_ns() if device.kind == "real" else None,
            gpus=gpus,
            real_nccl=real_nccl() if device.kind == "real" else None,
            variables=variables,
            live=tuple(sandbox),
        )
        seat = Seat(session, placement)
        group = RankGroup(
            lambda rank: seat, program.argv, logs,
            on_exit=told.ended, echo=config.echo, may_start=session.take_turn, device=device.kind, starter=starter,
        )  # fmt: skip
        failure: PrismError | None = None
        expected, bars = graph.meta.get("iterations", ""), progress or Progress(enabled=False)
        total = int(expected) * len(sandbox) if expected.isdigit() else None
        try:
            with bars.watched("iterations", total, lambda: _iterations(session)):
                group.run(sandbox)
                await_engine(session, sandbox)
            failure = failure_of(group.result, session, logs)
        except (KeyboardInterrupt, SystemExit) as interruption:
            failure = InterruptedRunError(interruption)
        bootstrap = Bootstrap(start)
        bootstrap.look(session_status(session)[1], group.result)
        notes = store.notes()
        recorded_graph = (
            graph_of_run(session, graph, sandbox) if config.record is not None and failure is None else None
        )
        found: dict[str, Any] = json.loads(session.finish())
    for rank in found["ranks"]:
        rank["notes"], rank["values"] = split_notes(rank["notes"])
        rank["memory"] = rank_memory(rank, card)
    failure = _explain(failure, found, graph.meta.get("iterations", ""))
    failure = failure or release_failure(found["ranks"], config.max_release_error_us)
    failure = failure or _idleness(told, found, graph.meta.get("iterations", ""), logs)
    summary = {
        **found,
        "memory": job_memory(found["ranks"], card),
        "memory_collected": from_meta(graph.meta.get(MEMORY_META, "")),
        "sandbox": sandbox,
        "materialised_ranks": materialised,
        "slow": slow,
        "perturb": perturb,
        "command": shlex.join(config.command),
        "store": notes,
        "notes": [*_notes(found), *nccl_notes, *starter.notes()],
        "tool_version": tool_version(),
        "error": error_entry(failure) if failure is not None else None,
    }
    timing = _timing(found, group.result, time.monotonic_ns() - start)
    timing |= {"bootstrap": bootstrap.figures(), "graph": str(Path(config.graph).absolute())}
    write_run(config.output, summary, timing)
    if failure is not None:
        raise failure
    if recorded_graph is not None:
        recorded_graph.save(str(config.record))
    return {**summary, **timing, "run": str(config.output)}


def _choose_starter(
    config: EmulateConfig, sandbox: Sequence[int], device: Device, program: ProgramCommand
) -> ForkStarter | NoFork:
    """How sandbox ranks are started: forked, unless there are few, or CPU time counts."""
    wanted = False if config.fork_server is None and config.host_time != "constant" else config.fork_server
    return choose_starter(program.argv, num_ranks=len(sandbox), wanted=wanted, device=device.kind)


def _iterations(session: _native.Session) -> int:
    """Iterations of all sandbox ranks so far."""
    ranks = json.loads(session.status_json())["ranks"]
    return sum(rank["iterations"] for rank in ranks.values())


def _recorded_tables(config: EmulateConfig, meta: Mapping[str, str]) -> list[str]:
    """The kernel tables of the graph, for a sandbox on the same device."""
    texts: list[str] = json.loads(meta.get("kernels", "[]")) if config.device is None else []
    return texts


def _make_run_folder(folder: Path) -> Path:
    """The folder for logs, in a new run folder or one that holds an earlier run."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: -o names a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "summary.json").exists():
        raise ConfigError(f"{folder} holds other files: -o names a new folder or that of an earlier run")
    logs = folder.absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in [*logs.glob("rank-*.log"), *folder.glob("*.json"), *folder.glob("report.html")]:
        old.unlink()
    return logs


def _explain(failure: PrismError | None, found: dict[str, Any], recorded: str) -> PrismError | None:
    """Adds to the engine's verdict that the program has got beyond the recorded iterations, if it has."""
    if not isinstance(failure, (DeadlockError, MismatchError)) or not recorded.isdigit():
        return failure
    if all(rank["iterations"] < int(recorded) for rank in found["ranks"]):
        return failure
    hint = f"the graph has {recorded} iteration{'' if recorded == '1' else 's'} and the program went on"
    return type(failure)(f"{failure}\n  {hint}: if later iterations differ from these, collect more iterations")


def _idleness(told: PublishedValues, found: dict[str, Any], recorded: str, logs: Path) -> PrismError | None:
    """A rank that ends well without an iteration took a wrong turn, if the recorded job trains."""
    if told.missing:
        return SessionError(f"a rank asked for a value that nobody told: {min(told.missing.values())}")
    idle = [rank["rank"] for rank in found["ranks"] if rank["iterations"] == 0]
    if not idle or not recorded.isdigit() or int(recorded) == 0:
        return None
    return SessionError(
        f"rank {idle[0]} ended well without one optimizer step, and the graph has {recorded} iterations: "
        f"something told it not to train (output: {log_path(logs, idle[0])})"
    )


def _notes(found: dict[str, Any]) -> list[str]:
    """What a reader of the figures must know."""
    notes = []
    for rank in found["ranks"]:
        if found["world_size"] > 1 and not rank["communicators"]:
            notes.append(f"rank {rank['rank']} never called NCCL: nothing ties it to the other ranks")
        if rank["iterations"] == 0:
            notes.append(f"rank {rank['rank']} finished no optimizer step: it has no iteration times")
    return notes


def _timing(found: dict[str, Any], result: GroupResult, wall_ns: int) -> dict[str, Any]:
    """What depends on the machine and its load; the overhead is real time over emulated time."""
    longest = max((sum(rank["iteration_time_ns"]) for rank in found["ranks"]), default=0)
    slowest = max(result.wall_ns.values(), default=0)
    return {
        "wall_ns": wall_ns,
        "rank_wall_ns": {str(rank): spent for rank, spent in sorted(result.wall_ns.items())},
        "overhead": round(slowest / longest, 3) if longest else None,
        **memory_figures(),
    }


def emulate_program(
    command: Sequence[str],
    graph: str | os.PathLike[str],
    sandbox: Sequence[int],
    output: str | os.PathLike[str],
    **options: Any,
) -> dict[str, Any]:
    """Emulates `command` as the sandbox ranks of the graph's job; see `EmulateConfig` for the options.

    Returns:
        The summary that `prism emulate --json` prints.
    """
    config = EmulateConfig(command=command, graph=Path(graph), sandbox=list(sandbox), output=Path(output))
    return emulate(replace(config, **options))
