"""How far hybrid emulation is from the truth it can be checked against, as a Markdown table.

    python benches/fidelity.py                      # worlds 4 and 8 against all ranks real, world 8,192 against replay
    python benches/fidelity.py --worlds 4 --modes ddp
    python benches/fidelity.py --megatron all       # megatron-core's layouts against all ranks real, and nothing else
    python benches/fidelity.py --megatron recompute,skewed
    python benches/fidelity.py --worlds 32,64 --modes ddp,hsdp
    python benches/fidelity.py --measured           # host time as measured, beside a second run of all ranks

For each mode of `examples/train_gpt.py` and each world size the job is collected, then

* hybrid (ranks 0 and 3 run the program, the others are replayed) is compared with a run of all ranks, rank by rank:
  time of every iteration, and all peaks in bytes (small worlds only);
* the replay (no rank runs) is compared with hybrid, iteration by iteration;
* hybrid runs twice, and the two summaries are compared byte by byte.

`peak MiB` is what rank 0's allocator had at most in hybrid, `collect` what it had more while the rank was collected:
its peers come at once there, and an allocator that asks events whether memory is free again gets other answers.

With `--megatron` the jobs are those of `benches/megatron_jobs.py`: hybrid against all ranks real, healthy and perturbed
alike (the same perturbations on both sides), and the order of NCCL calls of every sandbox rank besides.

With `--measured` the host's part of a call is the CPU time the thread used, so no two runs are equal: hybrid and replay
are compared with a run of all ranks, and so is a second run of all ranks, which is as near as they can come.

The script fails if a time differs by more than 0.3 % (5 % in the first two iterations, which have a column of their
own: the program still allocates memory there), a peak by a byte from the run of all ranks, or a run from its
repetition; with `--measured` if a mean is off by more than 0.3 % and twice what the second run is off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_jobs import JOBS, LARGE_JOBS, ROOT, SMALL_NODE, Job, collect, emulate, prism
from prism_core import _native
from prism_core.profiles import with_entry

MODES = ("ddp", "fsdp2", "hsdp", "pipeline")
MODEL = ["--layers=4", "--hidden=512", "--heads=8", "--seq=512", "--batch=4", "--iters=4"]
#: A world of this size or less is also run with all ranks real.
MOST_REAL = 64
SANDBOX = (0, 3)
#: In the first iterations a program still allocates memory, at moments that may fall into either of two.
WARM_UP = 2
LARGEST_ERROR = 0.003
LARGEST_WARM_UP_ERROR = 0.05
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "nccl_buffer_bytes")


@dataclass
class Row:
    """What was found for one job."""

    mode: str
    world_size: int
    iteration_ms: float = 0.0
    replay_error: float = 0.0
    real_error: float | None = None
    warm_up_error: float = 0.0
    peak_mib: float = 0.0
    collect_peak_mib: float = 0.0
    problems: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """One line of the table."""
        real, warm_up = (
            ("-", "-") if self.real_error is None else (f"{self.real_error:.4%}", f"{self.warm_up_error:.4%}")
        )
        verdict = "; ".join(self.problems) or "equal"
        cells = [
            self.mode,
            f"{self.world_size:,}",
            f"{self.iteration_ms:.3f}",
            real,
            warm_up,
            f"{self.replay_error:.4%}",
        ]
        peaks = [f"{self.peak_mib:.2f}", f"{self.collect_peak_mib - self.peak_mib:+.2f}"]
        return f"| {' | '.join([*cells, *peaks, verdict])} |"


HEADER = """\
| mode | ranks | ms/iteration | hybrid - all real | first two | replay - hybrid | peak MiB | collect | checks |
|---|---|---|---|---|---|---|---|---|"""


def program(mode: str, world_size: int, model: Sequence[str] = MODEL) -> list[str]:
    """The command line of a job."""
    stages = ["--stages", "2" if world_size == 4 else "4", "--microbatches", "8"] if mode == "pipeline" else []
    return [sys.executable, str(ROOT / "examples/train_gpt.py"), "--mode", mode, *model, *stages]


def small_nodes(folder: Path) -> str:
    """A device whose nodes are small."""
    path = folder / "small-nodes.toml"
    path.write_text(with_entry(_native.profile_toml("h100-sxm"), "node.gpus", SMALL_NODE))
    return f"emulated:{path}"


def error(ours: list[int], truth: list[int]) -> float:
    """The largest relative error; one for series of different length, which are not comparable."""
    if len(ours) != len(truth) or not truth:
        return 1.0
    return max(abs(mine - true) / true for mine, true in zip(ours, truth, strict=True))


def check(mode: str, world_size: int, folder: Path) -> Row:
    """Runs one job in all ways and compares."""
    row = Row(mode, world_size)
    graph, command = folder / "job.prism", program(mode, world_size)
    device = "emulated:h100-sxm" if world_size > MOST_REAL else small_nodes(folder)
    collected = prism("collect", "--world-size", world_size, "--device", device, "-o", graph, "--", *command)
    sandbox = ",".join(map(str, SANDBOX))
    summaries, hybrid = [], {}
    for run in (folder / "hybrid-1", folder / "hybrid-2"):
        hybrid = prism("emulate", graph, "--sandbox", sandbox, "-o", run, "--", *command)
        summaries.append((run / "summary.json").read_bytes())
    if summaries[0] != summaries[1]:
        row.problems.append("two runs differ")
    replayed = prism("replay", graph)["iteration_time_ns"]
    row.iteration_ms = hybrid["iteration_time_ns"][-1] / 1e6
    row.peak_mib = hybrid["ranks"][0]["peak_allocated_bytes"] / 2**20
    row.collect_peak_mib = collected["ranks"][0]["peak_allocated_bytes"] / 2**20
    row.replay_error = error(replayed, hybrid["iteration_time_ns"])
    if world_size <= MOST_REAL:
        real = prism("emulate", graph, "--sandbox", f"0-{world_size - 1}", "-o", folder / "real", "--", *command)
        compare_real(row, hybrid, real)
    if max(row.replay_error, row.real_error or 0.0) > LARGEST_ERROR or row.warm_up_error > LARGEST_WARM_UP_ERROR:
        row.problems.append("times differ")
    return row


def compare_real(row: Row, hybrid: dict[str, Any], real: dict[str, Any]) -> None:
    """Hybrid against all ranks real: the job's times, and each sandbox rank's times and peaks."""
    truth = {rank["rank"]: rank for rank in real["ranks"]}
    pairs = [(hybrid["iteration_time_ns"], real["iteration_time_ns"])]
    pairs += [(rank["iteration_time_ns"], truth[rank["rank"]]["iteration_time_ns"]) for rank in hybrid["ranks"]]
    row.real_error = max(error(ours[WARM_UP:], theirs[WARM_UP:]) for ours, theirs in pairs)
    row.warm_up_error = max(error(ours[:WARM_UP], theirs[:WARM_UP]) for ours, theirs in pairs)
    for rank in hybrid["ranks"]:
        for peak in PEAKS:
            ours, theirs = rank[peak], truth[rank["rank"]][peak]
            if ours != theirs:
                row.problems.append(f"rank {rank['rank']} {peak}: {ours}, all real {theirs}")


MEGATRON_HEADER = """\
| job | ranks | ms/iteration | hybrid - all real | first two | replay - all real | peaks | NCCL calls |
|---|---|---|---|---|---|---|---|"""


def check_megatron(job: Job, folder: Path) -> tuple[str, list[str]]:
    """One layout of megatron-core: its line of the table, and what differs."""
    graph, _ = collect(job, folder)
    hybrid, real = (emulate(job, folder, everyone=everyone) for everyone in (False, True))
    row = Row(job.name, job.world_size, hybrid["iteration_time_ns"][-1] / 1e6)
    compare_real(row, hybrid, real)
    peaks = len(row.problems)
    perturb = job.extra(folder)[-2:] if job.perturb else []
    replayed = prism("replay", graph, *perturb)["iteration_time_ns"]
    row.replay_error = error(replayed[WARM_UP:], real["iteration_time_ns"][WARM_UP:])
    truth = {rank["rank"]: rank["nccl_digest"] for rank in real["ranks"]}
    calls = [rank["rank"] for rank in hybrid["ranks"] if rank["nccl_digest"] != truth[rank["rank"]]]
    row.problems += [f"rank {rank} calls NCCL otherwise" for rank in calls]
    worst = max(row.real_error or 0.0, row.replay_error)
    if worst > LARGEST_ERROR or row.warm_up_error > LARGEST_WARM_UP_ERROR:
        row.problems.append("times differ")
    cells = [job.name, str(job.world_size), f"{row.iteration_ms:.3f}"]
    cells += [f"{value:.4%}" for value in (row.real_error or 0.0, row.warm_up_error, row.replay_error)]
    cells += ["differ" if peaks else "equal", "differ" if calls else "equal"]
    return f"| {' | '.join(cells)} |", row.problems


def megatron_table(wanted: list[str], folder: Path) -> list[str]:
    """Prints the table of megatron-core's layouts; returns what differs."""
    print(MEGATRON_HEADER, flush=True)
    problems = []
    for job in (*JOBS, *LARGE_JOBS):
        if wanted != ["all"] and not any(part in job.name for part in wanted):
            continue
        place = folder / f"{job.folder}-{job.world_size}"
        place.mkdir(parents=True, exist_ok=True)
        line, found = check_megatron(job, place)
        print(line, flush=True)
        problems += [f"{job.name}: {problem}" for problem in found]
    return problems


