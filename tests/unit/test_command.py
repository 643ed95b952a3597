"""Command lines of training programs and the small languages of our own options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from prism_core import config
from prism_core.command import check_world_size, parse_command
from prism_core.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "argv", "world_size"),
    [
        ("python train.py --lr 1", "python train.py --lr 1", None),
        ("./train --nproc-per-node 8", "./train --nproc-per-node 8", None),
        ("torchrun --nnodes 4 --nproc-per-node 8 train.py -m x", "PYTHON train.py -m x", 32),
        ("torchrun --nnodes=4 --nproc_per_node=8 --standalone train.py", "PYTHON train.py", 32),
        ("torchrun --nproc-per-node auto -r3 -t 2 train.py", "PYTHON train.py", None),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 train.py", "PYTHON train.py", None),
        ("torchrun --nproc-per-node 8 -m pkg.train --x", "PYTHON -m pkg.train --x", 8),
        ("torchrun --no-python --nproc-per-node 2 ./prog a", "./prog a", 2),
        ("torchrun -- train.py", "PYTHON train.py", None),
        ("python3 -m torch.distributed.run --nproc-per-node 2 train.py", "python3 train.py", 2),
        ("python -m torch.distributed.launch --use-env train.py", "python train.py", None),
        ("python -m pkg.train", "python -m pkg.train", None),
    ],
)
def test_launchers_are_taken_off(
    command: str, argv: str, world_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    parsed = parse_command(command.split())
    assert parsed.argv == argv.replace("PYTHON", sys.executable).split()
    assert parsed.world_size == world_size


def test_torchrun_uses_the_python_beside_it(tmp_path: Path) -> None:
    for name in ("torchrun", "python"):
        (tmp_path / name).touch(mode=0o755)
    assert parse_command([str(tmp_path / "torchrun"), "train.py"]).argv == [str(tmp_path / "python"), "train.py"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "no command"),
        ("torchrun --nproc-per-node 8", "names no program"),
        ("torchrun --nnodes", "lacks its value"),
        ("torchrun --run-path train.py", "--run-path"),
    ],
)
def test_command_lines_that_name_no_program(command: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_command(command.split())


def test_a_launcher_that_asks_for_another_world_is_refused() -> None:
    program = parse_command(["torchrun", "--nnodes", "4", "--nproc-per-node", "8", "train.py"])
    check_world_size(program, 32, "the graph has")
    with pytest.raises(ConfigError, match="asked for 32 ranks, but the graph has 8192"):
        check_world_size(program, 8192, "the graph has")


def test_lists_of_ranks() -> None:
    assert config.parse_ranks("5, 0,8-10,9", 8192) == [0, 5, 8, 9, 10]
    for text, message in [
        ("8192", "rank 8192 is outside the job: it has 8192 ranks"),
        ("0,x", "'x'"),
        ("3-1", "no rank"),
    ]:
        with pytest.raises(ConfigError, match=message):
            config.parse_ranks(text, 8192)
    with pytest.raises(ConfigError, match="outside"):
        config.check_ranks([-1], 4)


def test_slow_downs() -> None:
    assert config.parse_slow(["4242=1.3", "0=2"]) == {4242: 1.3, 0: 2.0}
    assert config.check_slow({4242: 1.3, 5: 2}, 8192) == {"5": 2.0, "4242": 1.3}
    for item in ("4242", "x=1", "1=x"):
        with pytest.raises(ConfigError, match="RANK=FACTOR"):
            config.parse_slow([item])
    for factor in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="positive number"):
            config.check_slow({1: factor}, 4)
    with pytest.raises(ConfigError, match="outside"):
        config.check_slow({4: 1.5}, 4)


def test_devices(tmp_path: Path) -> None:
    device = config.parse_device("emulated:h100-sxm")
    assert (device.kind, device.gpus_per_node) == ("emulated", 8)
    assert config.parse_device("emulated") == device
    own = tmp_path / "mine.toml"
    own.write_text("[node]\ngpus = 4\n")
    assert config.parse_device(f"emulated:{own}").gpus_per_node == 4
    own.write_text("[node]\n")
    with pytest.raises(ConfigError, match="gpus"):
        _ = config.parse_device(f"emulated:{own}").gpus_per_node
    for text, message in [("abacus", "unknown"), ("emulated:h1000", "h100-sxm")]:
        with pytest.raises(ConfigError, match=message):
            config.parse_device(text)
