"""`prism spare`: plan, simulate, sweep, and from a collected job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from prism_core import report as reports
from prism_core.errors import ConfigError
from prism_core.spare import job, planning, plots, tables, traces
from prism_core.spare.document import plan_html
from prism_core.spare.laws import PlacementLike
from prism_core.spare.options import Details, LocalCheckpoints
from prism_core.spare.published import published as run_published
from prism_core.spare.published import published_text
from prism_core.spare.text import job_text, plan_text, replayed_text, simulate_text
from prism_core.units import byte_count, bytes_per_second, seconds

app = typer.Typer(
    name="spare", help="Plan and simulate fault-tolerant training.", no_args_is_help=True, add_completion=False
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Groups = Annotated[int, typer.Option(help="Model-parallel groups (and shard types).")]
MtbfSystem = Annotated[str | None, typer.Option(help="Mean time between failures of any group.", metavar="TIME")]
MtbfGroup = Annotated[str | None, typer.Option(help="Mean time between failures of one group.", metavar="TIME")]
Restart = Annotated[str, typer.Option(help="Time to restart from a checkpoint.", metavar="TIME")]
Checkpoint = Annotated[str | None, typer.Option(help="Time to write a checkpoint.", metavar="TIME")]
Size = Annotated[str | None, typer.Option(help="Size of a checkpoint, instead of its time.", metavar="BYTES")]
Bandwidth = Annotated[str | None, typer.Option(help="Bandwidth to the storage.", metavar="BYTES/s")]
Step = Annotated[str | None, typer.Option(help="Compute of one step without redundancy.", metavar="TIME")]
AllReduce = Annotated[str, typer.Option(help="All-reduce of one step.", metavar="TIME")]
Steps = Annotated[int | None, typer.Option(help="Optimiser steps of the training.", min=1)]
Shape = Annotated[float | None, typer.Option(help="Weibull shape of the failures; exponential by default.")]
Jitter = Annotated[float, typer.Option(help="Relative standard deviation of the compute of an entry.")]
Seeds = Annotated[int, typer.Option(help="Simulated trainings.", min=1)]
Detection = Annotated[str, typer.Option(help="Until a failure is noticed.", metavar="TIME")]
Repair = Annotated[str | None, typer.Option(help="Until a failed group is whole again.", metavar="TIME")]
Spares = Annotated[
    int, typer.Option(help="Spare groups, for the policy that uses them; `plan` tries fewer, too.", min=0)
]
Stall = Annotated[str | None, typer.Option(help="How long a save holds the job; all of it by default.", metavar="TIME")]
Rejoin = Annotated[str, typer.Option(help="How long all wait when a repaired group joins again.", metavar="TIME")]
Domains = Annotated[
    list[str] | None,
    typer.Option("--domain", help="Neighbouring groups that fail together, and how often.", metavar="GROUPS:TIME"),
]
Local = Annotated[
    str | None,
    typer.Option(help="Checkpoints on the groups' machines.", metavar="SAVE:STEPS:RESTART:SHARE"),
]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="Observed failures.", metavar="FILE.csv")]
GraphPath = Annotated[Path, typer.Argument(help="The job's execution graph.", metavar="JOB.prism")]
JobGroups = Annotated[int | None, typer.Option("--groups", help="How many groups the job must have.", min=2)]
ReportFile = Annotated[Path | None, typer.Option("--report", help="Also write a report.", metavar="FILE.html")]


def _details(domains: list[str] | None, local: str | None, trace: Path | None, rejoin: str = "0s") -> Details:
    details: Details = {"rejoin_s": seconds(rejoin, "--rejoin")}
    if domains:
        pairs = [text.partition(":") for text in domains]
        if wrong := [text for text, pair in zip(domains, pairs, strict=True) if not pair[0].isdigit() or not pair[2]]:
            raise ConfigError(f"--domain is {wrong[0]!r}: it must be groups and a time, such as 8:30d")
        details["domains"] = [(int(count), seconds(every, "--domain")) for count, _, every in pairs]
    if local is not None:
        try:
            save, steps, restart, share = local.split(":")
            parts = (int(steps), float(share))
        except ValueError:
            raise ConfigError(
                f"--local is {local!r}: it must be the time to save, steps between saves, the time to restart and the"
                " share of restarts it serves, such as 5s:10:2min:0.8"
            ) from None
        details["local"] = LocalCheckpoints(
            save_s=seconds(save, "--local"), checkpoint_steps=parts[0], restart_s=seconds(restart, "--local"),
            share=parts[1],
        )  # fmt: skip
    if trace is not None:
        details["trace"] = traces.read_trace(trace)
    return details


def _save(checkpoint: str | None, size: str | None, bandwidth: str | None) -> float:
    if checkpoint is not None and (size or bandwidth):
        raise ConfigError("--checkpoint is a time: give it, or --checkpoint-size and --checkpoint-bandwidth, not both")
    if checkpoint is not None:
        return seconds(checkpoint, "--checkpoint")
    if size is None or bandwidth is None:
        raise ConfigError("--checkpoint is missing (or --checkpoint-size and --checkpoint-bandwidth)")
    return byte_count(size, "--checkpoint-size") / bytes_per_second(bandwidth, "--checkpoint-bandwidth")


def _time(text: str | None, field: str) -> float | None:
    return None if text is None else seconds(text, field)


def _placement(text: str) -> PlacementLike:
    if not any(character.isdigit() for character in text):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--placement is {text!r}: it must be a name, or offsets such as 0,1,4,6") from None


def _say(document: Mapping[str, Any], text: str, as_json: bool) -> None:
    sys.stdout.write(reports.to_json(document) if as_json else text + "\n")


@app.command()
def plan(
    groups: Groups,
    restart: Restart,
    mtbf_system: MtbfSystem = None,
    mtbf_group: MtbfGroup = None,
    checkpoint: Checkpoint = None,
    checkpoint_size: Size = None,
    checkpoint_bandwidth: Bandwidth = None,
    step: Step = None,
    all_reduce: AllReduce = "0s",
    steps: Steps = None,
    gpus_per_group: Annotated[int | None, typer.Option(help="GPUs of a group.", min=1)] = None,
    cost_per_gpu_hour: Annotated[float | None, typer.Option(help="Price, for the cost.", min=0)] = None,
    max_redundancy: Annotated[int, typer.Option(help="Largest redundancy to consider.", min=2)] = 28,
    weibull_shape: Shape = None,
    jitter: Jitter = 0.0,
    detection: Detection = "0s",
    repair: Repair = None,
    spares: Spares = 0,
    domain: Domains = None,
    stall: Stall = None,
    rejoin: Rejoin = "0s",
    local: Local = None,
    trace: TraceFile = None,
    seeds: Seeds = 32,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Recommend redundancy, placement and checkpoint interval."""
    found = planning.plan(
        groups, save_s=_save(checkpoint, checkpoint_size, checkpoint_bandwidth),
        restart_s=seconds(restart, "--restart"), compute_s=_time(step, "--step"), steps=steps,
        all_reduce_s=seconds(all_reduce, "--all-reduce"),
        group_mtbf_s=_time(mtbf_group, "--mtbf-group"), system_mtbf_s=_time(mtbf_system, "--mtbf-system"),
        weibull_shape=weibull_shape, jitter=jitter, detection_s=seconds(detection, "--detection"),
        repair_s=_time(repair, "--repair"), spares=spares, stall_s=_time(stall, "--stall"),
        redundancy=(2, max_redundancy), gpus_per_group=gpus_per_group, cost_per_gpu_hour=cost_per_gpu_hour, seeds=seeds,
        timeline=report is not None, **_details(domain, local, trace, rejoin),
    )  # fmt: skip
    if report is not None:
        report.write_text(plan_html(found), encoding="utf-8")
    _say(found, plan_text(found), as_json)


