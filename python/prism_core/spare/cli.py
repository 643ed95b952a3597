"""`prism spare`: plan, simulate, sweep."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from prism_core import report as reports
from prism_core.errors import ConfigError
from prism_core.spare import planning
from prism_core.spare.laws import PlacementLike
from prism_core.spare.text import plan_text, simulate_text
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
Spares = Annotated[int, typer.Option(help="Spare groups, for the policy that uses them.", min=0)]


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
    domain_groups: Annotated[int, typer.Option(help="Neighbouring groups that fail together.", min=0)] = 0,
    mtbf_domain: Annotated[str | None, typer.Option(help="How often such a domain fails.", metavar="TIME")] = None,
    seeds: Seeds = 32,
    as_json: Json = False,
) -> None:
    """Recommend redundancy, placement and checkpoint interval."""
    found = planning.plan(
        groups, save_s=_save(checkpoint, checkpoint_size, checkpoint_bandwidth),
        restart_s=seconds(restart, "--restart"), compute_s=_time(step, "--step"), steps=steps,
        all_reduce_s=seconds(all_reduce, "--all-reduce"),
        group_mtbf_s=_time(mtbf_group, "--mtbf-group"), system_mtbf_s=_time(mtbf_system, "--mtbf-system"),
        weibull_shape=weibull_shape, jitter=jitter, detection_s=seconds(detection, "--detection"),
        repair_s=_time(repair, "--repair"), spares=spares, domain_groups=domain_groups,
        domain_mtbf_s=_time(mtbf_domain, "--mtbf-domain"), redundancy=(2, max_redundancy),
        gpus_per_group=gpus_per_group, cost_per_gpu_hour=cost_per_gpu_hour, seeds=seeds,
    )  # fmt: skip
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
    published: Annotated[bool, typer.Option(help="With the handicaps of the published baseline.")] = False,
    seeds: Seeds = 32,
    as_json: Json = False,
) -> None:
    """Simulate the training under one policy."""
    found = planning.simulate(
        groups, compute_s=seconds(step, "--step"), steps=steps, checkpoint_steps=checkpoint_steps,
        save_s=_save(checkpoint, checkpoint_size, checkpoint_bandwidth), restart_s=seconds(restart, "--restart"),
        all_reduce_s=seconds(all_reduce, "--all-reduce"), policy=policy,  # type: ignore[arg-type]
        r=redundancy, placement=_placement(placement), group_mtbf_s=_time(mtbf_group, "--mtbf-group"),
        system_mtbf_s=_time(mtbf_system, "--mtbf-system"), weibull_shape=weibull_shape, jitter=jitter,
        detection_s=seconds(detection, "--detection"), repair_s=_time(repair, "--repair"), spares=spares,
        published=published, seeds=seeds,
    )  # fmt: skip
    _say(found, simulate_text(found["summary"], policy, redundancy), as_json)


@app.command()
def sweep(
    groups: Groups,
    restart: Restart,
    output: Annotated[Path, typer.Option("-o", "--output", help="A .csv file to write.", metavar="FILE.csv")],
    mtbf_system: Annotated[list[str], typer.Option(help="Mean time between failures; may be given often.")],
    checkpoint: Checkpoint = None,
    checkpoint_size: Size = None,
    checkpoint_bandwidth: Bandwidth = None,
    max_redundancy: Annotated[int, typer.Option(help="Largest redundancy to consider.", min=1)] = 28,
) -> None:
    """Tabulate the closed forms over failure rates, redundancies and placements."""
    if output.suffix != ".csv":
        raise ConfigError(f"--output is {str(output)!r}: it must end in .csv")
    save_s, restart_s = _save(checkpoint, checkpoint_size, checkpoint_bandwidth), seconds(restart, "--restart")

    def rows() -> Iterable[dict[str, Any]]:
        for text in mtbf_system:
            mtbf_s = seconds(text, "--mtbf-system")
            table = planning.frontier(
                groups, save_s=save_s, restart_s=restart_s, system_mtbf_s=mtbf_s, redundancy=(1, max_redundancy)
            )
            for row in table:
                low, high = row.pop("band")
                yield {"groups": groups, "system_mtbf_s": mtbf_s, **row, "band_low": low, "band_high": high}

    table = list(rows())
    with output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    sys.stderr.write(f"prism: {len(table)} rows in {output}\n")
