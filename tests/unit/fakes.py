"""A stand-in for the engine: sessions that learn of a program from the files it leaves beside the session's socket."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

#: A training program that "connects" and ends well.
CONNECT = 'touch "$(dirname "$PRISM_SESSION")/connected-$RANK"'


@dataclass
class FakeRecording:
    rank: int
    program: object
    info: dict[str, Any]
    num_ops: int = 7

    def digest(self, *, times: bool = True) -> str:
        return str(self.program)

    def difference(self, other: FakeRecording, *, times: bool = True) -> str | None:
        return None if self.program == other.program else "op 3 differs"

    def distance_ppm(self, other: FakeRecording, *, times: bool = True) -> int | None:
        return 40 if self.num_ops == other.num_ops else None

    def info_json(self) -> str:
        return json.dumps(self.info)

    def to_bytes(self) -> bytes:
        return json.dumps([self.rank, self.program, self.num_ops]).encode()

    @classmethod
    def from_bytes(cls, data: bytes, info: str) -> FakeRecording:
        rank, program, num_ops = json.loads(data)
        return cls(rank, program, json.loads(info), num_ops)


@dataclass
class FakeGraph:
    world_size: int
    assignment: list[int] = field(default_factory=list)
    meta: dict[str, str] = field(default_factory=dict)
    num_ops: int = 70
    graph_bytes: int = 700

    def materialised_ranks(self, sandbox: list[int], profile_toml: str | None = None) -> list[int]:
        return [rank + 1 for rank in sandbox if rank + 1 not in sandbox]

    def save(self, path: str) -> int:
        Path(path).write_text(json.dumps(self.assignment))
        return self.graph_bytes


class FakeSession:
    """Options: `program_of` gives a rank's program, `failure` the engine's verdict once a rank has connected."""

    program_of: Callable[[int], object] = staticmethod(lambda rank: "ddp")
    comms: ClassVar[list[dict[str, Any]]] = [{"kind": "group", "ordinal": 0, "size": 8, "group_rank": 0}]
    failure: str | None = None
    made: ClassVar[list[FakeSession]] = []

    def __init__(self, options_json: str, graph: FakeGraph | None = None, values: object = None) -> None:
        self.options = json.loads(options_json)
        self.graph = graph
        self.values = values
        self.running: set[int] = set()
        self.most_running = 0
        self.exited: dict[int, int] = {}
        self.seen: set[int] = set()
        FakeSession.made.append(self)

    def listen(self, directory: str) -> str:
        self.directory = Path(directory)
        return str(self.directory / "socket")

    def store_set(self, key: bytes, value: bytes) -> bytes:
        return value

    def absent_value(self, key: bytes) -> bytes | None:
        return None

    def take_turn(self, rank: int) -> bool:
        at_once = self.options.get("at_once") or len(self.options["live"])
        if len(self.running) == at_once:
            return False
        self.running.add(rank)
        self.most_running = max(self.most_running, len(self.running))
        return True

    def process_exited(self, rank: int, returncode: int) -> None:
        self.exited[rank] = returncode
        self.running.discard(rank)

    def _connected(self, rank: int) -> bool:
        if self.directory.exists() and (self.directory / f"connected-{rank}").exists():
            self.seen.add(rank)
        return rank in self.seen

    def status_json(self) -> str:
        ranks = {
            str(rank): {
                "connected": self._connected(rank),
                "finished": rank in self.exited,
                "records": 3,
                "iterations": 1,
                "last_op": "all_reduce of 4 bf16" if self._connected(rank) else None,
            }
            for rank in self.options["live"]
        }
        failed = self.failure if any(state["connected"] for state in ranks.values()) else None
        return json.dumps({"failed": failed, "ranks": ranks})

    def recording(self, rank: int) -> FakeRecording:
        info = {
            "comms": self.comms, "groups": [], "p2p_ordinals": [], "unsupported": {"cudaFoo": 2}, "iterations": 2,
            "peak_allocated_bytes": 5, "peak_reserved_bytes": 6, "peak_device_bytes": 6, "workspace_bytes": 1,
            "nccl_buffer_bytes": 0, "pipeline_stage": None, "tiers": [], "notes": {},
        }  # fmt: skip
        return FakeRecording(rank, type(self).program_of(rank), info)

    def finish(self) -> str:
        def summary(rank: int) -> dict[str, Any]:
            return {
                "rank": rank, "iteration_time_ns": [2_000_000, 1_000_000], "peak_allocated_bytes": 1 << 20,
                "peak_reserved_bytes": 1 << 21, "peak_device_bytes": 1 << 22, "nccl_buffer_bytes": 0,
                "workspace_bytes": 0,
                "nccl_init_ns": 0, "iterations": 2,
                "device_time": None, "time_by_provenance": {"modelled": 3, "default": 1},
                "communicators": [{"size": 8, "members": [0, 1], "calls": 3, "bytes": 4096}],
                "unsupported": {}, "notes": {}, "last_op": None, "exit_code": self.exited.get(rank),
            }  # fmt: skip

        document = {
            "world_size": self.options["world_size"], "iteration_time_ns": [2_000_000, 1_000_000],
            "ranks": [summary(rank) for rank in self.options["live"]], "ops": 70, "ops_evaluated": 70,
            "ranks_materialised": 4, "failed": self.failure,
            "device_time": {"by_provenance": {"modelled": 3, "default": 1}, "by_class": {}, "communication": 5},
        }  # fmt: skip
        return json.dumps(document)
