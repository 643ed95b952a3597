"""What each part of the replay is worth: errors of the iteration time with one part left out, as a Markdown table.

    python benches/ablation.py --keep FOLDER        # that of `benches/fidelity.py --megatron all --keep`, or a new one
    python benches/ablation.py --jobs recompute,skewed

The jobs are those of `benches/megatron_jobs.py`. The truth is a run of all ranks on the same device model; every figure
is the relative error of the last iteration:

* `replay`: the graph, evaluated.
* `together`: every collective and message begins when the rank itself comes, as if all peers came at that moment. It
  is the slowest rank's time, by its own timer, while the graph was collected, where absent peers come at once.
* `default profile`: replayed with the network of the built-in profile in place of the site's.
* `shrunk`: the time of the same job on half the ranks (half the data-parallel or expert-parallel degree), samples and
  experts per rank unchanged, taken for that of the whole.
* `MFU`: model FLOPs / (ranks x peak x MFU) x (1 + bubble), the MFU being the mean of the other healthy jobs'.
* `fair-share`: not an error but a change: the replay with messages that share cards and ports, against that without.
  The device has no contention while programs run, so the truth has none either. A slow link cannot be had with it.

What knows nothing of a perturbation (`together`, `shrunk`, `MFU`) is wrong by all of it. The script fails if the replay
is off by more than 0.3 %, or if it is not the best of all on average.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_jobs import HIDDEN, JOBS, SEQ, VOCAB, Job, collect, emulate, prism

PEAK_FLOPS = 989e12
LARGEST_ERROR = 0.003
#: Estimates that are errors against the truth, in the order of the columns.
COLUMNS = ("replay", "together", "default profile", "shrunk", "MFU")


@dataclass
class Row:
    """Iteration times of one job, ns."""

    job: Job
    truth: int
    estimates: dict[str, float]
    #: None where the replay cannot say: a slow link together with contention.
    fair_share: float | None

    def error(self, column: str) -> float:
        """Relative, signed."""
        return self.estimates[column] / self.truth - 1


def option(job: Job, name: str, default: int) -> int:
    """The number an option has."""
    found = [word.split("=")[1] for word in job.options if word.startswith(f"--{name}=")]
    return int(found[0]) if found else default


def ideal_ns(job: Job) -> float:
    """Time at the peak rate of all ranks, the pipeline's bubble included."""
    replicas = job.world_size // (option(job, "tp", 1) * option(job, "pp", 1) * option(job, "cp", 1))
    tokens = job.samples * replicas * SEQ
    # Multiplications of a token: attention's projections, then two of an MLP four times as wide or of two experts.
    layer = (4 + (4 if job.routing else 8)) * HIDDEN**2
    passes = 4 if job.forward_twice else 3
    layers = job.layers * (2 * layer + 2 * HIDDEN * SEQ) * passes
    flops = tokens * (layers + 3 * 2 * HIDDEN * VOCAB)
    return flops / (job.world_size * PEAK_FLOPS) * 1e9 * (1 + job.bubble)


def halved(job: Job) -> Job:
    """The same on half the ranks."""
    options = tuple({"--ep=4": "--ep=2", "--experts=8": "--experts=4"}.get(word, word) for word in job.options)
    return replace(job, world_size=job.world_size // 2, options=options, perturb=())


def place(job: Job, folder: Path) -> Path:
    """The job's folder."""
    path = folder / f"{job.folder}-{job.world_size}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def together_ns(logs: Path) -> float:
    """The last iteration of the slowest rank, as the ranks printed it while they were collected."""
    printed = [re.findall(r"iteration \d+: ([\d.]+) ms", log.read_text()) for log in sorted(logs.glob("rank-*.log"))]
    return max(float(times[-1]) for times in printed) * 1e6


def measure(job: Job, folder: Path) -> Row:
    """Runs what is not kept, and replays."""
    here = place(job, folder)
    graph, collected = collect(job, here)
    perturb = job.extra(here)[-2:] if job.perturb else []

    def replayed(*arguments: object) -> float:
        return float(prism("replay", graph, *perturb, *arguments)["iteration_time_ns"][-1])

    small = halved(job)
    shrunk, _ = collect(small, place(small, folder))
    plain = replayed()
    estimates = {
        "replay": plain,
        "together": together_ns(Path(collected["logs"])),
        "default profile": replayed("--profile", "h100-sxm"),
        "shrunk": float(prism("replay", shrunk)["iteration_time_ns"][-1]),
    }
    truth = emulate(job, here, everyone=True)["iteration_time_ns"][-1]
    slow_links = any(rule.kind == "slow-link" for rule in job.perturb)
    fair_share = None if slow_links else replayed("--contention", "fair-share") / plain - 1
    return Row(job, truth, estimates, fair_share)


def estimate_by_mfu(rows: list[Row]) -> None:
    """Adds the column; the MFU of a job is that of the others."""
    for row in rows:
        healthy = [one for one in rows if not one.job.perturb and one.job.folder != row.job.folder]
        others = [math.log(one.truth / ideal_ns(one.job)) for one in healthy]
        if not others:
            raise SystemExit("ablation: one job says nothing about the MFU of another: name two or more")
        row.estimates["MFU"] = ideal_ns(row.job) * math.exp(sum(others) / len(others))


def main() -> None:
    """Prints the table; exit code 1 if the replay is not what it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="", help="parts of names, separated by commas (default: all)")
    keep = "folder for graphs and runs (default: a temporary one); what is found there is taken as it is"
    parser.add_argument("--keep", type=Path, help=keep)
    args = parser.parse_args()
    wanted = [part for part in args.jobs.split(",") if part]
    with tempfile.TemporaryDirectory(prefix="prism-ablation-") as temporary:
        folder = (args.keep or Path(temporary)).absolute()
        chosen = [job for job in JOBS if not wanted or any(part in job.name for part in wanted)]
        rows = [measure(job, folder) for job in chosen]
    estimate_by_mfu(rows)
    print("| job | ranks | all real, ms | " + " | ".join(COLUMNS) + " | fair-share |")
    print("|" + "---|" * (len(COLUMNS) + 4))
    for row in rows:
        errors = [f"{row.error(column):+.1%}" for column in COLUMNS[1:]]
        cells = [
            row.job.name,
            str(row.job.world_size),
            f"{row.truth / 1e6:.3f}",
            f"{row.error('replay'):+.4%}",
            *errors,
        ]
        fair_share = "-" if row.fair_share is None else f"{row.fair_share:+.1%}"
        print(f"| {' | '.join(cells)} | {fair_share} |")
    means = {column: sum(abs(row.error(column)) for row in rows) / len(rows) for column in COLUMNS}
    worst = {column: max(abs(row.error(column)) for row in rows) for column in COLUMNS}
    for name, figures in (("mean", means), ("worst", worst)):
        cells = [f"{figures['replay']:.4%}", *(f"{figures[column]:.1%}" for column in COLUMNS[1:])]
        print(f"| **{name} of errors** | | | {' | '.join(cells)} | |")
    if worst["replay"] > LARGEST_ERROR or means["replay"] > min(means.values()):
        raise SystemExit("ablation: the replay is further off than it may be")


if __name__ == "__main__":
    main()