@app.command()
def simulate(
    groups: Groups,
    restart: Restart,
    step: Annotated[str, typer.Option(help="Compute of one stack entry.", metavar="TIME")],
    steps: Annotated[int, typer.Option(help="Optimiser steps of the training.", min=1)],
    checkpoint_steps: Annotated[int, typer.Option(help="Steps between checkpoints.", min=1)],
    policy: Annotated[str, typer.Option(help="spare, replication, checkpoint, elastic or spares.")] = "spare",
    redundancy: Annotated[int | None, typer.Option("-r", "--redundancy", help="Hosts of a type.", min=1)] = None,
    placement: Annotated[str, typer.Option(help="golomb, contiguous, disjoint, random, or offsets.")] = "golomb",
    mtbf_system: MtbfSystem = None,
    mtbf_group: MtbfGroup = None,
    checkpoint: Checkpoint = None,
    checkpoint_size: Size = None,
    checkpoint_bandwidth: Bandwidth = None,
    all_reduce: AllReduce = "0s",
    weibull_shape: Shape = None,
    jitter: Jitter = 0.0,
    detection: Detection = "0s",
    repair: Repair = None,
    spares: Spares = 0,
    domain: Domains = None,
    stall: Stall = None,
    rejoin: Rejoin = "0s",
    local: Local = None,
    trace: TraceFile = None,
    restart_square: Annotated[str, typer.Option(help="More per restart, for groups squared.", metavar="TIME")] = "0s",
    restart_storms: Annotated[bool, typer.Option(help="A failure in a restart makes all begin anew.")] = False,
    published: Annotated[bool, typer.Option(help="With the handicaps of the published baseline.")] = False,
    timeline: Annotated[Path | None, typer.Option(help="Draw the first training.", metavar="FILE.svg|.png")] = None,
    seeds: Seeds = 32,
    as_json: Json = False,
) -> None:
    """Simulate the training under one policy."""
    details = _details(domain, local, trace, rejoin)
    details |= {
        "restart_square_s": seconds(restart_square, "--restart-square"), "restarts_together": restart_storms,
    }  # fmt: skip
    found = planning.simulate(
        groups, compute_s=seconds(step, "--step"), steps=steps, checkpoint_steps=checkpoint_steps,
        save_s=_save(checkpoint, checkpoint_size, checkpoint_bandwidth), restart_s=seconds(restart, "--restart"),
        all_reduce_s=seconds(all_reduce, "--all-reduce"), policy=policy,  # type: ignore[arg-type]
        r=redundancy, placement=_placement(placement), group_mtbf_s=_time(mtbf_group, "--mtbf-group"),
        system_mtbf_s=_time(mtbf_system, "--mtbf-system"), weibull_shape=weibull_shape, jitter=jitter,
        detection_s=seconds(detection, "--detection"), repair_s=_time(repair, "--repair"), spares=spares,
        published=published, seeds=seeds, stall_s=_time(stall, "--stall"), timeline=timeline is not None,
        **details,
    )  # fmt: skip
    if timeline is not None:
        plots.save_timeline(found["timeline"], timeline, groups=groups, title=policy)
    _say(found, simulate_text(found["summary"], policy, redundancy), as_json)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr; none where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@app.command()
