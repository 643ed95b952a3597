"""Errors of the communication model beside measured all-reduces, fitted to other measurements than those asked for.

    python benches/all_reduce.py [FOLDER OF TABLES]          # two minutes

Rows of `nccl_allreduce_bandwidth.csv`, 64 KiB and more. One node of A100 with 3, 4 and 7 ranks, and a DGX-1 (V100) with
2, 4, 6 and 7: the constants of `prism calibrate comm`, fitted to the others of the same GPU (goal G1). The DGX-1 with 5
ranks has a ring count of its own in the profile, read off these rows; asked for, it gets the two rings of its links.
Two sites with two nodes of eight H100: the constants of NVLS trees (`network.nvls_tree`), fitted to the other site,
under the choice of two versions of NCCL; without them NCCL's own formula stands alone. Goal G2 asks for four and eight
nodes of H100 from two of the same site, and there are no rows of those. Errors are |model / measured - 1|.
"""

from __future__ import annotations

import csv
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from prism_core.config import read_profile
from prism_core.imports.network import calibrate_comm
from prism_core.nccl import parse_settings, with_settings

ROOT = Path(__file__).resolve().parent.parent
#: Sizes, bytes: all, and those at which protocols and algorithms change.
BANDS = {"all": (64 << 10, 1 << 40), "64 KiB to 4 MiB": (64 << 10, 4 << 20)}
#: Sets that are fitted to each other, by profile.
ONE_NODE = {
    "a100-sxm": ("vtrain_A100_3", "vtrain_A100_4", "vtrain_A100_7"),
    "v100-dgx1": ("vtrain_V100_2", "vtrain_V100_4", "vtrain_V100_6", "vtrain_V100_7"),
}
FIVE, FIVE_MEASURED, FIVE_FROM_LINKS = "vtrain_V100_5", "4.0, 1.7, 2.0", "4.0, 2.0, 2.0"
TWO_NODES = ("h100_2n_issue309", "h100_2n_gjaion")
#: Whose choice of algorithms they are asked about: the profile's, and that of the first site (the other does not say).
TUNINGS = ("nccl-2.30", "nccl-2.26")
#: A setting of NCCL that rows of A100 suggest. Which version and settings they are of is not known.
WITHOUT_LL128 = "NCCL_PROTO=^LL128"
#: Values of the constants of NVLS trees that are tried.
FILLS, BANDWIDTHS = [step / 20 for step in range(31)], [1 + step / 50 for step in range(-2, 8)]
Row: TypeAlias = Mapping[str, str]


def write_log(found: Sequence[Row], band: tuple[int, int], path: Path) -> int:
    """Measurements of one communicator as nccl-tests prints them; how many."""
    low, high = band
    chosen = [row for row in found if low <= int(row["size_B"]) <= high]
    ranks, nodes = int(found[0]["n_gpus"]), int(found[0]["nodes"])
    lines = [f"# Rank {rank} Pid 1 on host{rank * nodes // ranks} device {rank}" for rank in range(ranks)]
    lines.append("# size count type redop root time")
    lines += [f"{row['size_B']} {int(row['size_B']) // 4} float sum -1 {row['time_us']}" for row in chosen]
    path.write_text("\n".join(lines) + "\n")
    return len(chosen)


def errors(log: Path, profile: str) -> dict[str, float]:
    """Median, ninth decile and worst error of a profile as it is."""
    found: dict[str, float] = calibrate_comm(log, profile=profile, collective="all_reduce")["before"]
    return found


def with_trees(path: Path, tuning: str, fill: float, bandwidth: float) -> str:
    """The profile of H100 with these constants of NVLS trees, which chooses as a version of NCCL does."""
    head, table = with_settings(read_profile("h100-sxm"), {}, tuning).split("[network.nvls_tree]")
    rest = table.split("\n[", 1)[1:]
    text = f"{head}[network.nvls_tree]\nfill = {fill}\nbandwidth = {bandwidth}\n" + "".join(
        f"\n[{part}" for part in rest
    )
    path.write_text(text)
    return str(path)


def fitted_trees(log: Path, path: Path, tuning: str) -> tuple[float, float]:
    """The constants with the least sum of median and ninth decile."""

    def loss(constants: tuple[float, float]) -> float:
        found = errors(log, with_trees(path, tuning, *constants))
        return found["median"] + found["p90"]

    return min(itertools.product(FILLS, BANDWIDTHS), key=loss)


