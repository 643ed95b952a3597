"""Graph collection: a few ranks run the program, each against absent peers, and stand for all the others."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import resource
import shlex
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.bootstrap import Bootstrap
from prism_core.command import ProgramCommand, check_world_size, parse_command
from prism_core.config import CollectConfig, Device, parse_device, parse_ranks
from prism_core.contents import META_RANKS, facts_of_ranks
from prism_core.environment import Placement
from prism_core.errors import ConfigError, SessionError
from prism_core.executors import check_executor, cut, keep_outcome, run_on_ray
from prism_core.fit import META as MEMORY_META
from prism_core.fit import Card, job_memory, rank_memory, to_meta
from prism_core.forks import ForkStarter, NoFork, choose_starter
from prism_core.kernels import read_tables
from prism_core.launch import RankGroup, Seat, await_engine, failure_of, log_path, session_status
from prism_core.nccl import with_environment
from prism_core.parts import PEAK_KEYS, KeptRecording, Part, PartFolder, RecordingShelf, said_by
from prism_core.progress import Progress
from prism_core.published import META, PublishedValues, ValueKey
from prism_core.repeated import SliceSpeeds
from prism_core.roles import MAX_REPRESENTATIVES, Explanations, Positions, RoleFinder, Roles
from prism_core.rules import Rules, load_rules, load_value_rules
from prism_core.slicing import check_part, in_order, open_folder
from prism_core.store import RendezvousServer
from prism_core.store_state import key_name
from prism_core.values import program_variables, split_notes

logger = logging.getLogger(__name__)


#: What a rank's recording tells of its memory.
_MEMORY_KEYS = (*PEAK_KEYS, "workspace_bytes", "nccl_buffer_bytes", "pipeline_stage")


def collect(
    config: CollectConfig, progress: Progress | None = None, *, heard: Mapping[bytes, bytes] | None = None
) -> dict[str, Any]:
    """Runs representative ranks, infers the rest, writes the graph; returns the summary.

    Args:
        config: What to do.
        progress: Where to show how far it is.
        heard: What ranks that ran elsewhere have told others.
    """
    start = time.monotonic_ns()
    if not 0.0 <= config.role_tolerance <= 1.0:
        raise ConfigError(f"--role-tolerance is a share between 0 and 1, not {config.role_tolerance}")
    if config.world_size < 1:
        raise ConfigError(f"a job has at least one rank, not {config.world_size}")
    device = parse_device(config.device)
    if device.kind == "real":
        raise ConfigError(
            "a graph is collected on the emulated (or the host) device; `prism emulate --device real` uses it"
        )
    profile, notes = with_environment(device.profile, os.environ)
    device = replace(device, profile=profile)
    program = parse_command(config.command)
    check_world_size(program, config.world_size, "--world-size says")
    _check_output(config.output)
    _check_exact(config, device)
    with _choose_starter(config, device, program) as starter:
        collector = _Collector(config, device, program, starter, progress or Progress(enabled=False), start)
        collector.note(notes)
        collector.hear(heard or {})
        if config.part is not None:
            return collector.run_part(*config.part) | {"wall_ns": time.monotonic_ns() - start, **memory_figures()}
        roles = collector.find_roles()
        collector.repeat_first_slice()
        collector.tie_slices()
    collector.note(starter.notes())
    graph = collector.assemble(roles)
    graph_bytes = graph.save(str(config.output))
    summary = collector.summary(roles)
    influence = collector.influence(roles)
    collector.forget_parts()
    return {
        "world_size": config.world_size,
        "ops": graph.num_ops,
        "graph_bytes": graph_bytes,
        "graph": str(config.output),
        **summary,
        **({"influence": influence} if influence is not None else {}),
        "wall_ns": time.monotonic_ns() - start,
        **memory_figures(),
    }


def memory_figures() -> dict[str, int]:
    """Largest resident sets so far: of this process, and of any one rank's process."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rank = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"peak_rss_bytes": own * 1024, "peak_rank_rss_bytes": rank * 1024}


def tool_version() -> str:
    """Version of this package."""
    try:
        return importlib.metadata.version("prism_core")
    except importlib.metadata.PackageNotFoundError:
        return str(_native.build_info().get("version", "unknown"))