#: Jobs whose host time is measured: the device hides it, or it decides. Worlds of four.
MEASURED_MODELS = {
    "device": ["--layers=4", "--hidden=4096", "--heads=32", "--seq=2048", "--batch=4", "--iters=12"],
    "host": ["--layers=4", "--hidden=512", "--heads=8", "--seq=512", "--batch=4", "--iters=12"],
}
MEASURED_WORLD = 4
MEASURED_HEADER = """\
| mode | bound by | ranks | ms/iteration | host constant | hybrid: mean, most | replay: mean, most | again: mean, most |
|---|---|---|---|---|---|---|---|"""


def spread(ours: list[int], truth: list[int]) -> tuple[float, float]:
    """Steady iterations: error of their mean, and the largest of one iteration against the mean of the truth."""
    ours, truth = ours[WARM_UP:], truth[WARM_UP:]
    mean = sum(truth) / len(truth)
    return abs(sum(ours) / len(ours) - mean) / mean, max(abs(one - mean) / mean for one in ours)


def check_measured(mode: str, kind: str, folder: Path) -> tuple[str, list[str]]:
    """One job with measured host time: its line of the table, and what is too far off."""
    folder.mkdir(parents=True, exist_ok=True)
    graph, device, everyone = folder / "job.prism", small_nodes(folder), f"0-{MEASURED_WORLD - 1}"
    command = program(mode, MEASURED_WORLD, MEASURED_MODELS[kind])
    job = ("--world-size", MEASURED_WORLD, "--device", device, "--ranks", "all", "-o")
    prism("collect", *job, folder / "constant.prism", "--", *command)
    prism("collect", "--host-time", "measured", *job, graph, "--", *command)

    def run(sandbox: str, name: str) -> list[int]:
        measured = ("--host-time", "measured", "-o", folder / name)
        times: list[int] = prism("emulate", graph, "--sandbox", sandbox, *measured, "--", *command)["iteration_time_ns"]
        return times

    truth = run(everyone, "real")
    hybrid = spread(run(",".join(map(str, SANDBOX)), "hybrid"), truth)
    replayed = spread(prism("replay", graph)["iteration_time_ns"], truth)
    again = spread(run(everyone, "again"), truth)
    constant = prism("replay", folder / "constant.prism")["iteration_time_ns"][WARM_UP:]
    mean = sum(truth[WARM_UP:]) / len(truth[WARM_UP:])
    cells = [mode, kind, str(MEASURED_WORLD), f"{mean / 1e6:.3f}", f"{sum(constant) / len(constant) / 1e6:.3f}"]
    cells += [f"{average:.2%}, {most:.2%}" for average, most in (hybrid, replayed, again)]
    limit = LARGEST_ERROR + 2 * again[0]
    far = [
        f"{mode}, {kind}: {what} is {found[0]:.2%} off"
        for what, found in (("hybrid", hybrid), ("replay", replayed))
        if found[0] > limit
    ]
    return f"| {' | '.join(cells)} |", far


