"""Memory of one of Megatron-LM's functional test cases against the values it publishes, to the byte.

    python benches/megatron_memory.py --checkout PATH --case PATH/model_config.yaml ... [--device emulated:a100-sxm]

The arguments come from the case's own file. What the case takes from NVIDIA's file servers is replaced: the data by
mock data, the tokenizer by one with the same padded vocabulary. `--apex` puts stand-ins in the place of Apex's fused
kernels, which allocate what Apex allocates; without it Megatron falls back to PyTorch's, which allocate more.
Cases with `--transformer-impl transformer_engine` need Transformer Engine (`make test-te` builds it), and no `--apex`.
The rank that publishes is the last one; the others do not run, except rank 0, whose flags every rank asks for.
Several cases end with a table: the smallest difference from a published environment, least and most published.
Environments of another card (`dgx_h100`, `dgx_gb200`) than `--device` differ by the workspaces of that card.

Needs: the checkout's own requirements on PYTHONPATH (six, einops, pyyaml, triton), and its compiled
`megatron/core/datasets/helpers_cpp`, which the wheel `megatron-core` of the same version brings.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

RUNNER = Path(__file__).with_name("megatron_runner.py")
#: Arguments that name files of NVIDIA's servers, or results nobody looks at here; the rest is passed on.
DROPPED = {
    "--save", "--load", "--data-path", "--data-cache-path", "--vocab-file", "--merge-file", "--tensorboard-dir",
    "--save-interval", "--tokenizer-type", "--tokenizer-model",
    "--ckpt-format", "--dist-ckpt-strictness", "--eval-iters", "--eval-interval", "--exit-interval",
}  # fmt: skip
#: GPT-2's byte-pair vocabulary, before Megatron pads it. Megatron's null tokenizer adds one.
GPT2_VOCABULARY = 50257


def read_case(path: Path) -> tuple[dict[str, str], list[str]]:
    """Environment and arguments of a `model_config.yaml`: two flat sections are all these files have.

    Raises:
        ValueError: The file has no `MODEL_ARGS`.
    """
    sections: dict[str, dict[str, str]] = {}
    section: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        text = re.sub(r"\s+#.*$", "", line).rstrip()
        if re.fullmatch(r"\w+:", text):
            section = sections.setdefault(text[:-1], {})
        elif match := re.fullmatch(r"  (\S+):\s*(.*)", text):
            section[match[1]] = match[2].strip("'\"")
    if "MODEL_ARGS" not in sections:
        raise ValueError(f"{path} has no MODEL_ARGS: is it a model_config.yaml?")
    return sections.get("ENV_VARS", {}), arguments_of(sections["MODEL_ARGS"])


def arguments_of(options: dict[str, str]) -> list[str]:
    """Command line of a case."""
    words: list[str] = []
    for name, value in options.items():
        if name in DROPPED or value == "false":
            continue
        words.append(name)
        if value != "true":
            words += value.split()
    return words


def extra_arguments(options: Sequence[str], iterations: int, *, apex: bool) -> list[str]:
    """What replaces the files, stops early, and avoids what is not installed."""
    words = ["--mock-data", "--tokenizer-type", "NullTokenizer"]
    if "--vocab-size" not in options:  # else the case brings a null tokenizer of its own
        words += ["--vocab-size", str(GPT2_VOCABULARY - 1)]
    words += ["--exit-interval", str(iterations), "--eval-iters", "0", "--eval-interval", "1000"]
    words += ["--tensorboard-dir", "tensorboard"]
    # What would be Apex's is Transformer Engine's where that is used.
    is_local = value_of(options, "--transformer-impl") == "local"
    if not apex and is_local:
        words += ["--no-masked-softmax-fusion", "--no-persist-layer-norm"]
    return [word for word in words if not (word.startswith("--no-") and word in options)]


def value_of(options: Sequence[str], name: str) -> str | None:
    """The value of an option."""
    return options[options.index(name) + 1] if name in options else None


def measured(log: str) -> dict[str, dict[int, int]]:
    """What the program wrote for TensorBoard, by name and iteration."""
    found: dict[str, dict[int, int]] = {}
    for name, step, value in re.findall(r"^scalar (mem-\S+) (\d+) ([\d.]+)$", log, re.MULTILINE):
        found.setdefault(name, {})[int(step)] = int(float(value))
    return found


def published(path: Path) -> dict[str, dict[int, int]]:
    """The same from a `golden_values_*.json`."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: {int(step): int(float(value)) for step, value in series["values"].items() if value != "nan"}
        for name, series in document.items()
        if name.startswith("mem-")
    }