def _choose_starter(config: CollectConfig, device: Device, program: ProgramCommand) -> ForkStarter | NoFork:
    """How ranks are started: forked, unless there are few, or CPU time counts."""
    named = config.ranks not in ("all", "auto")
    num_ranks = len(parse_ranks(config.ranks, config.world_size)) if named else config.world_size
    wanted = False if config.fork_server is None and config.host_time != "constant" else config.fork_server
    return choose_starter(program.argv, num_ranks=num_ranks, wanted=wanted, device=device.kind)


def _check_output(output: Path) -> None:
    """Before minutes are spent, not after."""
    if not output.parent.is_dir():
        raise ConfigError(f"the folder of {output} does not exist")


def _check_exact(config: CollectConfig, device: Device) -> None:
    if load_rules(config.rules) is not None and device.kind != "host":
        raise ConfigError("rules for what members contribute ([[rule]]) are for the host device: --device host")
    check_executor(config.executor)
    if config.part is not None:
        check_part(config)
    if not config.exact:
        return
    if device.kind != "host":
        raise ConfigError("exact values need ranks that compute: --exact is for --device host")
    if config.ranks != "all":
        raise ConfigError("with exact values every rank runs: --exact needs --ranks all")


@dataclass(frozen=True, slots=True)
class _Room:
    """Session and store of one rank, or of ranks that meet."""

    session: _native.Session
    store: RendezvousServer
    seat: Seat


@contextmanager
def _open_room(
    ranks: Sequence[int],
    world_size: int,
    device: Device,
    engine: Mapping[str, Any],
    published: dict[bytes, bytes],
    variables: Mapping[str, str],
    told: PublishedValues,
    *,
    rules: Rules | None = None,
    at_once: int = 0,
) -> Iterator[_Room]:
    options = {
        "mode": "collect", "world_size": world_size, "live": list(ranks), "profile": device.profile, "at_once": at_once,
        **engine,
    }  # fmt: skip
    session = _native.Session(json.dumps(options), values=rules)
    with (
        tempfile.TemporaryDirectory(prefix="prism-") as folder,
        RendezvousServer(session, world_size, num_live=len(ranks), published=published, told=told) as store,
    ):
        placement = Placement(
            world_size=world_size,
            gpus_per_node=device.gpus_per_node,
            device=device.kind,
            socket=session.listen(folder),
            store_host=store.host,
            store_port=store.port,
            variables=variables,
        )
        try:
            yield _Room(session, store, Seat(session, placement))
        finally:
            session.finish()


