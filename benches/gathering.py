"""CPU time of a rank that gathers a pickled object from every rank of a large job, as optimizers compare settings.

    python benches/gathering.py [--world 8192] [--times 3]

Three runs: as ever, with every wait asked of the engine (`PRISM_FORESIGHT=0`), and without values (`PRISM_VALUES=off`).
Also prints how often the process was switched: by itself, and by the system. The first two must give the same graph.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

VARIANTS = {"as ever": {}, "every wait asked": {"PRISM_FORESIGHT": "0"}, "without values": {"PRISM_VALUES": "off"}}
SETTINGS = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


def usage() -> list[float]:
    """CPU seconds and switches of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return [used.ru_utime + used.ru_stime, used.ru_nvcsw, used.ru_nivcsw]


def train(times: int) -> None:
    """The program: gathers, and makes one step."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 8, device="cuda")).sum().backward()
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, SETTINGS)
    before = usage()
    for _ in range(times):
        dist.all_gather_object(gathered, SETTINGS)
    each = [(after - start) / times for start, after in zip(before, usage(), strict=True)]
    assert all(found == SETTINGS for found in gathered)
    optimizer.step()
    sys.stdout.write("MEASURED " + json.dumps(each) + "\n")


def measure(name: str, world: int, times: int, folder: Path) -> bytes:
    """Prints the row of a variant; returns the graph."""
    graph = folder / "job.prism"
    program = [sys.executable, str(Path(__file__).resolve()), "--train", "--times", str(times)]
    options = ["--world-size", str(world), "--ranks", "0", "--verify", "0", "--fresh", "-o", str(graph)]
    command = [sys.executable, "-m", "prism_core.cli", "collect", "--json", *options, "--", *program]
    child = subprocess.run(command, env=os.environ | VARIANTS[name], capture_output=True, text=True, check=False)
    if child.returncode != 0:
        sys.exit(f"{name}: {child.stderr[-2000:]}")
    log = (folder / "job.logs" / "rank-0.log").read_text(encoding="utf-8")
    cpu, own, forced = json.loads(log.partition("MEASURED ")[2].splitlines()[0])
    print(f"| {name} | {cpu:.3f} | {own:,.0f} | {forced:,.0f} |", flush=True)
    return graph.read_bytes()


def main() -> None:
    """Measures, or is the program that is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=8192)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.times)
        return
    print(f"| one gathering of {arguments.world:,} | CPU s | switches of its own accord | others |\n|---|---|---|---|")
    graphs = []
    for name in VARIANTS:
        with tempfile.TemporaryDirectory(prefix="prism-gathering-") as folder:
            graphs.append(measure(name, arguments.world, arguments.times, Path(folder)))
    if graphs[0] != graphs[1]:
        sys.exit("foreseen waits give another graph")


if __name__ == "__main__":
    main()
