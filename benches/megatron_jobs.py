"""Megatron jobs of more than one bench: layouts of `tests/programs/megatron_gpt.py`, and the cluster they run on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_core import _native
from prism_core.perturb import Perturbation, SlowLink, Straggler, to_toml
from prism_core.profiles import with_entry

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = "tests/programs/megatron_gpt.py"
HIDDEN, HEADS, SEQ, VOCAB = 2048, 16, 2048, 8192
#: Small worlds have nodes of two devices, so that both kinds of link are in use.
SMALL_NODE = 2
#: The site: entries of the profile, and what they are there.
SITE = {"node.gpus": SMALL_NODE, "network.latency_ns": 28000, "network.nic_efficiency": 0.67}
#: How popular experts are. The rule is needed because kernels are not run; balanced is the default without one.
ROUTING = '[routing]\nkind = "{kind}"\nexponent = 1.5\nseed = 0\n'


@dataclass(frozen=True)
class Job:
    """A layout on so many ranks, and what is compared."""

    name: str
    world_size: int
    options: tuple[str, ...]
    #: Ranks that run the program in hybrid emulation.
    sandbox: tuple[int, ...] = (0, 3)
    #: `balanced` or `zipf`: routing of a mixture of experts.
    routing: str | None = None
    perturb: tuple[Perturbation, ...] = ()
    #: Layers of the whole model, for its floating-point operations.
    layers: int = 4
    #: What is added to the ideal time for the pipeline: (stages - 1) / (microbatches * interleaving).
    bubble: float = 0.0
    #: Samples of an iteration per rank that holds a whole pipeline.
    samples: int = 2
    forward_twice: bool = False

    @property
    def folder(self) -> str:
        """What its files are kept under; jobs that differ in perturbations only share a graph."""
        return "_".join(option.strip("-").replace("=", "") for option in (*self.options, self.routing or "plain"))

    @property
    def command(self) -> list[str]:
        """The program and its options."""
        model = [f"--hidden={HIDDEN}", f"--heads={HEADS}", f"--seq={SEQ}", f"--vocab={VOCAB}", "--iters=4"]
        return [sys.executable, PROGRAM, *model, f"--layers={self.layers}", *self.options]

    def extra(self, folder: Path, *, perturbed: bool = True) -> list[object]:
        """Options of `prism` that name its rules, and its perturbations."""
        words: list[object] = []
        if self.routing is not None:
            rules = folder / "rules.toml"
            rules.write_text(ROUTING.format(kind=self.routing))
            words += ["--rules", rules]
        if perturbed and self.perturb:
            file = folder / "perturb.toml"
            file.write_text(to_toml(self.perturb))
            words += ["--perturb", file]
        return words


_TP_PP = ("--tp=2", "--pp=2", "--microbatches=4")
_DEEP: dict[str, Any] = {"bubble": 1 / 4, "samples": 4}
_MOE = ("--ep=4", "--experts=8", "--microbatches=2")
JOBS = [
    Job("TP 2, PP 2, DP 2, 1F1B", 8, _TP_PP, **_DEEP),
    Job("the same, rank 5 half as fast", 8, _TP_PP, perturb=(Straggler(ranks=[5], factor=2.0),), **_DEEP),
    Job("the same, link at a fifth", 8, _TP_PP, perturb=(SlowLink(ranks=[6], bandwidth_factor=0.2),), **_DEEP),
    Job("PP 2, interleaved, DP 2", 4, ("--pp=2", "--vpp=2", "--microbatches=4"), bubble=1 / 8, samples=4),
    Job("CP 2, DP 2", 4, ("--cp=2", "--microbatches=2")),
    Job("experts, EP 4, balanced", 4, _MOE, routing="balanced"),
    Job("experts, EP 4, skewed", 4, _MOE, routing="zipf"),
    Job("DP 4, 8 microbatches", 4, ("--microbatches=8",), samples=8),
    Job("TP 2, DP 2, recompute", 4, ("--tp=2", "--recompute", "--microbatches=2"), forward_twice=True),
    Job("DP 4, distributed optimizer", 4, ("--distributed-optimizer", "--microbatches=2")),
    Job("DP 4, the same, overlap", 4, ("--distributed-optimizer", "--overlap", "--microbatches=2")),
]
#: Compared with all ranks real, and no more: a run of all of them takes minutes.
LARGE_JOBS = [
    Job("TP 2, PP 2, DP 8, 1F1B", 32, _TP_PP, sandbox=(0, 21), **_DEEP),
    Job("the same, rank 17 half as fast", 32, _TP_PP, sandbox=(0, 21), perturb=(Straggler(ranks=[17], factor=2.0),)),
]


def site(folder: Path) -> str:
    """A cluster of its own: H100 in nodes of two, whose network has 0.7 times the bandwidth and twice the latency.

    The default profile is then wrong, as it is of any site that is not calibrated. The factors are chosen.
    """
    text = _native.profile_toml("h100-sxm")
    for entry, value in SITE.items():
        text = with_entry(text, entry, value)
    path = folder / "site.toml"
    path.write_text(text)
    return str(path)


def prism(*arguments: object) -> dict[str, Any]:
    """The JSON document of one command of `prism`."""
    command = [sys.executable, "-m", "prism_core.cli", str(arguments[0]), "--json", *map(str, arguments[1:])]
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{child.stderr[-4000:]}{child.stdout[-1000:]}")
    document: dict[str, Any] = json.loads(child.stdout)
    return document


def kept(file: Path, *arguments: object) -> dict[str, Any]:
    """As `prism`, once: the document is kept in `file` and taken from there while the command stays the same."""
    command = [str(argument) for argument in arguments]
    known = json.loads(file.read_text()) if file.exists() else {}
    if known.get("command") != command:
        known = {"command": command, "document": prism(*arguments)}
        file.write_text(json.dumps(known))
    document: dict[str, Any] = known["document"]
    return document


def collect(job: Job, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The job's graph and what its collection said; ranks are run one after the other."""
    graph = folder / "job.prism"
    device = f"emulated:{site(folder)}"
    rules = job.extra(folder, perturbed=False)
    arguments = ["--world-size", job.world_size, "--device", device, *rules, "-o", graph, "--", *job.command]
    return graph, kept(folder / "collected.json", "collect", *arguments)


def emulate(job: Job, folder: Path, *, everyone: bool) -> dict[str, Any]:
    """A run of the job: all its ranks run the program, or its sandbox does and the others are replayed."""
    graph, _ = collect(job, folder)
    name = ("real-" if everyone else "hybrid-") + "-".join(rule.kind for rule in job.perturb)
    sandbox = f"0-{job.world_size - 1}" if everyone else ",".join(map(str, job.sandbox))
    arguments = [graph, "--sandbox", sandbox, *job.extra(folder), "-o", folder / name, "--", *job.command]
    return kept(folder / f"{name}.json", "emulate", *arguments)
