"""Slices of ranks as tasks of Ray, on whatever machines its cluster has (optional extra `ray`).

A task collects its ranks as a share of the whole would be, on its own machine, and sends back the files of the finished
ranks; what ranks of earlier slices told others goes along with it. A slice whose worker is lost is given out again.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prism_core.config import CollectConfig
from prism_core.errors import ConfigError, PrismError, RankFailedError, SessionError, error_entry
from prism_core.parts import PartFolder

logger = logging.getLogger(__name__)

EXECUTORS = ("local", "ray")
#: Ranks of a task, unless the user says.
DEFAULT_SLICE = 4
#: How often the worker of one slice may be lost.
MAX_LOSSES = 3
#: Of a rank's output, the end is sent back.
MAX_LOG_BYTES = 1 << 20
#: Variables that belong to a worker, not to the program.
_NOT_PASSED = ("RAY_", "LD_", "PWD", "OLDPWD")


@dataclass(slots=True)
class SliceOutcome:
    """What a task sends back.

    Attributes:
        parts: Files of finished ranks.
        logs: Their output.
        notes: What the user should know.
        error: Why the slice is not complete, as in JSON documents.
    """

    parts: dict[int, bytes] = field(default_factory=dict)
    logs: dict[int, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None

    def raise_error(self) -> None:
        """Raises what went wrong in the task, if anything did."""
        if self.error is None:
            return
        if self.error["kind"] == RankFailedError.__name__:
            raise RankFailedError(
                self.error["message"], rank=self.error["rank"], returncode=self.error["returncode"],
                last_op=self.error["last_op"],
            )  # fmt: skip
        raise SessionError(self.error["message"])


def check_executor(name: str) -> None:
    """Refuses an unknown executor, or one that is not installed.

    Raises:
        ConfigError: The name is unknown, or the extra is missing.
    """
    if name not in EXECUTORS:
        raise ConfigError(f"the executor is {name!r}: it must be one of {', '.join(EXECUTORS)}")
    if name == "ray":
        _import_ray()


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError("--executor ray needs Ray: install the extra, `pip install 'prism_core[ray]'`") from error


def collect_slice(
    config: CollectConfig, ranks: Sequence[int], said: Mapping[bytes, bytes], place: Mapping[str, Any]
) -> SliceOutcome:
    """Runs ranks on this machine: the body of a task.

    Args:
        config: The whole collection.
        ranks: Which to run.
        said: What finished ranks have told others.
        place: Working folder and environment of the one who asks.
    """
    from prism_core.collect import collect

    outcome = SliceOutcome()
    go(place)
    with tempfile.TemporaryDirectory(prefix="prism-slice-") as name:
        output, logs = Path(name) / "job.prism", Path(name) / "logs"
        share = replace(
            config, executor="local", ranks=",".join(map(str, ranks)), part=(0, 1), output=output, run_folder=logs,
            fresh=False, echo=False,
        )  # fmt: skip
        try:
            outcome.notes = collect(share, heard=said)["notes"]
        except PrismError as error:
            outcome.error = error_entry(error)
        for path in sorted(output.with_name(output.name + ".parts").glob("rank-*.part")):
            outcome.parts[int(path.stem.removeprefix("rank-"))] = path.read_bytes()
        for path in sorted(logs.glob("rank-*.log")):
            outcome.logs[int(path.stem.removeprefix("rank-"))] = path.read_bytes()[-MAX_LOG_BYTES:]
    return outcome


def cut(ranks: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """The ranks in slices, in their order."""
    size = size or DEFAULT_SLICE
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def run_on_ray(
    config: CollectConfig, slices: Sequence[tuple[int, ...]], said: Callable[[], Mapping[bytes, bytes]]
) -> Iterator[SliceOutcome]:
    """Gives out slices, at most as many at a time as the cluster has CPUs; outcomes as they come in.

    Raises:
        SessionError: A slice loses its worker over and over, or a task breaks.
    """
    ray = _import_ray()
    with connected(ray):
        yield from _give_out(ray, config, slices, said)


def _give_out(
    ray: Any,
    config: CollectConfig,
    slices: Sequence[tuple[int, ...]],
    said: Callable[[], Mapping[bytes, bytes]],
) -> Iterator[SliceOutcome]:
    task = ray.remote(num_cpus=1, max_retries=0)(collect_slice)
    place = here()
    queue, pending, losses = deque(slices), dict[Any, tuple[int, ...]](), Counter[tuple[int, ...]]()
    while queue or pending:
        room = max(1, int(ray.cluster_resources().get("CPU", 1)))
        while queue and len(pending) < room:
            ranks = queue.popleft()
            pending[task.remote(config, ranks, dict(said()), place)] = ranks
        (done, *_), _ = ray.wait(list(pending), num_returns=1)
        ranks = pending.pop(done)
        try:
            outcome: SliceOutcome = ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise SessionError(f"the task of ranks {_text(ranks)} broke: {error}") from error
        except ray.exceptions.RayError as error:
            losses[ranks] += 1
            if losses[ranks] > MAX_LOSSES:
                raise SessionError(
                    f"the worker of ranks {_text(ranks)} was lost {losses[ranks]} times: {error}"
                ) from error
            logger.warning("the worker of ranks %s was lost: they run again", _text(ranks))
            queue.append(ranks)
            continue
        yield outcome


@contextmanager
def connected(ray: Any) -> Iterator[None]:
    """To the cluster of RAY_ADDRESS, or to one that is started here and ends with the block.

    What Ray says in this process goes to standard error: it prints what happens to workers on standard output, which
    belongs to the command's answer.
    """
    if ray.is_initialized():
        yield
        return
    python_path = os.environ.get("PYTHONPATH")
    variables = {"env_vars": {"PYTHONPATH": python_path}} if python_path else {}
    # What the program is to be preloaded with is of no use to Ray's own processes, and may break them.
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name == "LD_PRELOAD"}
    with contextlib.redirect_stdout(sys.stderr):
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS"), runtime_env=variables, log_to_driver=False)
        finally:
            os.environ.update(kept)
        try:
            yield
        finally:
            ray.shutdown()


def here() -> dict[str, Any]:
    """Working folder and environment of the one who asks, for `go` in a task."""
    return {"folder": os.getcwd(), "environment": _passed(os.environ)}  # noqa: PTH109


def go(place: Mapping[str, Any]) -> None:
    """Takes over working folder (where this machine has it) and environment of the one who asks."""
    if Path(place["folder"]).is_dir():
        os.chdir(place["folder"])
    os.environ.update(place["environment"])


def _passed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_NOT_PASSED)}


def _text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def keep_outcome(outcome: SliceOutcome, folder: PartFolder, logs: Path) -> list[int]:
    """Writes what a task has sent back: files of ranks and their output; returns the ranks that are finished."""
    logs.mkdir(parents=True, exist_ok=True)
    for rank, text in outcome.logs.items():
        (logs / f"rank-{rank}.log").write_bytes(text)
    for rank, data in outcome.parts.items():
        folder.write(rank, data)
    return sorted(outcome.parts)