def run_case(options: argparse.Namespace, case: Path, folder: Path) -> dict[str, dict[int, int]]:
    """Runs the last rank, and rank 0 for its flags; the last rank's figures."""
    variables, arguments = read_case(case)
    apex = ["--apex"] if options.apex else []
    last = options.world_size - 1
    command = [
        sys.executable, "-m", "prism_core.cli", "collect", "--world-size", str(options.world_size),
        "--device", options.device, "--ranks", f"0,{last}" if last else "0", "--verify", "0",
        "-o", str(folder / "case.prism"), "--", "env", *(f"{name}={value}" for name, value in variables.items()),
        sys.executable, str(RUNNER), *apex, str(options.checkout / "pretrain_gpt.py"),
        *arguments, *extra_arguments(arguments, options.iterations, apex=options.apex),
    ]  # fmt: skip
    child = subprocess.run(command, text=True, capture_output=True, check=False, cwd=folder)
    log = folder / "case.logs" / f"rank-{last}.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    figures = measured(text)
    is_complete = all(options.iterations in series for series in figures.values()) and figures
    if child.returncode != 0 and not is_complete:
        tails = [path.read_text(errors="replace")[-3000:] for path in sorted(log.parent.glob("*.log"))]
        raise SystemExit("\n".join([child.stderr, *tails]))
    # A pipeline's two ranks are no graph of it, and what happens after the last iteration does not change the figures.
    if child.returncode != 0:
        sys.stderr.write(f"after the last iteration: {child.stderr.strip().splitlines()[-1]}\n")
    return figures


def report(figures: dict[str, dict[int, int]], goldens: Sequence[Path]) -> list[str]:
    """One line per figure, and per published environment the difference in bytes."""
    lines = []
    for name in ("mem-allocated-bytes", "mem-max-allocated-bytes"):
        steps = figures.get(name, {})
        if not steps:
            raise SystemExit(f"the program wrote no {name}")
        last = max(steps)
        lines.append(f"{name} at iteration {last}: {steps[last]:,}")
        for golden in goldens:
            theirs = published(golden).get(name, {})
            if theirs:
                step = last if last in theirs else max(theirs)
                environment = golden.stem.removeprefix("golden_values_")
                lines.append(f"  {environment} at {step}: {theirs[step]:,}, difference {steps[last] - theirs[step]:+,}")
    return lines


def table_row(case: Path, figures: dict[str, dict[int, int]], goldens: Sequence[Path]) -> str:
    """A case's line of the table: per figure the value, the nearest published one and whether the spread holds it."""
    cells = [f"`{case.parent.name}`"]
    for name in ("mem-allocated-bytes", "mem-max-allocated-bytes"):
        steps = figures[name]
        own = steps[max(steps)]
        theirs = [series[max(series)] for golden in goldens if (series := published(golden).get(name))]
        if not theirs:
            cells += [f"{own:,}", "-"]
            continue
        nearest = min((own - value for value in theirs), key=abs)
        inside = "equal" if nearest == 0 else "inside" if min(theirs) <= own <= max(theirs) else "outside"
        cells += [f"{own:,}", f"{inside} ({nearest:+,}; {min(theirs):,} to {max(theirs):,})"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of Megatron-LM")
    parser.add_argument("--case", type=Path, nargs="+", required=True, help="model_config.yaml of one case or more")
    parser.add_argument("--golden", help="only published environments whose name contains this, such as dgx_a100")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--device", default="emulated:h100-sxm")
    parser.add_argument("--folder", type=Path, help="where to leave graphs and logs, a folder for each case")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument(
        "--apex", action="store_true", help="stand-ins that allocate what Apex's fused kernels allocate"
    )
    options = parser.parse_args()
    options.checkout = options.checkout.resolve()
    rows = []
    with tempfile.TemporaryDirectory(prefix="megatron-memory-") as temporary:
        for case in (path.resolve() for path in options.case):
            folder = (options.folder or Path(temporary)).resolve() / case.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            goldens = sorted(case.parent.glob(f"golden_values_*{options.golden or ''}*.json"))
            figures = run_case(options, case, folder)
            print("\n".join([case.parent.name, *report(figures, goldens)]), flush=True)
            rows.append(table_row(case, figures, goldens))
    if len(rows) > 1:
        head = ["case", "allocated", "published: nearest, range", "peak", "published: nearest, range"]
        print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
        print("\n".join(rows))


if __name__ == "__main__":
    main()
