"""The command line: `prism VERB`. Data on stdout, everything else on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from prism_core import doctor as examination
from prism_core import report as reports
from prism_core.calibrate import Sizes, calibrate_compute
from prism_core.cli_config import read_options
from prism_core.collect import collect as run_collect
from prism_core.config import DEFAULT_DEVICE, CollectConfig, EmulateConfig, parse_ranks, parse_slow
from prism_core.contents import contents_text
from prism_core.diagnose import diagnose as run_diagnose
from prism_core.diagnose import diagnose_text
from prism_core.difference import compare_graphs, difference_text
from prism_core.emulate import emulate as run_emulate
from prism_core.errors import PrismError, error_entry
from prism_core.export import export as run_export
from prism_core.export import export_chakra, export_text, export_timeline
from prism_core.imports.cli import add_commands as add_import_commands
from prism_core.kernels import import_kineto_kernels, table_report
from prism_core.layout_file import DEFAULT_PROFILE, estimate_document, estimate_text, read_layout
from prism_core.memory import card_bytes
from prism_core.messages import import_goal
from prism_core.nccl import parse_settings
from prism_core.overlap import calibrate_overlap, overlap_report
from prism_core.page.verb import say_report
from prism_core.profiles import list_profiles, list_text, profile_text, write_profile
from prism_core.progress import Progress, StderrHandler, wants_progress
from prism_core.replay import inspect as read_graph
from prism_core.replay import open_graph
from prism_core.replay import replay as run_replay
from prism_core.slicing import parse_part
from prism_core.spare.cli import app as spare_app
from prism_core.sweep import sweep as run_sweep
from prism_core.sweep import sweep_text, write_tables
from prism_core.version import version_text

app = typer.Typer(
    name="prism",
    help="Run any rank of a large training job on a few GPUs, or on none.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.add_typer(spare_app)
imports = typer.Typer(help="Store another tool's file in prism's own form.", no_args_is_help=True)
app.add_typer(imports, name="import")
calibrates = typer.Typer(help="Measure what the models rest on.", no_args_is_help=True)
app.add_typer(calibrates, name="calibrate")
add_import_commands(imports, calibrates)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Command = Annotated[list[str], typer.Argument(help="The training program, after `--`.", metavar="-- CMD ...")]
GraphPath = Annotated[Path, typer.Argument(help="The job's execution graph.", metavar="JOB.prism")]
AnyPath = Annotated[Path, typer.Argument(help="Execution graph or message program.", metavar="JOB.prism|JOB.goal")]
Slow = Annotated[list[str] | None, typer.Option("--slow", help="Slow a rank's compute.", metavar="RANK=FACTOR")]
Messages = Annotated[str, typer.Option(help="How finely rings are cut: fine or coarse.")]
RulesFile = Annotated[
    Path | None, typer.Option("--rules", help="Rules for values nobody computes.", metavar="FILE.toml|FILE.py")
]
StrictValues = Annotated[bool, typer.Option(help="End the run at the first unknown value the host reads.")]
Kernels = Annotated[
    list[Path] | None, typer.Option("--kernels", help="A kernel table: durations that need no model.", metavar="FILE")
]
HostTime = Annotated[str, typer.Option(help="The host's part of calls: constant, or measured CPU time.")]
ForkServer = Annotated[
    bool | None,
    typer.Option("--fork-server/--no-fork-server", help="Fork ranks from one import; default: from 4 ranks on."),
]
Card = Annotated[
    str | None, typer.Option(help="Another card's memory: 80GiB, or a profile's.", metavar="BYTES|PROFILE")
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Change an entry of the file.", metavar="KEY=VALUE")]
ShowProgress = Annotated[bool, typer.Option("--progress/--no-progress", help="A bar on stderr, if it is a terminal.")]
Perturb = Annotated[Path | None, typer.Option("--perturb", help="A file of perturbations.", metavar="FILE.toml")]


def _say(document: Mapping[str, Any], text: Callable[[Mapping[str, Any]], str], as_json: bool) -> None:
    sys.stdout.write(reports.to_json(document) if as_json else text(document) + "\n")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Is the preload really in place? Device, versions, limits."""
    document = examination.report(examination.examine())
    _say(document, reports.doctor_text, as_json)
    raise typer.Exit(0 if document["ok"] else 1)


