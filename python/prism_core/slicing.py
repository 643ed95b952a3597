"""Which ranks run when, and what makes two collections the same: slices, shares, and the folder of finished ranks."""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence
from pathlib import Path

from prism_core import _native
from prism_core.command import ProgramCommand
from prism_core.config import CollectConfig, Device
from prism_core.environment import AUDIT_NAME, SHIM_FOLDER, SHIM_NAMES
from prism_core.errors import ConfigError
from prism_core.parts import PartFolder, digest_of
from prism_core.rules import load_value_rules

ORDERS = ("ascending", "descending", "random")


def in_order(ranks: Sequence[int], order: str, seed: int) -> list[int]:
    """The ranks as they are to be started."""
    ascending = sorted(ranks)
    if order == "ascending":
        return ascending
    if order == "descending":
        return ascending[::-1]
    if order == "random":
        random.Random(seed).shuffle(ascending)
        return ascending
    raise ConfigError(f"the order of slices is {order!r}: it must be one of {', '.join(ORDERS)}")


def parse_part(text: str) -> tuple[int, int]:
    """Reads `I/N` with I from 1 to N; the index returned counts from 0."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ConfigError(f"the part is '{text}': write I/N with I from 1 to N, for example 3/16")
    return int(index) - 1, int(count)


def check_part(config: CollectConfig) -> None:
    """Shares of the ranks need a list of them that is known before any has run."""
    if config.ranks == "auto":
        raise ConfigError("which ranks to run is found out on the way: --part needs --ranks all or a list of ranks")
    if config.executor != "local":
        raise ConfigError(f"a part of the ranks runs on the machine that is asked: no --executor {config.executor}")
    if config.exact:
        raise ConfigError("with exact values all ranks run together: --part is not for --exact")


def open_folder(config: CollectConfig, device: Device, program: ProgramCommand, kernels: Sequence[str]) -> PartFolder:
    """The folder of finished ranks of this collection, beside its output.

    Raises:
        ConfigError: It holds ranks of another collection.
    """
    rules = load_value_rules(config.rules)
    key = {
        "command": shlex.join(program.argv),
        "program": _program_digest(program.argv),
        "world size": str(config.world_size),
        "device": f"{config.device}, profile {digest_of(device.profile.encode())}",
        "kernel tables": digest_of(*(text.encode() for text in kernels)),
        "rules": digest_of(rules.for_program().encode(), rules.read_lines().encode(), _rules_text(config.rules)),
        "host time": config.host_time,
        "strict values": str(config.strict_values),
        "version": _libraries_digest(),
    }
    path = config.output.with_name(config.output.name + ".parts")
    return PartFolder(path, key, fresh=config.fresh)


def _program_digest(argv: Sequence[str]) -> str:
    """The contents of the script, as far as the command line names one."""
    files = [Path(word) for word in argv[1:] if word.endswith((".py", ".sh", ".toml", ".yaml", ".json"))]
    return digest_of(*(path.read_bytes() for path in files if path.is_file()))


def _rules_text(rules: object) -> bytes:
    """The contents of a file of rules."""
    return Path(rules).read_bytes() if isinstance(rules, (str, Path)) and Path(rules).is_file() else b""


def _libraries_digest() -> str:
    """The engine and the preloaded libraries: ranks recorded by others are not like these."""
    native = getattr(_native, "__file__", None)
    files = [*(SHIM_FOLDER / name for name in (*SHIM_NAMES, AUDIT_NAME)), *([Path(native)] if native else [])]
    return digest_of(*(path.read_bytes() for path in files if path.is_file()))