def sweep(
    groups: Annotated[list[int], typer.Option(help="Model-parallel groups; may be given often.")],
    restart: Annotated[list[str], typer.Option(help="Time to restart; may be given often.", metavar="TIME")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The table to write.", metavar="FILE.csv|.parquet")],
    mtbf_system: Annotated[list[str], typer.Option(help="Mean time between failures; may be given often.")],
    checkpoint: Checkpoint = None,
    checkpoint_size: Size = None,
    checkpoint_bandwidth: Bandwidth = None,
    max_redundancy: Annotated[int, typer.Option(help="Largest redundancy to consider.", min=1)] = 28,
    step: Annotated[str | None, typer.Option(help="Compute of an entry: simulate, too.", metavar="TIME")] = None,
    all_reduce: AllReduce = "0s",
    steps: Steps = None,
    repair: Repair = None,
    seeds: Seeds = 8,
    plot: Annotated[Path | None, typer.Option(help="Draw the frontier.", metavar="FILE.svg|.png")] = None,
) -> None:
    """Tabulate closed forms, and simulations if there is a step time, over inputs, redundancies and placements."""
    tables.check_table(output)
    with _progress("sweep") as progress:
        table = tables.sweep(
            groups, [seconds(text, "--mtbf-system") for text in mtbf_system],
            [seconds(text, "--restart") for text in restart],
            save_s=_save(checkpoint, checkpoint_size, checkpoint_bandwidth), redundancy=(1, max_redundancy),
            compute_s=_time(step, "--step"), all_reduce_s=seconds(all_reduce, "--all-reduce"), steps=steps, seeds=seeds,
            repair_s=_time(repair, "--repair"), progress=progress,
        )  # fmt: skip
    count = tables.write_table(table, output)
    if plot is not None:
        plots.save_frontier(tables.curves(table), plot)
    sys.stderr.write(f"prism: {count} rows in {output}\n")


@app.command("from")
def from_job(
    graph: GraphPath,
    restart: Restart,
    groups: JobGroups = None,
    mtbf_system: MtbfSystem = None,
    mtbf_group: MtbfGroup = None,
    checkpoint: Checkpoint = None,
    checkpoint_size: Size = None,
    checkpoint_bandwidth: Bandwidth = None,
    bytes_per_parameter: Annotated[float | None, typer.Option(help="Size of a checkpoint per parameter.")] = None,
    data_per_type: Annotated[str | None, typer.Option(help="Data of a type on a card.", metavar="BYTES")] = None,
    steps: Steps = None,
    cost_per_gpu_hour: Annotated[float | None, typer.Option(help="Price, for the cost.", min=0)] = None,
    max_redundancy: Annotated[int, typer.Option(help="Largest redundancy to consider.", min=2)] = 28,
    weibull_shape: Shape = None,
    jitter: Jitter = 0.0,
    detection: Detection = "0s",
    repair: Repair = None,
    spares: Spares = 0,
    domain: Domains = None,
    trace: TraceFile = None,
    seeds: Seeds = 32,
    report: ReportFile = None,
    as_json: Json = False,
) -> None:
    """Plan for a collected job: step time, reduction, memory and checkpoint from its graph."""
    found = job.plan_job(
        graph, groups=groups, checkpoint_s=_time(checkpoint, "--checkpoint"),
        checkpoint_bytes=None if checkpoint_size is None else byte_count(checkpoint_size, "--checkpoint-size"),
        bytes_per_parameter=bytes_per_parameter,
        storage_bytes_per_s=None
        if checkpoint_bandwidth is None
        else bytes_per_second(checkpoint_bandwidth, "--checkpoint-bandwidth"),
        data_bytes_per_type=None if data_per_type is None else byte_count(data_per_type, "--data-per-type"),
        restart_s=seconds(restart, "--restart"), group_mtbf_s=_time(mtbf_group, "--mtbf-group"),
        system_mtbf_s=_time(mtbf_system, "--mtbf-system"), steps=steps, weibull_shape=weibull_shape, jitter=jitter,
        detection_s=seconds(detection, "--detection"), repair_s=_time(repair, "--repair"), spares=spares,
        cost_per_gpu_hour=cost_per_gpu_hour, redundancy=(2, max_redundancy), seeds=seeds,
        timeline=report is not None, **_details(domain, None, trace),
    )  # fmt: skip
    if report is not None:
        report.write_text(plan_html(found), encoding="utf-8")
    _say(found, job_text(found) + "\n\n" + plan_text(found), as_json)


@app.command()
def replay(
    graph: GraphPath,
    fail: Annotated[list[str], typer.Option(help="Groups that die in an iteration.", metavar="ITERATION:GROUP,..")],
    redundancy: Annotated[int, typer.Option("-r", "--redundancy", help="Hosts of a type.", min=1)],
    placement: Annotated[str, typer.Option(help="golomb, contiguous, disjoint, random, or offsets.")] = "golomb",
    iterations: Annotated[int | None, typer.Option(help="Iterations to replay.", min=1)] = None,
    groups: JobGroups = None,
    detection: Detection = "0s",
    shrink: Annotated[str, typer.Option(help="To shrink communicators.", metavar="TIME")] = "0s",
    perturb: Annotated[Path | None, typer.Option(help="A file of perturbations.", metavar="FILE.toml")] = None,
    as_json: Json = False,
) -> None:
    """Replay a collected job of which groups die, with the longer stacks of the survivors."""
    failures: dict[int, list[int]] = {}
    for text in fail:
        iteration, _, listed = text.partition(":")
        numbers = listed.split(",")
        if not iteration.isdigit() or not all(number.isdigit() for number in numbers):
            raise ConfigError(f"--fail is {text!r}: it must be an iteration and groups, such as 3:17 or 3:17,42")
        failures.setdefault(int(iteration), []).extend(map(int, numbers))
    found = job.replayed(
        graph, failures, r=redundancy, placement=_placement(placement), iterations=iterations, groups=groups,
        detection_s=seconds(detection, "--detection"), shrink_s=seconds(shrink, "--shrink"), perturb=perturb,
    )  # fmt: skip
    _say(found, replayed_text(found), as_json)


@app.command()
def published(seeds: Seeds = 16, as_json: Json = False) -> None:
    """Simulate the published set-ups, as published and with a fair baseline."""
    rows = run_published(seeds)
    _say({"setups": rows}, published_text(rows), as_json)


@app.command("fit")
def fit_trace(
    trace: Annotated[Path, typer.Argument(help="Observed failures.", metavar="FILE.csv")],
    groups: Groups,
    until: Annotated[str | None, typer.Option(help="End of the observation.", metavar="TIME")] = None,
    as_json: Json = False,
) -> None:
    """Fit exponential and Weibull distributions to observed failures, and say how well they fit."""
    found = traces.fit(traces.read_trace(trace, until_s=_time(until, "--until")), groups)
    _say({**vars(found), "best": found.best, "is_good": found.is_good}, found.text(), as_json)
