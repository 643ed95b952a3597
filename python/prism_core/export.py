"""Export: a job in the form of another tool."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from prism_core import _native
from prism_core.config import check_ranks, check_slow
from prism_core.errors import ConfigError
from prism_core.perturb import Perturb, perturbation_text
from prism_core.replay import Messages, open_graph

Format = Literal["goal"]
TimelineFormat = Literal["perfetto", "chrome", "csv", "parquet"]
#: Ranks in a timeline if nobody says which.
_DEFAULT_RANKS = 8


def export(
    graph_or_path: _native.Graph | str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: Format = "goal",
    *,
    messages: Messages = "coarse",
    tick_ps: int = 1000,
    rendezvous: bool = True,
) -> dict[str, Any]:
    """Writes a job as a program of calculations, sends and receives, in GOAL text as LogGOPSim reads it.

    Sizes are kept, links are not: the reader's network carries everything alike. `docs/contention.md` says what else
    a message program cannot tell.

    Args:
        graph_or_path: The graph, or the path of its file.
        output: The file to write.
        format: `goal`.
        messages: `coarse` has one message per ring step, `fine` cuts rings as NCCL does.
        tick_ps: Picoseconds per unit of time in the file; durations are rounded to it.
        rendezvous: Mark messages between two ranks as rendezvous (a comment other readers skip).

    Returns:
        What was written: `ranks`, `ops`, `sends`, `sent_bytes`, `tick_ps`, `file_bytes`.

    Raises:
        ConfigError: The format is unknown, an option is out of range, or the job is too large.
        OSError: The file cannot be written.
    """
    if format != "goal":
        raise ConfigError(f"format is {format!r}: it must be goal")
    if isinstance(tick_ps, bool) or not isinstance(tick_ps, int) or tick_ps < 1:
        raise ConfigError(f"tick_ps is {tick_ps!r}: it must be a whole number of at least 1")
    graph = graph_or_path if isinstance(graph_or_path, _native.Graph) else open_graph(graph_or_path)
    options = {"messages": messages, "tick_ps": tick_ps, "rendezvous": rendezvous}
    document: dict[str, Any] = json.loads(_native.export_goal(graph, str(output), json.dumps(options)))
    return {"output": str(output), **document, "file_bytes": Path(output).stat().st_size}


def export_timeline(
    graph_or_path: _native.Graph | str | os.PathLike[str],
    output: str | os.PathLike[str],
    format: TimelineFormat = "perfetto",
    *,
    ranks: Sequence[int] | None = None,
    slow: Mapping[int, float] | None = None,
    perturb: Perturb | None = None,
) -> dict[str, Any]:
    """Writes what some ranks of a job do when, replayed among all its ranks, for a trace viewer.

    Args:
        graph_or_path: The graph, or the path of its file.
        output: The file to write.
        format: `perfetto` (protobuf), `chrome` (JSON; chrome://tracing, Perfetto, Holistic Trace Analysis), `csv` or
            `parquet` (one row per op; `parquet` needs pyarrow).
        ranks: Which ranks; the first eight if not said.
        slow: Slow-down of single ranks' compute, for example `{4242: 1.3}`.
        perturb: Changes to the job, as for `prism_core.replay`.

    Returns:
        What was written: `ranks`, `slices`, `marks`, `memory_changes`, `file_bytes`.

    Raises:
        ConfigError: The format is unknown, a rank is none of the job's, or the job is too large for a timeline.
        OSError: The file cannot be written.
    """
    if format == "parquet":
        return export_parquet(graph_or_path, output, ranks=ranks, slow=slow, perturb=perturb)
    graph = graph_or_path if isinstance(graph_or_path, _native.Graph) else open_graph(graph_or_path)
    options = {
        "format": format,
        "ranks": check_ranks(
            range(min(_DEFAULT_RANKS, graph.world_size)) if ranks is None else ranks, graph.world_size
        ),
        "slow": check_slow(slow or {}, graph.world_size),
        "perturb": perturbation_text(perturb),
    }
    document: dict[str, Any] = json.loads(_native.export_timeline(graph, str(output), json.dumps(options)))
    return {"output": str(output), **document, "file_bytes": Path(output).stat().st_size}


def export_parquet(
    graph_or_path: _native.Graph | str | os.PathLike[str], output: str | os.PathLike[str], **how: Any
) -> dict[str, Any]:
    """Writes the table of `export_timeline(format="csv")` as Parquet: same columns, typed. Needs pyarrow.

    Raises:
        ConfigError: pyarrow is not installed, or as for `export_timeline`.
        OSError: The file cannot be written.
    """
    try:
        arrow = importlib.import_module("pyarrow")
        csv = importlib.import_module("pyarrow.csv")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow (pip install pyarrow); --format csv does without") from error
    wide = {"start_ns", "end_ns", "duration_ns", "bytes"}
    texts = {"kind", "name"}
    columns = ["rank", "stream", "kind", "name", "start_ns", "end_ns", "duration_ns", "comm", "members", "bytes"]
    types = {
        name: arrow.int64() if name in wide else arrow.string() if name in texts else arrow.int32() for name in columns
    }
    with tempfile.TemporaryDirectory(prefix="prism-") as folder:
        table = Path(folder) / "table.csv"
        document = export_timeline(graph_or_path, table, "csv", **how)
        convert = csv.ConvertOptions(column_types=types, strings_can_be_null=False)
        schema = arrow.schema(list(types.items()))
        with csv.open_csv(table, convert_options=convert) as reader, parquet.ParquetWriter(output, schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
    return {**document, "output": str(output), "file_bytes": Path(output).stat().st_size}


def export_chakra(
    graph_or_path: _native.Graph | str | os.PathLike[str],
    output: str | os.PathLike[str],
    ranks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Writes ranks as Chakra execution traces, `OUTPUT.RANK.et`, and the members of groups as `OUTPUT.groups.json`.

    Args:
        graph_or_path: The graph, or the path of its file.
        output: Beginning of the files' names.
        ranks: Which ranks; all if not said.

    Returns:
        What was written: `ranks`, `nodes`, `communications`, `left_out` (ops the schema has nothing for), `file_bytes`.

    Raises:
        ConfigError: A rank is none of the job's.
        OSError: A file cannot be written.
    """
    graph = graph_or_path if isinstance(graph_or_path, _native.Graph) else open_graph(graph_or_path)
    chosen = check_ranks(range(graph.world_size) if ranks is None else ranks, graph.world_size)
    document: dict[str, Any] = json.loads(_native.export_chakra(graph, os.fspath(output), chosen))
    return {"output": os.fspath(output), **document}


def export_text(document: Mapping[str, Any]) -> str:
    """What `prism export` prints."""
    if "nodes" in document:
        size = document["file_bytes"] / (1 << 20)
        return f"{document['output']}.*.et: {document['nodes']:,} nodes of {document['ranks']:,} ranks, {size:.1f} MiB"
    if "slices" in document:
        size = document["file_bytes"] / (1 << 20)
        return f"{document['output']}: {document['slices']:,} slices of {document['ranks']:,} ranks, {size:.1f} MiB"
    counts = f"{document['ops']:,} ops of {document['ranks']:,} ranks, {document['sends']:,} messages"
    size = document["file_bytes"] / (1 << 20)
    return f"{document['output']}: {counts}, {size:.1f} MiB, 1 tick = {document['tick_ps']} ps"
