"""Is the graph of a few ranks the graph of all ranks? As a Markdown table.

    python benches/slicing.py                       # every case, worlds of 8
    python benches/slicing.py --cases hsdp,megatron --worlds 16,32

For each case the job is collected from a few ranks (`--ranks auto`), from every rank by itself (`--ranks all`), and
emulated with every rank a sandbox and recorded (`emulate --record`). The first two graphs must be equal op for op,
durations and host time included: the script fails if they are not. Against the third, allocations from the driver and
host time are left out, because an allocator that asks events whether memory is free, and a program that polls, get
other answers when peers take their time; everything else must be equal. All three are replayed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN = str(ROOT / "examples" / "train_gpt.py")
SMALL = ["--layers=4", "--hidden=128", "--heads=4", "--seq=128", "--batch=2", "--vocab=1000", "--iters=3"]
MEGATRON = str(ROOT / "tests" / "programs" / "megatron_gpt.py")
MODEL = ["--hidden=256", "--heads=8", "--seq=128", "--vocab=1024", "--iters=2"]


@dataclass(frozen=True)
class Case:
    """A program and its options; `package` must be installed."""

    name: str
    argv: tuple[str, ...]
    package: str = "torch"


def train(name: str, *options: str) -> Case:
    """The example with a mode."""
    return Case(name, (TRAIN, *SMALL, *options))


def megatron(name: str, *options: str) -> Case:
    """megatron-core with a layout."""
    return Case(name, (MEGATRON, *MODEL, *options), "megatron")


CASES = [
    train("ddp", "--mode=ddp"),
    train("fsdp2", "--mode=fsdp2"),
    train("hsdp", "--mode=hsdp"),
    train("pipeline", "--mode=pipeline", "--stages=4", "--microbatches=4"),
    train("uneven pipeline", "--mode=pipeline", "--stages=4", "--microbatches=4", "--layers=6"),
    megatron("megatron TPxPPxDP", "--tp=2", "--pp=2"),
    megatron("megatron interleaved", "--pp=2", "--vpp=2", "--microbatches=4"),
    megatron("megatron distributed optimizer", "--tp=2", "--distributed-optimizer"),
    megatron("megatron MoE, fixed capacity", "--tp=2", "--ep=4", "--experts=8", "--capacity=1.25"),
    megatron("megatron MoE, dropless", "--ep=4", "--experts=8"),
]


def prism(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Runs one command of `prism`; exit code and document."""
    words = [str(argument) for argument in arguments]
    command = [sys.executable, "-m", "prism_core.cli", words[0], "--json", *words[1:]]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    try:
        return child.returncode, json.loads(child.stdout)
    except ValueError:
        sys.exit(f"prism {' '.join(words[:4])} failed:\n{child.stderr[-4000:]}")


def must(outcome: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """The document of a command that must succeed."""
    code, document = outcome
    if code != 0:
        sys.exit(f"failed: {document.get('error', document)}")
    return document


def verdict(left: Path, right: Path, *ignored: str) -> str:
    """`equal`, or what differs."""
    flags = [word for what in ignored for word in ("--ignore", what)]
    _, found = prism("inspect", left, "--against", right, *flags)
    if found["equal"]:
        return "equal"
    return "; ".join(f"{what} {count}" for what, count in sorted(found["differing"].items()))


def measure(case: Case, world: int, folder: Path) -> bool:
    """Prints the row of a case; tells whether all is as it must be."""
    program = ["--", sys.executable, *case.argv]
    few, everyone, run = folder / "few.prism", folder / "all.prism", folder / "run.prism"
    start = time.monotonic()
    summary = must(prism("collect", "--world-size", world, "-o", few, *program))
    took_few = time.monotonic() - start
    start = time.monotonic()
    must(prism("collect", "--world-size", world, "--ranks", "all", "-o", everyone, *program))
    took_all = time.monotonic() - start
    sandbox = f"0-{world - 1}"
    must(prism("emulate", few, "--sandbox", sandbox, "--record", run, "-o", folder / "run", *program))
    sliced, together = verdict(few, everyone), verdict(few, run, "host", "memory")
    times = [must(prism("replay", graph))["iteration_time_ns"][-1] / 1e6 for graph in (few, everyone, run)]
    replays = " / ".join(f"{value:.3f}" for value in times)
    print(
        f"| {case.name} | {world} | {len(summary['ranks_run'])} | {summary['roles']} | {sliced} | {together} "
        f"| {replays} | {took_few:.0f} / {took_all:.0f} |",
        flush=True,
    )
    return sliced == together == "equal"


def main() -> None:
    """Runs the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="parts of names, separated by commas")
    parser.add_argument("--worlds", default="8")
    args = parser.parse_args()
    wanted = [part for part in args.cases.split(",") if part]
    print("| case | ranks | run | roles | few = all | few = together | last iteration, ms (few / all / together) | s |")
    print("|---|---|---|---|---|---|---|---|")
    good = True
    for case in CASES:
        if wanted and not any(part in case.name for part in wanted):
            continue
        if importlib.util.find_spec(case.package) is None:
            print(f"| {case.name} | not run: {case.package} is not installed | | | | | | |")
            continue
        for world in map(int, args.worlds.split(",")):
            with tempfile.TemporaryDirectory(prefix="prism-slicing-") as folder:
                good &= measure(case, world, Path(folder))
    if not good:
        sys.exit("the graph of a few ranks is not the graph of all of them")


if __name__ == "__main__":
    main()
