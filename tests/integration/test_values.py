"""Values of PyTorch programs on a device that runs no kernels: right, given by a rule, or reported as unknown."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

#: Every expression is printed as JSON; the answer is that of PyTorch on the CPU, which the test evaluates itself.
EXPRESSIONS = {
    "ones": "torch.ones(4, **d)",
    "arange": "torch.arange(2, 9, 3, **d)",
    "full": "torch.full((2, 2), 3.5, **d)",
    "linspace": "torch.linspace(0, 1, 5, **d)",
    "eye": "torch.eye(3, **d)",
    "add_and_multiply": "(torch.tensor([1, 2, 3], **d) + 1) * torch.tensor([2, 3, 4], **d)",
    "in_place": "torch.ones(3, **d).add_(1).mul_(3)",
    "column": "torch.zeros(3, 2, **d).index_fill_(1, torch.tensor([0], **d), 7)",
    "nonzero": "torch.nonzero(torch.tensor([0, 1, 1], **d))",
    "where": "torch.where(torch.tensor([1, 0, 1], **d))[0]",
    "boolean_index": "torch.arange(15, **d).view(5, 3)[torch.tensor([True, False, True, True, False], **d)]",
    "masked_select": "torch.masked_select(torch.arange(4.0, **d), torch.tensor([1, 0, 1, 0], **d).bool())",
    "unique": "torch.cat(torch.unique(torch.tensor([5, 2, 2], **d), return_inverse=True, return_counts=True))",
    "unique_rows": "torch.unique(torch.tensor([[5, 2], [5, 2], [1, 1]], **d), dim=0)",
    "unique_consecutive": "torch.unique_consecutive(torch.tensor([5, 2, 2, 5], **d))",
    "sort": "torch.sort(torch.tensor([3.0, 1, 2], **d))[1]",
    "topk": "torch.topk(torch.tensor([3.0, 1, 2], **d), 2)[0]",
    "cumsum": "torch.arange(5, **d).cumsum(0)",
    "bincount": "torch.bincount(torch.tensor([0, 1, 1, 3], **d))",
    "one_hot": "torch.nn.functional.one_hot(torch.tensor([0, 2], **d))",
    "histc": "torch.histc(torch.tensor([0.0, 1, 1, 3], **d), 4, 0, 4)",
    "softmax": "torch.softmax(torch.tensor([0.0, 1], **d), 0)",
    "tril": "torch.tril(torch.ones(3, 3, **d))",
    "repeat_interleave": "torch.repeat_interleave(torch.arange(3, **d), torch.tensor([1, 2, 0], **d))",
    "scatter": "torch.zeros(3, 4, **d).scatter(1, torch.tensor([[0], [1], [3]], **d), 1.0)",
    "accumulate": "torch.zeros(3, **d).index_put_((torch.tensor([0, 0, 2], **d),), torch.ones(3, **d), True)",
    "mean": "torch.arange(6.0, **d).view(2, 3).mean(1)",
    "any": "torch.tensor([[0, 1], [0, 0]], **d).bool().any(1)",
    "convert": "torch.tensor([1.5, 2.25], **d).to(torch.bfloat16).float()",
    "permutation": "torch.randperm(6, **d).sort()[0]",
    "equal": "torch.tensor(torch.equal(torch.ones(3, **d), torch.ones(3, **d)))",
}

PROGRAM = """
    import json, sys, torch
    d = {"device": "cuda"}
    EXPRESSIONS = json.loads(sys.argv[1])
    for name, text in EXPRESSIONS.items():
        print("VALUE", name, json.dumps(eval(text).tolist()), flush=True)

    # A column is written, the rest of the storage stays known.
    grid = torch.zeros(3, 2, **d)
    grid[:, 0].fill_(7)
    print("VALUE view", json.dumps(grid.tolist()))

    # Loss scaling as in a healthy run.
    model, scales = torch.nn.Linear(8, 8).cuda(), []
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda", growth_interval=2)
    for _ in range(5):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(4, 8, **d)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    print("VALUE scales", json.dumps(scales))

    # A product is not computed: what follows from it is unknown, and what it read stays known.
    known = torch.tensor([1.0, 2.0], **d)
    product = torch.ones(512, 512, **d) @ torch.ones(512, 512, **d)
    (product[0, :2] * known).sum().item()  # UNKNOWN READ
    print("VALUE read_only", json.dumps(known.tolist()))
    isnan = torch.isnan(product).any().item()
    print("VALUE isnan", json.dumps(isnan))
    healthy = [torch.isfinite(product).all(), torch.isinf(product).any(), (product != product).any()]
    print("VALUE healthy", json.dumps([value.item() for value in healthy]))
    print("VALUE norm", json.dumps(torch.linalg.vector_norm(product).item()))
    exact = torch.tensor([1.0, float("inf"), float("nan")], **d)
    print("VALUE exact", json.dumps([torch.isfinite(exact).tolist(), torch.isinf(exact).tolist()]))
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def printed(log: str) -> dict[str, Any]:
    lines = [line.split(" ", 2) for line in log.splitlines() if line.startswith("VALUE ")]
    return {name: json.loads(value) for _, name, value in lines}