def bases(own: str, by_set: Mapping[str, Sequence[Row]], here: Path, asked: str) -> tuple[str, str, str]:
    """The profile that was fitted to nothing, the one that was fitted to the other sets, and a remark."""
    profile = "v100-dgx1" if "V100" in own else "a100-sxm" if "A100" in own else "h100-sxm"
    others = [one for one in ONE_NODE.get(profile, TWO_NODES) if one != own]
    logs = [here / f"{other}.log" for other in others]
    for other, log in zip(others, logs, strict=True):
        write_log(by_set[other], BANDS["all"], log)
    fitted = here / "fitted.toml"
    if profile in ONE_NODE:
        plain, start = here / "plain.toml", here / "start.toml"
        text = with_settings(read_profile(profile), parse_settings([asked] if asked else []))
        plain.write_text(text)
        start.write_text(text.replace(FIVE_MEASURED, FIVE_FROM_LINKS) if own == FIVE else text)
        factors = calibrate_comm(logs, fitted, profile=str(start), collective="all_reduce")["factors"]
        said = f"bandwidth x {factors['nvlink_bandwidth']:.3f}, {factors['launch_us']:+.1f} us {asked}"
        return str(plain), str(fitted), said
    fill, bandwidth = fitted_trees(logs[0], here / "tried.toml", asked)
    formula = with_trees(here / "plain.toml", asked, 0.0, 1.0)
    return formula, with_trees(fitted, asked, fill, bandwidth), f"{asked}, fill {fill:.2f}, bandwidth {bandwidth:.2f}"


def together(sets: Sequence[str], by_set: Mapping[str, Sequence[Row]], here: Path, profile: str, asked: str) -> str:
    """A line about all rows of sets that are left out in turn."""
    logs = [here / f"{one}.log" for one in sets]
    for one, log in zip(sets, logs, strict=True):
        write_log(by_set[one], BANDS["all"], log)
    start = here / "start.toml"
    start.write_text(with_settings(read_profile(profile), parse_settings([asked] if asked else [])))
    account = calibrate_comm(logs, profile=str(start), collective="all_reduce")
    cells = [account[key] for key in ("before", "left_out")]
    said = [", ".join(f"{cell[key]:.1%}" for key in ("median", "p90", "worst")) for cell in cells]
    return f"| all of {profile} | all | {account['rows']} | {' | '.join(said)} | {asked} |"


def main() -> None:
    """Prints the table."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "data" / "tables"
    table = folder / "nccl_allreduce_bandwidth.csv"
    if not table.is_file():
        sys.exit(f"{table} is not here: name the folder of tables")
    by_set: dict[str, list[Row]] = {}
    for row in csv.DictReader(table.open()):
        if float(row["time_us"]) > 0:
            by_set.setdefault(row["dataset"], []).append(row)
    print("| rows | sizes | measurements | before: median, p90, worst | fitted to the others | with |\n|" + "---|" * 6)
    one_node = [(own, "") for own in (*itertools.chain(*ONE_NODE.values()), FIVE)]
    one_node += [(own, WITHOUT_LL128) for own in ONE_NODE["a100-sxm"]]
    for own, asked in (*one_node, *itertools.product(TWO_NODES, TUNINGS)):
        with tempfile.TemporaryDirectory(prefix="prism-all-reduce-") as temporary:
            here = Path(temporary)
            before, fitted, remark = bases(own, by_set, here, asked)
            for name, band in BANDS.items():
                count = write_log(by_set[own], band, here / "own.log")
                cells = [errors(here / "own.log", base) for base in (before, fitted)]
                said = [", ".join(f"{cell[key]:.1%}" for key in ("median", "p90", "worst")) for cell in cells]
                print(f"| {own} | {name} | {count} | {' | '.join(said)} | {remark} |")
    for profile, asked in (("a100-sxm", ""), ("a100-sxm", WITHOUT_LL128), ("v100-dgx1", "")):
        with tempfile.TemporaryDirectory(prefix="prism-all-reduce-") as temporary:
            print(together(ONE_NODE[profile], by_set, Path(temporary), profile, asked))


if __name__ == "__main__":
    main()
