"""The command line of a training program: what to start for one rank.

A rank is one process, so a launcher in front (`torchrun`, `python -m torch.distributed.run`) is taken off and what it
would start is kept.
"""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prism_core.errors import ConfigError

_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch")
#: Options of torchrun that take no value.
_FLAGS = {"standalone", "virtual-local-rank", "use-env"}
_MODULE = {"-m", "--module"}
_NO_PYTHON = {"--no-python", "--no_python"}
_RUN_PATH = {"--run-path", "--run_path"}


@dataclass(frozen=True, slots=True)
class ProgramCommand:
    """What to start for a rank.

    Attributes:
        argv: Program and arguments.
        world_size: World size that a launcher's options ask for, if they do so in numbers.
    """

    argv: list[str]
    world_size: int | None = None


def parse_command(command: Sequence[str]) -> ProgramCommand:
    """Takes a launcher off the front of a command line."""
    words = list(command)
    if not words:
        raise ConfigError("no command is given: put it after `--`, for example `-- python train.py`")
    name = Path(words[0]).name
    if name == "torchrun":
        return _strip_torchrun(words[1:], _sibling_python(words[0]))
    if name.startswith("python") and len(words) > 2 and words[1] == "-m" and words[2] in _LAUNCHER_MODULES:
        return _strip_torchrun(words[3:], words[0])
    return ProgramCommand(words)


def _sibling_python(torchrun: str) -> str:
    """The interpreter of the environment that torchrun belongs to."""
    found = shutil.which(torchrun)
    if found is not None:
        python = Path(found).parent / "python"
        if python.exists():
            return str(python)
    return sys.executable


def _strip_torchrun(words: list[str], python: str) -> ProgramCommand:
    rest = deque(words)
    values: dict[str, str] = {}
    prefix = [python]
    while rest and rest[0].startswith("-"):
        word = rest.popleft()
        if word == "--":
            break
        if word in _MODULE:
            prefix = [python, "-m"]
        elif word in _NO_PYTHON:
            prefix = []
        elif word in _RUN_PATH:
            raise ConfigError("torchrun's --run-path is not supported: name the script itself")
        else:
            name, value = _option(word, rest)
            values[name] = value
    if not rest:
        raise ConfigError("the torchrun command names no program")
    return ProgramCommand(prefix + list(rest), _world_size(values))


def _option(word: str, rest: deque[str]) -> tuple[str, str]:
    """Name and value of an option of torchrun: `--name=value`, `--name value`, `-r3`, or a flag."""
    name, equals, value = word.lstrip("-").partition("=")
    name = name.replace("_", "-")
    if equals:
        return name, value
    if not word.startswith("--") and len(word) > 2:
        return word[1], word[2:]
    if name in _FLAGS:
        return name, ""
    if not rest:
        raise ConfigError(f"torchrun's option {word} lacks its value")
    return name, rest.popleft()


def _world_size(values: dict[str, str]) -> int | None:
    """Nodes times processes per node, where both are numbers (`--nnodes` is 1 if not given)."""
    nodes, processes = values.get("nnodes", "1"), values.get("nproc-per-node")
    if processes is None or not (nodes.isdigit() and processes.isdigit()):
        return None
    return int(nodes) * int(processes)


def check_world_size(program: ProgramCommand, world_size: int, source: str) -> None:
    """Refuses a launcher's options that ask for another world size."""
    if program.world_size is not None and program.world_size != world_size:
        raise ConfigError(f"torchrun is asked for {program.world_size} ranks, but {source} {world_size}")