@app.command()
def collect(
    command: Command,
    world_size: Annotated[int, typer.Option(help="Ranks of the job.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The graph to write.", metavar="JOB.prism")],
    device: Annotated[
        str, typer.Option(help="What ranks run on: emulated[:PROFILE] or host[:PROFILE].")
    ] = DEFAULT_DEVICE,
    ranks: Annotated[str, typer.Option(help="Ranks to run: auto, all, or a list.")] = "auto",
    verify: Annotated[int, typer.Option(help="Inferred ranks to check.", min=0)] = 2,
    role_tolerance: Annotated[
        float,
        typer.Option(help="Ranks that communicate alike and differ by so small a share are one.", min=0, max=1),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="For drawing the ranks to check.")] = 0,
    jobs: Annotated[int, typer.Option(help="Processes at a time; 0: one per CPU.", min=0)] = 0,
    exact: Annotated[bool, typer.Option(help="Ranks exchange real values, JOBS run at a time (host device).")] = False,
    rules: RulesFile = None,
    strict_values: StrictValues = False,
    kernels: Kernels = None,
    host_time: HostTime = "constant",
    fork_server: ForkServer = None,
    progress: ShowProgress = True,
    slice_size: Annotated[int, typer.Option("--slice", help="Ranks in play at a time; 0: as --jobs.", min=0)] = 0,
    slice_order: Annotated[str, typer.Option(help="ascending, descending or random (by --seed).")] = "ascending",
    part: Annotated[str | None, typer.Option(help="Run a share of the ranks only.", metavar="I/N")] = None,
    executor: Annotated[str, typer.Option(help="Who runs slices: local or ray.")] = "local",
    memory_limit: Annotated[int, typer.Option(help="MiB of recordings in memory.", min=1)] = 1024,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget ranks that an unfinished run has left.")] = False,
    as_json: Json = False,
) -> None:
    """Build the execution graph of all ranks by running a few."""
    config = CollectConfig(
        command=command, world_size=world_size, output=output, device=device, ranks=ranks, num_verified=verify,
        role_tolerance=role_tolerance, seed=seed,
        jobs=jobs, exact=exact, rules=rules, strict_values=strict_values, kernels=kernels or (),
        host_time=host_time, fork_server=fork_server, slice_size=slice_size, slice_order=slice_order, fresh=fresh,
        part=None if part is None else parse_part(part), memory_bytes=memory_limit << 20,
        executor=executor,
    )  # fmt: skip
    text = reports.collect_text if part is None else reports.part_text
    _say(run_collect(config, Progress(enabled=wants_progress(progress))), text, as_json)