@pytest.fixture(scope="module")
def run(
    torch_program: list[str], prism: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """What the program printed, the summary's values, and the program."""
    folder = tmp_path_factory.mktemp("values")
    program = write(folder / "program.py", PROGRAM)
    command = [sys.executable, program, json.dumps(EXPRESSIONS)]
    summary = prism("collect", "--world-size", 1, "-o", folder / "job.prism", "--", *command).document
    values = summary["ranks"][0]["values"]
    notes = " ".join([*summary["notes"], *summary["ranks"][0]["notes"]])
    if "no value plane" in notes:
        pytest.skip(notes)
    return printed((folder / "job.logs/rank-0.log").read_text()), values, program


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_small_operator_is_right(name: str, run: tuple[dict[str, Any], Any, Any]) -> None:
    torch = pytest.importorskip("torch")
    expected = eval(EXPRESSIONS[name], {"torch": torch, "d": {"device": "cpu"}}).tolist()
    assert run[0][name] == (pytest.approx(expected, rel=1e-6) if name == "softmax" else expected)


def test_the_loss_scale_grows_as_in_a_healthy_run(run: tuple[dict[str, Any], Any, Any]) -> None:
    assert run[0]["scales"] == [65536.0, 131072.0, 131072.0, 262144.0, 262144.0]


def test_a_view_is_written_and_an_input_is_not(run: tuple[dict[str, Any], Any, Any]) -> None:
    assert run[0]["view"] == [[7.0, 0.0]] * 3
    assert run[0]["read_only"] == [1.0, 2.0]
    assert run[0]["isnan"] is False


def test_checks_for_overflow_find_a_healthy_run_in_what_nobody_computes(run: tuple[dict[str, Any], Any, Any]) -> None:
    assert run[0]["healthy"] == [True, False, False]
    assert run[0]["norm"] == 1.0
    assert run[0]["exact"] == [[True, False, False], [False, True, False]], "what is known stays exact"


def test_every_read_has_a_grade(run: tuple[dict[str, Any], dict[str, Any], Path]) -> None:
    _, values, program = run
    unknown = [site for site in values["sites"] if site["grade"] == "unknown"]
    line = next(n for n, text in enumerate(program.read_text().splitlines(), 1) if "UNKNOWN READ" in text)
    assert [(site["count"], site["bytes"], site["place"]) for site in unknown] == [(1, 4, f"{program}:{line}")]
    assert "reduce_kernel" in unknown[0]["source"], "the kernel that would have written it"
    assert values["unknown"] == 1
    assert values["known"] >= len(EXPRESSIONS) - 2
    sources = {site["source"] for site in values["sites"] if site["grade"] == "provided"}
    assert {"loss scale: gradients are finite", "random numbers of the CPU", "no value is NaN"} <= sources
    assert {"values are finite", "a norm is 1"} <= sources


RULES = """
    [[read]]
    place = "*program.py:*"
    name = "loss"
    type = "float32"
    values = [2.5, 2.25]

    [loss_scale]
    overflows = [1]
"""
LOSSES = """
    import json, torch
    model = torch.nn.Linear(512, 512).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda")
    losses, scales = [], []
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(512, 512, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    print("VALUE losses", json.dumps(losses))
    print("VALUE scales", json.dumps(scales))
"""


def test_rules_give_losses_and_overflows(torch_program: list[str], prism: Callable[..., Any], tmp_path: Path) -> None:
    rules, program = write(tmp_path / "rules.toml", RULES), write(tmp_path / "program.py", LOSSES)
    graph = tmp_path / "job.prism"
    command = [sys.executable, program]
    summary = prism("collect", "--world-size", 1, "--rules", rules, "-o", graph, "--", *command).document
    found = printed((tmp_path / "job.logs/rank-0.log").read_text())
    assert found["losses"] == [2.5, 2.25, 2.25]
    assert found["scales"] == [65536.0, 32768.0, 32768.0], "halved by the overflow, which also skips the step"
    values = summary["ranks"][0]["values"]
    assert values["unknown"] == 0
    provided = {site["source"]: site["count"] for site in values["sites"]}
    assert provided["loss"] == 3
    assert summary["ranks"][0]["iterations"] == 2, "one of three steps was skipped"


def test_a_strict_run_ends_at_the_first_unknown_read(
    torch_program: list[str], prism: Callable[..., Any], tmp_path: Path
) -> None:
    program = write(tmp_path / "program.py", LOSSES)
    outcome = prism(
        "collect", "--world-size", 1, "--strict-values", "-o", tmp_path / "job.prism", "--", sys.executable, program
    )
    assert outcome.error["kind"] == "UnknownValueError"
    assert "4 bytes" in outcome.error["message"] and f"{program}:13" in outcome.error["message"]
    assert "last written by" in outcome.error["message"] and "let a rule provide" in outcome.error["message"]


ROUTER = """
    import torch

    class TopKRouter(torch.nn.Module):
        def __init__(self, hidden, experts, topk):
            super().__init__()
            self.topk = topk
            self.weight = torch.nn.Parameter(torch.empty(experts, hidden, device="cuda"))

        def gating(self, hidden):
            return torch.nn.functional.linear(hidden, self.weight)

        def forward(self, hidden):
            scores, experts = torch.topk(torch.softmax(self.gating(hidden), -1), self.topk)
            routing = torch.zeros(len(hidden), len(self.weight), dtype=torch.bool, device="cuda")
            return scores, routing.scatter(1, experts, True)
"""
MIXTURE = """
    import json, os, torch
    import torch.distributed as dist
    from megatron.core.transformer.moe.router import TopKRouter
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    tokens, hidden, experts, topk, world = 512, 64, 16, 2, dist.get_world_size()
    router = TopKRouter(hidden, experts, topk)
    expert = torch.nn.Linear(hidden, hidden).cuda()
    optimizer = torch.optim.SGD(expert.parameters(), 0.1)
    for step in range(2):
        inputs = torch.randn(tokens, hidden, device="cuda") @ torch.ones(hidden, hidden, device="cuda")
        scores, routing = router(inputs)
        per_expert = routing.sum(0)
        sends = per_expert.view(world, -1).sum(1)
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends)
        input_splits, output_splits = sends.tolist(), receives.tolist()
        chosen = routing.T.nonzero()[:, 1]
        permuted = inputs.index_select(0, chosen)
        arrived = torch.empty(sum(output_splits), hidden, device="cuda")
        dist.all_to_all_single(arrived, permuted, output_splits, input_splits)
        expert(arrived).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"VALUE splits{step}", json.dumps([per_expert.tolist(), input_splits, output_splits]))
"""


RECORDED = [128, 0, 64, 64, 100, 28, *[64] * 10]


@pytest.mark.parametrize(
    ("rules", "world", "ranks"),
    [
        ("", 8, "5"),
        (f'[routing]\nkind = "recorded"\ncounts = [{RECORDED}]', 8, "5"),
        # Every place among the experts has its own number of tokens: each rank is a role of its own.
        ('[routing]\nkind = "zipf"\nexponent = 1.5\nseed = 3', 2, "all"),
    ],
    ids=["balanced", "recorded", "zipf"],
)
def test_tokens_go_to_experts_by_the_rule(
    rules: str, world: int, ranks: str, torch_program: list[str], prism: Callable[..., Any], tmp_path: Path
) -> None:
    router = write(tmp_path / "megatron/core/transformer/moe/router.py", ROUTER)
    # Regular packages come before those of an installed Megatron.
    for folder in list(router.parents)[:4]:
        (folder / "__init__.py").touch()
    program, graph = write(tmp_path / "program.py", MIXTURE), tmp_path / "job.prism"
    file = tmp_path / "rules.toml"
    file.write_text(rules)
    options = ["--world-size", world, "--ranks", ranks, "--verify", 1 if ranks == "5" else 0, "--rules", file]
    summary = prism("collect", *options, "-o", graph, "--", sys.executable, program).document
    rank = 5 if ranks == "5" else 1
    found = printed((tmp_path / f"job.logs/rank-{rank}.log").read_text())
    for step in range(2):
        per_expert, sends, receives = found[f"splits{step}"]
        assert sum(per_expert) == 512 * 2
        share = 16 // world
        assert sends == [sum(per_expert[at : at + share]) for at in range(0, 16, share)]
        assert receives == [sends[rank]] * world, "every peer is taken to send what this rank sends itself"
        if "zipf" in rules:
            assert max(per_expert) > 4 * min(per_expert)
        else:
            assert per_expert == (RECORDED if "recorded" in rules else [64] * 16)
    values = summary["ranks"][0]["values"]
    assert values["unknown"] == 0, values["sites"]
    assert any(site["source"].startswith("routing: ") for site in values["sites"])
    assert any(note.startswith("rule routing") for note in summary["ranks"][0]["notes"])


USER_RULES = """
    import sys

    def install(rules):
        def fill(result, owner):
            torch = sys.modules["torch"]
            rules.fill(result, torch.full(result.shape, 3.0, device="cpu"), "my rule")
        rules.after("my_module:Model.score", fill)
"""
USER_PROGRAM = """
    import json, torch
    from my_module import Model
    print("VALUE score", json.dumps(Model().score().tolist()))
"""
USER_MODULE = """
    import torch
    class Model:
        def score(self):
            return torch.ones(300, 300, device="cuda") @ torch.ones(300, 2, device="cuda")
"""


def test_a_rule_in_python(torch_program: list[str], prism: Callable[..., Any], tmp_path: Path) -> None:
    write(tmp_path / "my_module.py", USER_MODULE)
    write(tmp_path / "my_rules.py", USER_RULES)
    rules = write(tmp_path / "rules.toml", '[python]\nfiles = ["my_rules.py"]\n')
    program, graph = write(tmp_path / "program.py", USER_PROGRAM), tmp_path / "job.prism"
    summary = prism("collect", "--world-size", 1, "--rules", rules, "-o", graph, "--", sys.executable, program).document
    assert printed((tmp_path / "job.logs/rank-0.log").read_text())["score"] == [[3.0, 3.0]] * 300
    sites = summary["ranks"][0]["values"]["sites"]
    assert [(site["grade"], site["source"]) for site in sites] == [("provided", "my rule")]


MAYBE = """
    import os, torch
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(int(os.environ["ITERATIONS"])):
        model(torch.randn(4, 8, device="cuda")).sum().backward()
        optimizer.step()
"""


def test_a_sandbox_rank_that_does_not_train_is_an_error(
    torch_program: list[str], prism: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, graph = write(tmp_path / "program.py", MAYBE), tmp_path / "job.prism"
    monkeypatch.setenv("ITERATIONS", "2")
    prism("collect", "--world-size", 1, "-o", graph, "--", sys.executable, program).document  # noqa: B018
    monkeypatch.setenv("ITERATIONS", "0")
    outcome = prism("emulate", graph, "--sandbox", 0, "-o", tmp_path / "run", "--", sys.executable, program)
    assert outcome.error["kind"] == "SessionError"
    assert "rank 0 ended well without one optimizer step, and the graph has 2 iterations" in outcome.error["message"]
