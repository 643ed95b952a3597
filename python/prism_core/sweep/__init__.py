"""Sweeps: many configurations of one program or one graph, ranked by iteration time and by whether they fit.

Results are kept as they come, in JSON lines with checksums: a sweep that was ended goes on where it was.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

from prism_core.errors import ConfigError
from prism_core.executors import connected, go, here
from prism_core.progress import Progress
from prism_core.sweep.plan import Configuration, SweepPlan, plan_of, read_plan
from prism_core.sweep.plot import sweep_svg
from prism_core.sweep.results import ranked, read_records, sweep_text, to_csv, to_line
from prism_core.sweep.work import work_out

__all__ = [
    "Configuration",
    "Executor",
    "SweepPlan",
    "plan_of",
    "read_plan",
    "sweep",
    "sweep_svg",
    "sweep_text",
    "to_csv",
]

Executor = Literal["local", "ray"]
_Task = tuple[Configuration, str, str]


def sweep(
    source: str | os.PathLike[str] | Mapping[str, Any],
    output: str | os.PathLike[str] | None = None,
    *,
    jobs: int = 1,
    executor: Executor = "local",
    settings: Sequence[str] = (),
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Works out every configuration of a sweep that has no result yet, and ranks all.

    Args:
        source: The sweep file (docs/sweep.md), or its contents.
        output: The JSON lines to keep results in; beside the file with the ending `.results.jsonl` if not said.
        jobs: Configurations at a time (`local`).
        executor: `local`, or `ray` for a Ray cluster (the package `ray` must be installed).
        settings: `key=value` items that change the file, as `--set` takes them.
        retry_failed: Try again what has failed.
        progress: Where to show how far it is.

    Returns:
        The document of `prism sweep --json`: `results` (best first), `axes`, `finished`, `kept` and more.

    Raises:
        ConfigError: The file says something that cannot be. What goes wrong in a configuration is part of its result.
    """
    if executor not in ("local", "ray"):
        raise ConfigError(f"executor is {executor!r}: it must be local or ray")
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}: it must be at least 1")
    if isinstance(source, Mapping):
        if output is None:
            raise ConfigError("output is missing: a sweep without a file needs a place for its results")
        plan = plan_of(source, Path.cwd())
    else:
        plan = read_plan(Path(source), settings)
    kept_in = Path(output) if output is not None else Path(source).with_suffix(".results.jsonl")  # type: ignore[arg-type]
    known, damaged = read_records(kept_in)
    keys = {one.key(plan.folder): one for one in plan.configurations}
    if retry_failed:
        known = {key: record for key, record in known.items() if record["error"] is None}
    records = {key: known[key] for key in keys if key in known}
    kept = len(records)
    tasks = [(one, str(plan.folder.absolute()), key) for key, one in keys.items() if key not in known]
    with (progress or Progress(enabled=False)).task("sweep", len(tasks)) as advance:
        _append(kept_in, "", damaged > 0)
        for record in _run(tasks, executor, jobs):
            _append(kept_in, to_line(record))
            records[record["key"]] = record
            advance(record["name"])
    notes = (
        [f"{damaged} damaged lines of {kept_in} were left out, and their configurations worked out again"]
        if damaged
        else []
    )
    if plan.left_out:
        notes.append(f"sweep.require leaves out {plan.left_out} combinations")
    return {
        "axes": list(plan.axes), "configurations": len(keys), "finished": len(records), "kept": kept,
        "failed": sum(record["error"] is not None for record in records.values()), "output": str(kept_in),
        "results": ranked(records.values()), "notes": notes,
    }  # fmt: skip


def _append(path: Path, line: str, after_damage: bool = False) -> None:
    """Adds a line, at once on the disk; after half a line begins a new one."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * after_damage + line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _run(tasks: Sequence[_Task], executor: Executor, jobs: int) -> Iterator[dict[str, Any]]:
    """Records as they come."""
    if not tasks:
        return
    yield from _on_ray(tasks) if executor == "ray" else _here(tasks, jobs)


def _here(tasks: Sequence[_Task], jobs: int) -> Iterator[dict[str, Any]]:
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(work_out, *task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def _on_ray(tasks: Sequence[_Task]) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--executor ray needs the package ray: pip install ray, or use --executor local --jobs N")
    ray: Any = importlib.import_module("ray")
    with connected(ray):
        place, remote = here(), ray.remote(_there)
        waiting = [remote.remote(place, *task) for task in tasks]
        while waiting:
            done, waiting = ray.wait(waiting)
            yield ray.get(done[0])


def _there(place: Mapping[str, Any], configuration: Configuration, folder: str, key: str) -> dict[str, Any]:
    """The body of a task: as if it ran where the sweep was asked for."""
    go(place)
    return work_out(configuration, folder, key)


def write_tables(document: Mapping[str, Any], csv: Path | None, svg: Path | None, title: str) -> Iterable[Path]:
    """Writes the table and the picture that are asked for."""
    texts: list[tuple[Path | None, Callable[[], str]]] = [
        (csv, lambda: to_csv(document["results"], document["axes"])),
        (svg, lambda: sweep_svg(document["results"], title)),
    ]
    for path, text in texts:
        if path is not None:
            path.write_text(text(), encoding="utf-8")
            yield path