@app.command()
def inspect(
    graph: AnyPath,
    sandbox: Annotated[str | None, typer.Option(help="List who exchanges data with these.", metavar="LIST")] = None,
    against: Annotated[Path | None, typer.Option(help="Compare op for op; exit code 1 if they differ.")] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Not compared: durations, host or memory.", metavar="WHAT")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is in a graph, or in what two graphs of a job differ."""
    if against is not None:
        compared = compare_graphs(graph, against, ignore or ())
        _say(compared, difference_text, as_json)
        raise typer.Exit(0 if compared["equal"] else 1)
    if sandbox is None:
        found = read_graph(graph)
    else:
        opened = open_graph(graph)
        found = read_graph(opened, parse_ranks(sandbox, opened.world_size))
    _say(found, contents_text, as_json)


@app.command()
def replay(
    graph: AnyPath,
    slow: Slow = None,
    perturb: Perturb = None,
    contention: Annotated[str, typer.Option(help="none, fair-share or fifo.")] = "none",
    overlap: Annotated[Path | None, typer.Option(help="Slower computing beside communication.", metavar="FILE")] = None,
    messages: Messages = "fine",
    profile: Annotated[
        str | None, typer.Option(help="Another cluster's network; computing stays.", metavar="PROFILE")
    ] = None,
    symmetry: Annotated[bool, typer.Option(help="Evaluate equal ranks once.")] = True,
    nccl: Annotated[
        list[str] | None, typer.Option(help="Another NCCL variable, e.g. NCCL_ALGO=Ring.", metavar="NAME=VALUE")
    ] = None,
    tuning: Annotated[str | None, typer.Option(help="Choose algorithms as nccl-VERSION, or fastest.")] = None,
    loggops: Annotated[
        str | None,
        typer.Option(
            help="For message programs, in ticks; the rest as in h100-sxm.", metavar="L=..,o=..,G=..,tick_ps=.."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute the iteration time of the whole job, all ranks virtual."""
    how: Any = {"contention": contention, "symmetry": symmetry, "overlap": overlap, "messages": messages}
    settings = parse_settings(nccl or [])
    result = run_replay(
        graph, slow=parse_slow(slow or []), perturb=perturb, nccl=settings, tuning=tuning, loggops=loggops,
        profile=profile, **how,
    )  # fmt: skip
    _say(result.to_dict(), reports.replay_text, as_json)


@imports.command("goal")
def import_goal_text(
    source: Annotated[Path, typer.Argument(help="LogGOPSim's GOAL text.", metavar="FILE.goal")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The program to write.", metavar="OUT.prism")],
    as_json: Json = False,
) -> None:
    """Store GOAL text as a message program."""
    _say(import_goal(source, output), reports.inspect_text, as_json)


@imports.command("kineto-kernels")
def import_kernels(
    traces: Annotated[list[Path], typer.Argument(help="Traces of torch.profiler.", metavar="TRACE.json[.gz]...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The table to write.", metavar="KERNELS.toml")],
    device_name: Annotated[str | None, typer.Option(help="The device, for traces that do not name it.")] = None,
    as_json: Json = False,
) -> None:
    """Make a kernel table from traces of a real device."""
    _say(import_kineto_kernels(traces, output, device_name), table_report, as_json)


@calibrates.command("compute")
def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", help="The table to write.", metavar="KERNELS.toml")],
    hidden: Annotated[int, typer.Option(min=1)] = 4096,
    ffn: Annotated[int, typer.Option(min=1)] = 14336,
    heads: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    vocab: Annotated[int, typer.Option(min=1)] = 128256,
    tokens: Annotated[int, typer.Option(help="Per microbatch.", min=1)] = 8192,
    seq: Annotated[int, typer.Option(min=1)] = 8192,
    tp: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp16 or fp32.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a kernel table on this machine's GPU."""
    sizes = Sizes(
        hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=vocab, tokens=tokens,
        seq=seq, tp=tp,
    )  # fmt: skip
    _say(calibrate_compute(output, sizes, dtype or ["bf16"]), table_report, as_json)


@calibrates.command("overlap")
def calibrate_beside_communication(
    sources: Annotated[
        list[Path],
        typer.Argument(help="Kernels alone and beside communication.", metavar="PAIRS.json|TRACE.json[.gz]..."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The table to write.", metavar="OVERLAP.toml")],
    as_json: Json = False,
) -> None:
    """Make factors for `replay --overlap` from kernels measured alone and beside communication."""
    _say(calibrate_overlap(sources, output), overlap_report, as_json)


@app.command()
def export(
    graph: GraphPath,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.", metavar="FILE")],
    format: Annotated[
        str,
        typer.Option(
            "--format", help="perfetto, chrome, csv, parquet: what ranks did when; goal, chakra: for simulators."
        ),
    ] = "perfetto",
    ranks: Annotated[str | None, typer.Option(help="Which ranks (not goal), e.g. 0,5,8-11.", metavar="LIST")] = None,
    slow: Slow = None,
    perturb: Perturb = None,
    messages: Messages = "coarse",
    tick_ps: Annotated[int, typer.Option(help="Picoseconds per unit of time.", min=1)] = 1000,
    rendezvous: Annotated[bool, typer.Option(help="Messages between two ranks wait for both.")] = True,
    as_json: Json = False,
) -> None:
    """Write what ranks did when for a trace viewer, or the job as messages for another simulator."""
    chosen = parse_ranks(ranks, open_graph(graph).world_size) if ranks is not None else None
    if format == "chakra":
        document = export_chakra(graph, output, chosen)
    elif format == "goal":
        document = run_export(graph, output, messages=messages, tick_ps=tick_ps, rendezvous=rendezvous)  # type: ignore[arg-type]
    else:
        document = export_timeline(
            graph, output, format, ranks=chosen, slow=parse_slow(slow or []), perturb=perturb,  # type: ignore[arg-type]
        )  # fmt: skip
    _say(document, export_text, as_json)


@app.command()
def emulate(
    graph: GraphPath,
    command: Command,
    sandbox: Annotated[str, typer.Option(help="Ranks that run the program, e.g. 0,5.", metavar="LIST")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The run folder to write.", metavar="RUN")],
    slow: Slow = None,
    perturb: Perturb = None,
    device: Annotated[str | None, typer.Option(help="Another device than the graph's, e.g. real.")] = None,
    max_release_error: Annotated[
        float, typer.Option(help="On a real device: how late streams may be released, us.", metavar="US")
    ] = 200.0,
    jobs: Annotated[int, typer.Option(help="Sandbox ranks that run at a time (host device); 0: all.", min=0)] = 0,
    rules: RulesFile = None,
    strict_values: StrictValues = False,
    kernels: Kernels = None,
    host_time: HostTime = "constant",
    fork_server: ForkServer = None,
    record: Annotated[
        Path | None, typer.Option(help="Write the graph of what ran (every rank is a sandbox).", metavar="JOB.prism")
    ] = None,
    progress: ShowProgress = True,
    as_json: Json = False,
) -> None:
    """Run the program as some ranks of the job, against the graph."""
    config = EmulateConfig(
        graph=graph, command=command, sandbox=parse_ranks(sandbox, open_graph(graph).world_size), output=output,
        slow=parse_slow(slow or []), perturb=perturb, device=device, jobs=jobs, rules=rules,
        max_release_error_us=max_release_error, strict_values=strict_values, kernels=kernels or (), host_time=host_time,
        fork_server=fork_server,
        record=record,
    )  # fmt: skip
    _say(run_emulate(config, Progress(enabled=wants_progress(progress))), reports.emulate_text, as_json)


@app.command()
def diagnose(
    source: Annotated[Path, typer.Argument(help="A graph or a run folder.", metavar="JOB.prism|RUN")],
    slow: Slow = None,
    perturb: Perturb = None,
    iteration: Annotated[int | None, typer.Option(help="Which, from 0; the last by default.", min=0)] = None,
    sensitivities: Annotated[bool, typer.Option(help="Replay again with single things slower.")] = True,
    card: Card = None,
    as_json: Json = False,
) -> None:
    """Explain a hang, a lack of memory or an iteration time, the culprit first."""
    found = run_diagnose(
        source, slow=parse_slow(slow or []), perturb=perturb, iteration=iteration, sensitivities=sensitivities,
        card_bytes=card_bytes(card),
    )  # fmt: skip
    _say(found, diagnose_text, as_json)


@app.command()
def report(
    source: Annotated[Path, typer.Argument(help="A run folder or a graph.", metavar="RUN|JOB.prism")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write one HTML page here.", metavar="FILE.html")
    ] = None,
    graph: Annotated[
        Path | None, typer.Option(help="The graph of a run, if it is elsewhere now.", metavar="JOB.prism")
    ] = None,
    slow: Slow = None,
    perturb: Perturb = None,
    iteration: Annotated[int | None, typer.Option(help="Which, from 0; the last by default.", min=0)] = None,
    card: Card = None,
    as_json: Json = False,
) -> None:
    """Report on a run or a job: as text, as JSON, or as a self-contained HTML page."""
    how = {"slow": parse_slow(slow or []), "perturb": perturb, "iteration": iteration, "card_bytes": card_bytes(card)}
    say_report(source, output, graph, {key: value for key, value in how.items() if value}, as_json)


@app.command("sweep")
def sweep_configurations(
    source: Annotated[Path, typer.Argument(help="What to try.", metavar="SWEEP.toml")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where results are kept.", metavar="FILE.jsonl")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Configurations at a time.", min=1)] = 1,
    executor: Annotated[str, typer.Option(help="local, or ray for a Ray cluster.")] = "local",
    settings: Settings = None,
    retry_failed: Annotated[bool, typer.Option(help="Try again what has failed.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the table here.", metavar="FILE.csv")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write a picture here.", metavar="FILE.svg")] = None,
    progress: ShowProgress = True,
    as_json: Json = False,
) -> None:
    """Try many configurations of a program or a graph, and rank them by iteration time and fit."""
    found = run_sweep(
        source, output, jobs=jobs, executor=executor, settings=settings or (),  # type: ignore[arg-type]
        retry_failed=retry_failed, progress=Progress(enabled=wants_progress(progress)),
    )  # fmt: skip
    for path in write_tables(found, csv, svg, source.stem):
        logging.info("wrote %s", path)
    _say(found, sweep_text, as_json)


@app.command()
def estimate(
    source: Annotated[Path, typer.Argument(help="A model and its layout.", metavar="LAYOUT.toml")],
    device: Annotated[
        str | None, typer.Option(help="Device profile, or a file of one; default: the file's.", metavar="PROFILE")
    ] = None,
    kernels: Kernels = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Step time of a dense transformer in a layout nobody has a program of: from models alone."""
    layout, named = read_layout(source, settings or ())
    _say(estimate_document(layout, device or named or DEFAULT_PROFILE, kernels or ()), estimate_text, as_json)


@app.command()
def profile(
    name: Annotated[str | None, typer.Argument(help="Print this one.", metavar="[PROFILE]")] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write it here, for a cluster of your own.", metavar="FILE.toml"),
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """List the devices there are, or print one's profile: GPU, machine and network, with the source of every number."""
    if name is None:
        if output is not None or settings:
            raise typer.BadParameter("which profile? prism profile lists them", param_hint="PROFILE")
        _say(list_profiles(), list_text, as_json)
    elif output is None:
        document = {"profile": name, "toml": profile_text(name, settings or ())}
        _say(document, lambda found: str(found["toml"]).rstrip("\n"), as_json)
    else:
        _say(write_profile(name, output, settings or ()), lambda found: f"wrote {found['output']}", as_json)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="Options of commands, a table for each.", metavar="FILE.toml")
    ] = None,
    settings: Settings = None,
    version: Annotated[bool, typer.Option("--version", help="Print version and build, and leave.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="More on stderr.")] = False,
) -> None:
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(level=level, handlers=[StderrHandler()], format="prism: %(message)s", force=True)
    if version:
        sys.stdout.write(version_text() + "\n")
        raise typer.Exit
    if config is not None or settings:
        context.default_map = read_options(config, settings or (), context.command)


#: Exit code of an interrupted command: 128 + SIGINT.
_INTERRUPTED = 130


def main() -> NoReturn:
    """Entry point: errors become one line, or one JSON document with `--json`, and an exit code."""
    arguments = sys.argv[1:]
    as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="prism", standalone_mode=False)
        if code == _INTERRUPTED:  # typer has caught it
            sys.stderr.write("prism: interrupted\n")
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("prism: interrupted\n")
        code = _INTERRUPTED
    except Exception as error:
        if not isinstance(error, (PrismError, OSError)) and not _is_usage_error(error):
            raise
        code = _report_error(error, as_json)
    raise SystemExit(code)


def _is_usage_error(error: Exception) -> bool:
    """Tells whether the command line itself is wrong (an exception of typer's own)."""
    return hasattr(error, "format_message")


def _report_error(error: Any, as_json: bool) -> int:
    """Says what went wrong; returns the exit code."""
    if _is_usage_error(error):
        hint = f"{error.ctx.command_path} --help lists what there is" if getattr(error, "ctx", None) else None
        entry, code = {"kind": "UsageError", "message": error.format_message()}, error.exit_code
        entry |= {"hint": hint} if hint else {}
    else:
        entry, code = error_entry(error), 1
    if as_json:
        sys.stdout.write(reports.to_json({"error": entry}))
    sys.stderr.write(f"prism: error: {entry['message']}\n")
    if "hint" in entry:
        sys.stderr.write(f"prism: hint: {entry['hint']}\n")
    return int(entry.get("returncode") or code)


if __name__ == "__main__":
    main()
