"""What a further rank costs once the program's modules are imported, and many sandbox ranks from start to end.

    python benches/forks.py                      the demo, 8,192 ranks: CPU s per further rank, sandbox ranks 0-31
    python benches/forks.py --sandbox 0 --program 'tests/programs/megatron_gpt.py --tp 8 --pp 16 ...'

CPU seconds are those of all processes: they do not depend on what else the machine does. Real time does.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prism_core

ROOT = Path(__file__).resolve().parents[1]
DEMO = "examples/train_gpt.py --layers=2 --hidden=128 --heads=4 --seq=128 --batch=2 --vocab=1000 --iters=3 --mode ddp"


def measured(body: Callable[[], Any]) -> tuple[Any, float, float]:
    """What the body gives, and the CPU and the real seconds it takes, ended children included."""

    def spent() -> float:
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    cpu, wall = spent(), time.monotonic()
    result = body()
    return result, spent() - cpu, time.monotonic() - wall


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=DEMO)
    parser.add_argument("--world", type=int, default=8192)
    parser.add_argument("--ranks", default="0,1024,1536,2048,2560,3072", help="the first two, then all, are run")
    parser.add_argument("--sandbox", type=int, default=32, help="how many ranks to emulate; 0: none")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    command = [sys.executable, *shlex.split(arguments.program)]
    ranks = [int(rank) for rank in arguments.ranks.split(",")]
    with tempfile.TemporaryDirectory() as name:
        graph = Path(name) / "job.prism"
        costs = {}
        for chosen in (ranks[:2], ranks):
            options = {"ranks": ",".join(map(str, chosen)), "num_verified": 0, "fork_server": True, "jobs": 2}
            found, cpu, wall = measured(
                lambda: prism_core.collect(command, arguments.world, graph, fresh=True, **options)  # noqa: B023
            )
            assert found["ranks_run"] == chosen and found["notes"] == [], found["notes"]
            costs[len(chosen)] = cpu
            print(f"collect, {len(chosen)} ranks: {cpu:.1f} CPU s, {wall:.1f} s", flush=True)
        further = (costs[len(ranks)] - costs[2]) / (len(ranks) - 2)
        print(f"a further rank: {further:.2f} CPU s", flush=True)
        if arguments.sandbox:
            sandbox = list(range(arguments.sandbox))
            run, cpu, wall = measured(
                lambda: prism_core.emulate(command, graph, sandbox, Path(name) / "run", echo=False, fork_server=True)
            )
            assert [rank["rank"] for rank in run["ranks"]] == sandbox and run["notes"] == [], run["notes"]
            print(
                f"emulate, {len(sandbox)} of {arguments.world} ranks: {wall:.1f} s, {cpu:.1f} CPU s, "
                f"iterations {[round(time / 1e6, 3) for time in run['iteration_time_ns']]} ms"
            )


if __name__ == "__main__":
    main()