class _Collector:
    """One collection under way."""

    def __init__(
        self,
        config: CollectConfig,
        device: Device,
        program: ProgramCommand,
        starter: ForkStarter | NoFork,
        progress: Progress,
        start_ns: int,
    ) -> None:
        self._config = config
        self._starter = starter
        self._progress = progress
        self._bootstrap = Bootstrap(start_ns)
        self._speeds = SliceSpeeds()
        #: Recordings of ranks that run again; none while ranks run for the first time.
        self._again: dict[int, Any] | None = None
        self._device = device
        self._program = program
        self._gpus_per_node = device.gpus_per_node
        self._card = Card.of_profile(device.profile)
        self._kernels = read_tables(config.kernels)
        self._logs = (config.run_folder or config.output.with_suffix(".logs")).absolute()
        self._variables = program_variables(load_value_rules(config.rules), self._logs, strict=config.strict_values)
        self._store_notes: dict[tuple[str, str], dict[str, str]] = {}
        self._published: dict[bytes, bytes] = {}
        self._group: RankGroup | None = None
        may_summon = config.ranks == "auto" or config.part is not None
        self._told = PublishedValues(self._summon if may_summon else None)
        self._folder = None if config.exact else open_folder(config, device, program, self._kernels)
        self._shelf = RecordingShelf(self._folder, _native.Recording.from_bytes, config.memory_bytes)
        self._rooms: dict[int, _Room] = {}
        self._kept: dict[int, KeptRecording] = {}
        self._asked: frozenset[int] = frozenset()
        self._batch = 0
        self._heard: dict[bytes, bytes] = {}
        self._resumed: list[int] = []
        self._notes: set[str] = set()
        self._ranks: dict[int, dict[str, Any]] = {}
        self._rules = load_rules(config.rules)
        self._finder = RoleFinder(
            world_size=config.world_size,
            gpus_per_node=self._gpus_per_node,
            run=self.run,
            num_verified=config.num_verified,
            seed=config.seed,
            may_add=config.ranks == "auto",
            compares_times=config.host_time == "constant",
            tolerance_ppm=round(config.role_tolerance * 1_000_000),
        )

    def note(self, notes: Iterable[str]) -> None:
        """Keeps what the user should know."""
        self._notes.update(notes)

    def find_roles(self) -> Roles:
        """Runs ranks until every rank has a recording that stands for it."""
        world_size = self._config.world_size
        base = world_size // 2
        if self._config.ranks == "all":
            return self._finder.run_all()
        if self._config.ranks == "auto":
            first = sorted({base, 0, world_size - 1})
        else:
            first = parse_ranks(self._config.ranks, world_size)
            base = min(first, key=lambda rank: (rank in (0, world_size - 1), abs(rank - base)))
        return self._finder.infer(first, base, self._ways)

    def _ways(self, recording: Any) -> Explanations:
        info = json.loads(recording.info_json())
        positions = Positions([group["ranks"] for group in info["groups"]], self._config.world_size)
        return Explanations(positions, recording.rank, info["p2p_ordinals"], self._gpus_per_node)

    def _summon(self, rank: int) -> bool:
        """Has one more rank run, for a value that another one waits for."""
        if self._group is None or rank in self._ranks or len(self._ranks) >= MAX_REPRESENTATIVES:
            return False
        logger.info("running rank %d as well: others wait for a value of it", rank)
        self._group.add(rank)
        return True

    def run(self, ranks: Sequence[int]) -> list[KeptRecording]:
        """Recordings of ranks, and of others they needed: those that are finished already, and those that run now."""
        self._batch += 1
        self._asked = frozenset(ranks)
        self._kept = self._resume(ranks)
        missing = [rank for rank in ranks if rank not in self._kept]
        if missing:
            try:
                ordered = in_order(missing, self._config.slice_order, self._config.seed)
                if self._config.executor == "local" or self._folder is None:
                    self._run(ordered)
                else:
                    self._run_elsewhere(ordered, self._folder)
            except BaseException:
                if self._folder is not None and (kept := len(self._folder.ranks())):
                    logger.info("%d finished ranks are kept in %s: the same command goes on", kept, self._folder.path)
                raise
        recordings = [self._kept[rank] for rank in sorted(self._kept)]
        try:
            for recording in recordings:
                self._look_at(recording)
            self._refuse_idle()
        except SessionError:
            self.forget_parts()  # of such recordings no graph can be made: the program has to change
            raise
        return recordings

    def _resume(self, ranks: Sequence[int]) -> dict[int, KeptRecording]:
        """What an earlier run has finished, of these ranks and of those it had to run for their values."""
        if self._folder is None:
            return {}
        found = self._folder.ranks()
        if self._batch == 1:
            self.hear(said_by(filter(None, map(self._folder.read, found))))
        kept = {}
        for rank in found:
            if rank in self._ranks or (rank in self._finder.recordings):
                continue
            part = self._folder.read(rank)
            if part is not None and (rank in ranks or (part.summoned and part.batch == self._batch)):
                kept[rank] = self._shelf.take(part)
                self._store_notes.update({(note["rule"], note["key"]): note for note in part.store})
        if kept:
            logger.info("%s of an earlier run", _enumerate(sorted(kept)))
        self._resumed += sorted(kept)
        return kept

    def _run_elsewhere(self, ranks: Sequence[int], folder: PartFolder) -> None:
        """Has slices run by the workers of a cluster."""
        for outcome in run_on_ray(self._config, cut(ranks, self._config.slice_size), lambda: self._heard):
            for rank in keep_outcome(outcome, folder, self._logs):
                part = folder.read(rank)
                # A rank that another slice has run as well, for its values, is there already.
                if part is not None and rank not in self._kept and rank not in self._ranks:
                    self._kept[rank] = self._shelf.take(part)
                    self.hear(part.said)
                    self._store_notes.update({(note["rule"], note["key"]): note for note in part.store})
            self.note(outcome.notes)
            outcome.raise_error()

    def hear(self, said: Mapping[bytes, bytes]) -> None:
        """Knows what ranks that are finished, or run elsewhere, have told others."""
        self._heard.update(said)
        for key, value in said.items():
            told = ValueKey.parse(key_name(key))
            if told is None:
                self._published[key] = value
            else:
                self._told.put(told, value)

    def _ended(self, rank: int) -> None:
        """Keeps the recording of a rank that ended well, at once."""
        self._told.ended(rank)
        room = self._rooms.get(rank)
        if room is None or self._group is None or self._group.result.returncodes.get(rank) != 0 or self._config.exact:
            return
        await_engine(room.session, [rank])
        failed, status = session_status(room.session)
        if failed is None and rank in status and status[rank].connected:
            self._keep(rank, room)

    def _keep(self, rank: int, room: _Room) -> None:
        if self._group is not None:
            self._bootstrap.look(session_status(room.session)[1], self._group.result)
        recording = room.session.recording(rank)
        if self._group is not None and rank in self._group.result.wall_ns:
            start, spent = self._group.result.start_ns[rank], self._group.result.wall_ns[rank]
            self._speeds.ran(rank, start, start + spent, again=self._again is not None)
        if self._again is not None:
            self._again[rank] = recording
            return

        def part() -> Part:
            said, store = room.store.state.said, room.store.notes()
            summoned = rank not in self._asked
            return Part(rank, self._batch, summoned, recording.info_json(), said, store, recording.to_bytes())

        self._kept[rank] = self._shelf.put(recording, None if self._folder is None else part)

    def _run(self, ranks: Sequence[int]) -> None:
        """Runs ranks, each against absent peers in its own session."""
        logger.info("running %s of %d ranks", _enumerate(ranks), self._config.world_size)
        with ExitStack() as stack:
            self._rooms = rooms = {}
            advance = stack.enter_context(self._progress.task("ranks", len(ranks)))

            def ended(rank: int) -> None:
                self._ended(rank)
                advance(f"rank {rank}")

            engine = {"kernels": self._kernels, "host_time": self._config.host_time}

            def open_room(ranks: Sequence[int], at_once: int = 0) -> _Room:
                room = _open_room(
                    ranks, self._config.world_size, self._device, engine, self._published, self._variables,
                    self._told, rules=self._rules, at_once=at_once,
                )  # fmt: skip
                return stack.enter_context(room)

            def seat_of(rank: int) -> Seat:
                rooms[rank] = open_room([rank])
                return rooms[rank].seat

            jobs = self._config.slice_size or self._config.jobs or os.cpu_count() or 1
            self._told.expect(ranks)
            how: dict[str, Any] = {"on_exit": ended, "echo": self._config.echo, "starter": self._starter}
            if self._config.exact:
                room = open_room(ranks, jobs)
                rooms.update(dict.fromkeys(ranks, room))
                how |= {"may_start": room.session.take_turn}
                self._group = RankGroup(lambda _: room.seat, self._program.argv, self._logs, **how)
            else:
                how |= {"jobs": jobs, "num_waiting": lambda: self._told.num_waiting}
                self._group = RankGroup(seat_of, self._program.argv, self._logs, **how)
            result = self._group.run(ranks)
            if result.failed_rank is not None:
                rooms = {result.failed_rank: rooms[result.failed_rank]}
            for rank, room in sorted(rooms.items()):
                await_engine(room.session, [rank])
                failure = failure_of(result, room.session, self._logs)
                if failure is not None:
                    raise failure
            for rank, room in sorted(rooms.items()):
                self._store_notes.update({(note["rule"], note["key"]): note for note in room.store.notes()})
                if rank not in (self._kept if self._again is None else self._again):
                    self._keep(rank, room)
            self._rooms = {}

    def repeat_first_slice(self) -> None:
        """Where times are measured, runs the first slice once more: it tells how the machine's speed changed."""
        if self._config.host_time == "constant":
            return
        ranks = self._speeds.to_repeat()
        if self._config.exact or self._config.executor != "local" or self._resumed or not ranks:
            self._speeds.skipped(self._why_not_again())
            return
        logs, self._again = self._logs, {}
        self._logs = logs / "again"
        try:
            self._run(ranks)
            self.note(
                self._speeds.settle({rank: self._finder.recordings[rank].recording() for rank in ranks}, self._again)
            )
        finally:
            self._logs, self._again = logs, None

    def tie_slices(self) -> None:
        """Where times are measured, compares recordings by the collectives that they have in common."""
        if self._config.host_time != "constant":
            recordings = {rank: kept.recording() for rank, kept in sorted(self._finder.recordings.items())}
            self.note(self._speeds.tie(recordings))

    def _why_not_again(self) -> str:
        if self._config.part is not None:
            return "a part of the ranks runs once: run the parts of a collection on machines of the same speed"
        if self._resumed:
            return "ranks of an earlier run ran at another time"
        if self._config.executor != "local":
            return "slices ran on other machines"
        return "ranks waited for each other" if self._config.exact else "all ranks ran at once"

    def _refuse_idle(self) -> None:
        """A rank that ends well before its first iteration took a wrong turn, if others train."""
        missing = sorted(self._told.missing.values())
        if missing:
            raise SessionError(f"a rank asked for a value that nobody told: {missing[0]}")
        iterations = {rank: state["iterations"] for rank, state in sorted(self._ranks.items())}
        idle = [rank for rank, count in iterations.items() if count == 0]
        busy = [rank for rank, count in iterations.items() if count > 0]
        if idle and busy:
            raise SessionError(
                f"rank {idle[0]} ended well without one optimizer step, while rank {busy[0]} made "
                f"{iterations[busy[0]]}: something told it not to train (output: {log_path(self._logs, idle[0])})"
            )

    def _look_at(self, recording: Any) -> None:
        """Refuses a recording that ties its rank to nobody, and keeps what the user should know of it."""
        info = json.loads(recording.info_json())
        if self._config.world_size > 1 and not info["comms"]:
            raise SessionError(
                f"rank {recording.rank} ran to its end and never made a NCCL communicator: "
                f"nothing ties it to the other {self._config.world_size - 1} ranks"
            )
        if info["iterations"] == 0:
            self._notes.add("no optimizer step was seen: the graph has no iteration times")
        for name, count in info["unsupported"].items():
            self._notes.add(f"rank {recording.rank} called {name}, which is not supported ({count} times)")
        notes, values = split_notes(info["notes"])
        info["notes"] = notes
        self._ranks[recording.rank] = {
            "rank": recording.rank,
            "ops": recording.num_ops,
            **{key: info[key] for key in ("iterations", *_MEMORY_KEYS, "tiers", "notes")},
            "memory": rank_memory(info, self._card),
            "values": values,
        }

    def assemble(self, roles: Roles) -> _native.Graph:
        """The graph of all ranks."""
        recordings, assignment = self._cast(roles)
        return _native.assemble(self._config.world_size, recordings, assignment, json.dumps(self._meta(roles)))

    def _cast(self, roles: Roles) -> tuple[list[Any], list[int]]:
        """The recordings, and for every rank the number of the one that plays it."""
        run = sorted(self._finder.recordings)
        index_of = {rank: index for index, rank in enumerate(run)}
        recordings = [self._at_reference(rank) for rank in run]
        return recordings, [index_of[rank] for rank in roles.assignment]

    def _at_reference(self, rank: int) -> Any:
        """A recording with its host time as the machine of the first slice would have taken it."""
        recording = self._finder.recordings[rank].recording()
        drift_ppm = self._speeds.drift_ppm(rank)
        return recording.at_speed(drift_ppm) if drift_ppm else recording

    def _clocks(self) -> dict[str, Any] | None:
        """How fast the machine was for each rank; none where times are not measured."""
        if self._config.host_time == "constant":
            return None
        return self._speeds.document(sorted(self._finder.recordings))

    def influence(self, roles: Roles) -> dict[str, Any] | None:
        """How much the iteration time owes to each recording; `None` where times are computed, not measured."""
        if self._config.host_time == "constant":
            return None
        recordings, assignment = self._cast(roles)
        found = _native.influence_json(self._config.world_size, recordings, assignment, self._device.profile)
        document: dict[str, Any] = json.loads(found)
        return document

    def _meta(self, roles: Roles) -> dict[str, str]:
        num_run = len(self._finder.recordings)
        return {
            "command": shlex.join(self._config.command),
            "device": self._config.device,
            "kernels": json.dumps(self._kernels),
            "iterations": str(max(rank["iterations"] for rank in self._ranks.values())),
            META: self._told.to_meta(),
            MEMORY_META: to_meta(self._job_memory()),
            META_RANKS: facts_of_ranks(self._ranks[rank] for rank in sorted(self._finder.recordings)),
            "profile": self._device.profile,
            "ranks_run": str(num_run),
            "ranks_inferred": str(self._config.world_size - num_run),
            "ranks_verified": str(len(roles.verified)),
            "role_distinction": roles.distinction,
            "seed": str(self._config.seed),
            "tool_version": tool_version(),
            **({"clocks": json.dumps(clocks)} if (clocks := self._clocks()) is not None else {}),
        }

    def _job_memory(self) -> dict[str, Any]:
        """Whether the job fits, by pipeline stage."""
        return job_memory([self._ranks[rank] for rank in sorted(self._finder.recordings)], self._card)

    def run_part(self, index: int, count: int) -> dict[str, Any]:
        """Runs one of several equal parts of the ranks that were asked for, and leaves their recordings."""
        named = self._config.ranks
        size = self._config.world_size
        ranks = list(range(size)) if named == "all" else parse_ranks(named, size)
        recordings = self.run(ranks[index::count]) if ranks[index::count] else []
        self.note(self._starter.notes())
        if self._config.host_time != "constant":
            self._speeds.skipped(self._why_not_again())
        return {
            "world_size": size,
            "part": f"{index + 1}/{count}",
            "ranks_run": [recording.rank for recording in recordings],
            "ranks_resumed": sorted(self._resumed),
            "bootstrap": self._bootstrap.figures(),
            **({"clocks": clocks} if (clocks := self._clocks()) is not None else {}),
            "recordings": self._shelf.figures(),
            "parts": str(self._folder.path) if self._folder is not None else None,
            "notes": sorted(self._notes),
        }

    def forget_parts(self) -> None:
        """The graph is written: what finished ranks have left is not needed any more."""
        if self._folder is not None:
            self._folder.remove()

    def summary(self, roles: Roles) -> dict[str, Any]:
        """What was run and what was inferred."""
        run = sorted(self._finder.recordings)
        return {
            "ranks_run": run,
            "ranks_inferred": self._config.world_size - len(run),
            "ranks_verified": roles.verified,
            "roles": roles.num_roles,
            "role_distinction": roles.distinction,
            "role_differences": roles.differences,
            "role_tolerance": self._config.role_tolerance,
            "role_farthest": _farthest(roles),
            "seed": self._config.seed,
            "ranks_resumed": sorted(self._resumed),
            "bootstrap": self._bootstrap.figures(),
            **({"clocks": clocks} if (clocks := self._clocks()) is not None else {}),
            "recordings": self._shelf.figures(),
            "ranks": [self._ranks[rank] for rank in run],
            "memory": self._job_memory(),
            "store": [note for _, note in sorted(self._store_notes.items())],
            "notes": sorted(self._notes),
            "logs": str(self._logs),
        }


def _farthest(roles: Roles) -> dict[str, Any] | None:
    """How much is taken for equal that is not."""
    if roles.farthest is None:
        return None
    rank, other, ppm = roles.farthest
    return {"rank": rank, "stand_in": other, "share": ppm / 1_000_000}


def _enumerate(ranks: Sequence[int]) -> str:
    """Names a few ranks, counts many."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({ranks[0]} to {ranks[-1]})"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def collect_program(
    command: Sequence[str], world_size: int, output: str | os.PathLike[str], **options: Any
) -> dict[str, Any]:
    """Collects the graph of a job of `world_size` ranks that run `command`; see `CollectConfig` for the options.

    Returns:
        The summary that `prism collect --json` prints.
    """
    config = CollectConfig(command=command, world_size=world_size, output=Path(output))
    return collect(replace(config, **options))
