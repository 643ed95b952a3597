"""`prism import`: traces of other tools."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from prism_core import report as reports
from prism_core.errors import ConfigError
from prism_core.imports.chakra import import_chakra
from prism_core.imports.kineto import import_kineto
from prism_core.imports.network import calibrate_comm, calibrate_text
from prism_core.imports.simai import import_simai
from prism_core.imports.text import chakra_text, kineto_text, simai_text

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Sources = Annotated[list[Path], typer.Argument(help="Traces, or folders of them.", metavar="DIR|FILES...")]
Output = Annotated[Path, typer.Option("-o", "--output", help="The graph to write.", metavar="JOB.prism")]
ShowProgress = Annotated[bool, typer.Option("--progress/--no-progress", help="A bar on stderr, if it is a terminal.")]
ProfileName = Annotated[str | None, typer.Option("--profile", help="The network: a built-in profile or a TOML file.")]


def _say(document: Mapping[str, Any], text: Callable[[Mapping[str, Any]], str], as_json: bool) -> None:
    sys.stdout.write(reports.to_json(document) if as_json else text(document) + "\n")


def _ranks(entries: Sequence[str]) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for entry in entries:
        name, separator, rank = entry.rpartition("=")
        if not separator or not rank.isdigit():
            raise ConfigError(f"--rank is {entry!r}: it must be FILE=RANK")
        ranks[Path(name).name] = int(rank)
    return ranks


def kineto(
    sources: Sources,
    output: Output,
    rank: Annotated[list[str] | None, typer.Option(help="Which rank a file is of.", metavar="FILE=RANK")] = None,
    world_size: Annotated[int | None, typer.Option(help="Ranks of the job.", min=1)] = None,
    profile: ProfileName = None,
    keep_unmatched: Annotated[bool, typer.Option(help="NCCL kernels that fit to nothing become computations.")] = False,
    execution_traces: Annotated[
        list[Path] | None, typer.Option(help="PyTorch's execution traces of the same ranks.", metavar="DIR|FILE")
    ] = None,
    progress: ShowProgress = True,
    as_json: Json = False,
) -> None:
    """Make a graph of torch.profiler's traces, one per rank."""
    _, document = import_kineto(
        sources, output, ranks=_ranks(rank or []), world_size=world_size, profile=profile,
        keep_unmatched=keep_unmatched, execution_traces=execution_traces or (), progress=progress,
    )  # fmt: skip
    _say(document, kineto_text, as_json)


def chakra(
    sources: Sources,
    output: Output,
    world_size: Annotated[int | None, typer.Option(help="Ranks of the job.", min=1)] = None,
    groups: Annotated[Path | None, typer.Option(help="Members of process groups.", metavar="FILE.json")] = None,
    profile: ProfileName = None,
    as_json: Json = False,
) -> None:
    """Make a graph of Chakra execution traces, one per rank."""
    _, document = import_chakra(sources, output, world_size=world_size, groups=groups, profile=profile)
    _say(document, chakra_text, as_json)


def simai(
    source: Annotated[Path, typer.Argument(help="A workload of AICB for SimAI.", metavar="FILE.txt")],
    output: Output,
    world_size: Annotated[int | None, typer.Option(help="Ranks of the job.", min=1)] = None,
    expert_parallel: Annotated[int | None, typer.Option(help="Expert-parallel degree.", min=1)] = None,
    iterations: Annotated[int, typer.Option(help="Passes in a row.", min=1)] = 1,
    profile: ProfileName = None,
    as_json: Json = False,
) -> None:
    """Make a graph of a SimAI workload."""
    _, document = import_simai(
        source, output, world_size=world_size, expert_parallel=expert_parallel, iterations=iterations, profile=profile,
    )  # fmt: skip
    _say(document, simai_text, as_json)


def comm(
    logs: Annotated[list[Path], typer.Argument(help="nccl-tests output, NCCL Inspector JSON.", metavar="LOG...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The profile to write.", metavar="PROFILE.toml")],
    profile: Annotated[str, typer.Option(help="The profile to start from.")] = "h100-sxm",
    collective: Annotated[str | None, typer.Option(help="For files that do not tell, e.g. all_reduce.")] = None,
    ranks: Annotated[int | None, typer.Option(help="For files that do not tell.", min=2)] = None,
    nodes: Annotated[int | None, typer.Option(help="For files that do not tell.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Fit a profile's network to measured collectives."""
    document = calibrate_comm(logs, output, profile=profile, collective=collective, ranks=ranks, nodes=nodes)
    _say(document, calibrate_text, as_json)


def add_commands(app: typer.Typer, calibrates: typer.Typer) -> None:
    """Adds the commands of this module to `prism import` and `prism calibrate`."""
    app.command("simai")(simai)
    calibrates.command("comm")(comm)
    app.command("kineto")(kineto)
    app.command("chakra")(chakra)
