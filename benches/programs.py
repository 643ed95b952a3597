"""What real training programs cost on the emulated device: first, middle and last rank of 8, 1,024 and 8,192.

    python benches/programs.py [--only NAME ...] [--worlds 8 1024] [--json FILE] [--extra FOLDER ...]

Each row collects one program (and so checks that it trains), and prints for the rank that took most: CPU seconds of the
process from its start to its end, largest resident set, memory it wrote (private, at the end), peak of the allocator.
Rows whose ranks miss the goals (20 CPU seconds, 1.2 GiB) or fail are marked. CPU seconds count, because a busy machine
makes wall time meaningless. TorchTitan compiles FlexAttention when it starts, some 50 CPU seconds in every rank unless
`--caches` names a folder that keeps what was compiled. `--extra` are folders of `pip install --no-deps --target` with
what this interpreter lacks;
TorchTitan also wants `--titan`, a folder that holds its `tests/assets`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).resolve().parents[1] / "tests" / "programs"
RUNNER = Path(__file__).with_name("programs_rank.py")
WORLDS = (8, 1024, 8192)
GOAL_CPU_S, GOAL_RSS = 20.0, 1.2 * (1 << 30)
TITAN = (
    "-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel", "--training.steps", "3",
    "--compile.no-enable", "--training.disable-cuda-graphs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A program with its options, by world size where they depend on it.

    Attributes:
        stages: Pipeline stages by world size: one rank of every stage has to run.
        period: Ranks that many apart do the same (places in an expert-parallel group): one of every remainder runs.
    """

    name: str
    package: str
    words: Sequence[str]
    by_world: dict[int, Sequence[str]] = field(default_factory=dict)
    stages: dict[int, int] = field(default_factory=dict)
    period: int = 1

    def command(self, world: int) -> list[str]:
        """What the rank runs, without the interpreter."""
        return [*self.words, *self.by_world.get(world, ())]

    def ranks(self, world: int) -> list[int]:
        """First, middle and last, and one of every other pipeline stage and place."""
        stages = self.stages.get(world, 1)
        first = {0, world // 2 + (world > 8) * 5, world - 1}
        seen = {rank * stages // world for rank in first}
        first |= {stage * world // stages for stage in range(stages) if stage not in seen}
        places = {rank % self.period for rank in first}
        return sorted(first | {place for place in range(self.period) if place not in places})


def megatron(name: str, *words: str, **more: Any) -> Case:
    """A row of megatron-core."""
    return Case(f"megatron {name}", "megatron", [str(PROGRAMS / "megatron_gpt.py"), *words], **more)


def titan(name: str, **by_world: Sequence[str]) -> Case:
    """A row of TorchTitan, options by world size (`w8`)."""
    return Case(f"torchtitan {name}", "torchtitan", TITAN, {int(key[1:]): words for key, words in by_world.items()})


def parallelism(**degrees: int) -> list[str]:
    """TorchTitan's options."""
    return [word for name, degree in degrees.items() for word in (f"--parallelism.{name}", str(degree))]


def _tp(small: int, large: int) -> dict[int, Sequence[str]]:
    return {8: ("--tp", str(small)), 1024: ("--tp", str(large)), 8192: ("--tp", str(large))}


def cases() -> list[Case]:
    """All rows."""
    moe = ("--tp", "2", "--ep", "4", "--experts", "8")
    two, eight = dict.fromkeys(WORLDS, 2), {8: 4, 1024: 8, 8192: 8}
    deep = {8: ("--pp", "4", "--tp", "2"), **dict.fromkeys(WORLDS[1:], ("--pp", "8", "--tp", "8"))}
    ddp = [f"{kind}" for kind in ("ddp", "fsdp2")]
    return [
        megatron("dense DP"),
        megatron("dense TP", by_world=_tp(2, 8)),
        megatron("dense TP PP 1F1B", by_world=deep, stages=eight),
        megatron("interleaved", "--pp", "2", "--vpp", "2", by_world=_tp(2, 8), stages=two),
        megatron("CP", "--cp", "2", by_world=_tp(2, 8)),
        megatron("distributed optimizer", "--distributed-optimizer", "--overlap", by_world=_tp(2, 8)),
        megatron("MoE all-to-all dropless", *moe, period=4),
        megatron("MoE all-gather dropless", *moe, "--dispatcher", "allgather", period=4),
        megatron("MoE drop and pad", *moe, "--capacity", "1.25", period=4),
        megatron("MoE EP 8", "--ep", "8", "--experts", "16", period=8),
        titan(
            "FSDP2",
            # The debug model's rows make no more than 256 shards, its data no more than 2,000 shares.
            w8=parallelism(data_parallel_shard_degree=8),
            w1024=parallelism(data_parallel_replicate_degree=4, data_parallel_shard_degree=256),
            w8192=parallelism(
                data_parallel_replicate_degree=32, data_parallel_shard_degree=32, tensor_parallel_degree=8
            ),
        ),
        titan(
            "HSDP",
            w8=parallelism(data_parallel_replicate_degree=2, data_parallel_shard_degree=4),
            w1024=parallelism(data_parallel_replicate_degree=256, data_parallel_shard_degree=4),
            w8192=parallelism(
                data_parallel_replicate_degree=256, data_parallel_shard_degree=4, tensor_parallel_degree=8
            ),
        ),
        titan(
            "HSDP TP",
            w8=parallelism(data_parallel_replicate_degree=2, data_parallel_shard_degree=2, tensor_parallel_degree=2),
            w1024=parallelism(
                data_parallel_replicate_degree=16, data_parallel_shard_degree=8, tensor_parallel_degree=8
            ),
            w8192=parallelism(
                data_parallel_replicate_degree=128, data_parallel_shard_degree=8, tensor_parallel_degree=8
            ),
        ),
        Case(
            "torchtitan PP",
            "torchtitan",
            TITAN,
            {
                world: parallelism(
                    pipeline_parallel_degree=2,
                    data_parallel_replicate_degree=world // 4 // tensor,
                    data_parallel_shard_degree=2,
                    tensor_parallel_degree=tensor,
                )
                for world, tensor in ((8, 2), (1024, 2), (8192, 8))
            },
            two,
        ),
        *(
            Case(f"DeepSpeed ZeRO-{stage}", "deepspeed", [str(PROGRAMS / "deepspeed_train.py"), "--stage", str(stage)])
            for stage in (1, 2, 3)
        ),
        *(Case(f"accelerate {mode}", "accelerate", [str(PROGRAMS / "accelerate_train.py"), "--mode", mode])
          for mode in ddp),
        Case("litgpt FSDP", "litgpt", [str(PROGRAMS / "litgpt_train.py")]),
    ]  # fmt: skip


def usage(log: str) -> dict[str, int]:
    """What `programs_rank.py` printed."""
    return {name: int(value) for name, value in re.findall(r"^usage (\w+) (\d+)$", log, re.MULTILINE)}


def run(case: Case, world: int, folder: Path, environment: dict[str, str], cwd: Path | None) -> dict[str, Any]:
    """Collects one row; its figures."""
    graph = folder / "job.prism"
    ranks = case.ranks(world)
    command = [
        sys.executable, "-m", "prism_core.cli", "collect", "--json", "--world-size", str(world),
        "--ranks", ",".join(map(str, ranks)), "--verify", "0", "-o", str(graph), "--",
        sys.executable, str(RUNNER), *case.command(world),
    ]  # fmt: skip
    start = time.monotonic()
    child = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=cwd)
    row: dict[str, Any] = {"case": case.name, "world": world, "ranks": ranks, "wall_s": time.monotonic() - start}
    document = json.loads(child.stdout or "{}")
    if child.returncode != 0:
        row["error"] = document.get("error", {}).get("message", child.stderr[-400:])
    row["iterations"] = [rank["iterations"] for rank in document.get("ranks", ())]
    row["peak_allocated_bytes"] = [rank["peak_allocated_bytes"] for rank in document.get("ranks", ())]
    logs = [graph.with_suffix(".logs") / f"rank-{rank}.log" for rank in ranks]
    row["usage"] = [usage(log.read_text(errors="replace")) for log in logs if log.exists()]
    if "error" in row:
        row["tails"] = {log.name: log.read_text(errors="replace")[-3000:] for log in logs if log.exists()}
    return row


def misses(row: dict[str, Any]) -> list[str]:
    """Which goals a row misses."""
    found = []
    if "error" in row or not row["iterations"] or min(row["iterations"]) < 1:
        found.append("FAILS")
    if any(rank.get("cpu_ms", 0) / 1e3 > GOAL_CPU_S for rank in row["usage"]):
        found.append("20 s")
    if any(rank.get("rss", 0) > GOAL_RSS for rank in row["usage"]):
        found.append("1.2 GiB")
    return found


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    most = {name: max((rank.get(name, 0) for rank in row["usage"]), default=0) for name in ("cpu_ms", "rss", "private")}
    peaks = row["peak_allocated_bytes"]
    mib = 1 << 20
    peak = "-" if not peaks else " / ".join(f"{peak / mib:.1f}" for peak in (min(peaks), max(peaks)))
    cells = [
        row["case"], f"{row['world']:,}", ", ".join(f"{rank:,}" for rank in row["ranks"]),
        f"{most['cpu_ms'] / 1e3:.1f}",
        f"{most['rss'] / mib:.0f}", f"{most['private'] / mib:.0f}", peak, f"{row['wall_s']:.0f}",
        ", ".join(misses(row)) or "ok",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| program | world | ranks run | CPU s, most | RSS MiB | private MiB | peak MiB, least / most | wall s | |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs what was asked for, one after the other."""
    environment = dict(os.environ)
    extra = [str(folder.resolve()) for folder in options.extra]
    environment["PYTHONPATH"] = os.pathsep.join(
        [*sys.path[1:2], *filter(None, [environment.get("PYTHONPATH")]), *extra]
    )
    sys.path.extend(extra)
    if options.caches is not None:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            environment[name] = str(options.caches.resolve() / name.partition("_")[0].lower())
    for case in cases():
        if options.only and not any(word in case.name for word in options.only):
            continue
        if importlib.util.find_spec(case.package) is None:
            print(f"| {case.name} | - | {case.package} is not installed |", flush=True)
            continue
        for world in options.worlds:
            with tempfile.TemporaryDirectory(prefix="programs-") as folder:
                cwd = options.titan if case.package == "torchtitan" else Path(folder)
                yield run(case, world, Path(folder), environment, cwd)


def main() -> int:
    """Command line; 1 if a row misses a goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="rows whose name contains one of these")
    parser.add_argument("--worlds", nargs="*", type=int, default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--json", type=Path, help="also append the rows to this file, one document a line")
    parser.add_argument("--extra", nargs="*", type=Path, default=[])
    parser.add_argument("--titan", type=Path, help="folder with TorchTitan's tests/assets")
    parser.add_argument("--caches", type=Path, help="keep compiled kernels here: default is a cold start of every rank")
    options = parser.parse_args()
    print(HEAD, flush=True)
    is_missed = False
    for row in rows(options):
        print(line(row), flush=True)
        is_missed |= bool(misses(row))
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if "error" in row:
            sys.stderr.write(f"{row['case']} of {row['world']}: {row['error']}\n")
    return int(is_missed)


if __name__ == "__main__":
    raise SystemExit(main())
