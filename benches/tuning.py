"""Does a sweep rank configurations as runs of all ranks do? Kendall's tau, and the times beside each other.

    python benches/tuning.py            # some minutes

One Megatron-like model and one global batch on four ranks: splits into tensor and pipeline stages, micro-batch,
overlap of data-parallel communication, recomputation of activations. `prism sweep` collects every configuration and
replays it; then every rank of each runs the program together. Kendall's tau of the two orders is computed from all
pairs (tau-b: pairs that are equal on one side only count against it); the script fails below 0.9.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_jobs import ROOT, kept, prism, site

WORLD, GLOBAL_BATCH = 4, 16
SMALLEST_TAU = 0.9
MODEL = "--hidden 2048 --heads 16 --seq 2048 --vocab 8192 --layers 4 --iters 3"
OVERLAP = "--distributed-optimizer --overlap"
#: Tensor-parallel degree, pipeline stages, micro-batch, further options.
CONFIGURATIONS = [
    (1, 1, 1, ""),
    (1, 1, 4, OVERLAP),
    (1, 1, 4, "--recompute"),
    (2, 1, 2, ""),
    (1, 2, 2, ""),
    (2, 2, 1, ""),
]


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float:
    """Kendall's tau-b of two series of figures.

    Raises:
        ValueError: They differ in length, or one is constant, so that there is no order.
    """
    if len(left) != len(right):
        raise ValueError("series of different length")

    def sign(series: Sequence[float], pair: tuple[int, int]) -> int:
        return (series[pair[0]] > series[pair[1]]) - (series[pair[0]] < series[pair[1]])

    pairs = list(itertools.combinations(range(len(left)), 2))
    agreement = sum(sign(left, pair) * sign(right, pair) for pair in pairs)
    ordered = [sum(sign(series, pair) != 0 for pair in pairs) for series in (left, right)]
    if 0 in ordered:
        raise ValueError("a series without an order")
    return agreement / math.sqrt(ordered[0] * ordered[1])


def command(tp: int, pp: int, micro_batch: int, flags: str) -> str:
    """The program of a configuration, with as many microbatches as the global batch wants."""
    microbatches = GLOBAL_BATCH // (WORLD // (tp * pp) * micro_batch)
    program = f"{sys.executable} {ROOT / 'tests/programs/megatron_gpt.py'} {MODEL}"
    return f"{program} --tp {tp} --pp {pp} --micro-batch {micro_batch} --microbatches {microbatches} {flags}".strip()


def write_sweep(folder: Path) -> Path:
    """The sweep file."""
    tables = [
        f'[[config]]\ntp = {tp}\npp = {pp}\nmicro_batch = {micro_batch}\nflags = "{flags}"\n'
        f'command = "{command(tp, pp, micro_batch, flags)}"\n'
        for tp, pp, micro_batch, flags in CONFIGURATIONS
    ]
    text = f"""\
[sweep]
command = "{{command}}"
keep_graphs = "graphs"

[collect]
world_size = {WORLD}
device = "emulated:{site(folder)}"

{"".join(tables)}"""
    tomllib.loads(text)
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def all_real(result: dict[str, Any], folder: Path) -> int:
    """Iteration time of a configuration whose ranks all run the program, ns."""
    key = result["key"]
    arguments = ["--sandbox", f"0-{WORLD - 1}", "-o", folder / f"run-{key}", "--", *result["values"]["command"].split()]
    run = kept(folder / f"real-{key}.json", "emulate", folder / "graphs" / f"{key}.prism", *arguments)
    return int(run["iteration_time_ns"][-1])


def main() -> None:
    """Prints the table; exit code 1 if the orders differ too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder for graphs and runs (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prism-tuning-") as temporary:
        folder = (args.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        results = prism("sweep", write_sweep(folder))["results"]
        if failed := [result["error"] for result in results if result["error"] is not None]:
            raise SystemExit(f"tuning: {len(failed)} configurations failed, the first: {failed[0]}")
        truth = [all_real(result, folder) for result in results]
    print("| TP | PP | micro-batch | options | sweep, ms | all real, ms | error | peak, GiB |\n|" + "---|" * 8)
    for result, real in zip(results, truth, strict=True):
        values, ours = result["values"], result["iteration_time_ns"]
        cells = [str(values[name]) for name in ("tp", "pp", "micro_batch", "flags")]
        cells += [f"{ours / 1e6:.3f}", f"{real / 1e6:.3f}", f"{ours / real - 1:+.4%}"]
        print(f"| {' | '.join(cells)} | {result['peak_bytes'] / 2**30:.2f} |")
    tau = kendall_tau([result["iteration_time_ns"] for result in results], truth)
    print(f"\nKendall's tau over {len(results)} configurations: {tau:.3f}")
    if tau < SMALLEST_TAU:
        raise SystemExit(f"tuning: tau is below {SMALLEST_TAU}")


if __name__ == "__main__":
    main()