def measured_table(modes: list[str], folder: Path) -> list[str]:
    """Prints the table of jobs with measured host time; returns what is too far off."""
    print(MEASURED_HEADER, flush=True)
    problems = []
    for kind in MEASURED_MODELS:
        for mode in modes:
            line, found = check_measured(mode, kind, folder / f"measured-{mode}-{kind}")
            print(line, flush=True)
            problems += found
    return problems


def main() -> None:
    """Prints the table; exit code 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="4,8,8192", help="world sizes (each at least 4)")
    parser.add_argument("--modes", default=",".join(MODES))
    keep = "folder for graphs and runs (default: a temporary one); runs of --megatron found there are taken as they are"
    parser.add_argument("--keep", type=Path, help=keep)
    parser.add_argument("--megatron", help="`all`, or parts of names of megatron-core's jobs: these instead")
    parser.add_argument("--measured", action="store_true", help="the modes with measured host time instead")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="prism-fidelity-") as temporary:
        if args.megatron:
            problems = megatron_table(args.megatron.split(","), (args.keep or Path(temporary)).absolute())
            raise SystemExit("\n".join(problems) if problems else 0)
        if args.measured:
            problems = measured_table(args.modes.split(","), (args.keep or Path(temporary)).absolute())
            raise SystemExit("\n".join(problems) if problems else 0)
        print(HEADER, flush=True)
        for world_size in map(int, args.worlds.split(",")):
            for mode in args.modes.split(","):
                folder = (args.keep or Path(temporary)).absolute() / f"{mode}-{world_size}"
                folder.mkdir(parents=True, exist_ok=True)
                rows.append(check(mode, world_size, folder))
                print(rows[-1].markdown(), flush=True)
    if any(row.problems for row in rows):
        raise SystemExit("fidelity: something differs")


if __name__ == "__main__":
    main()
