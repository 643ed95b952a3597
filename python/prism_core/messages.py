"""Message-level programs: sends, receives and calculations of all ranks, evaluated by the LogGOPS model."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prism_core._native import MessageProgram
from prism_core.errors import ConfigError


def is_message_program(path: str | os.PathLike[str]) -> bool:
    """Tells from its beginning whether a file is a message program: GOAL text or the stored form."""
    try:
        return MessageProgram.kind_of(os.fspath(path)) is not None
    except OSError:
        # Whoever opens the file says what is wrong with it.
        return False


def open_program(path: str | os.PathLike[str]) -> MessageProgram:
    """Opens a message program in either form.

    Raises:
        GraphFormatError: The file is damaged; the message says where.
        ConfigError: The file cannot be opened or is no message program.
    """
    location = os.fspath(path)
    try:
        match MessageProgram.kind_of(location):
            case "stored":
                return MessageProgram.open(location)
            case "goal":
                return MessageProgram.read_goal(location)
    except OSError as error:
        raise ConfigError(str(error)) from error
    raise ConfigError(f"{location} is no message program: neither GOAL text (num_ranks first) nor its stored form")


def import_goal(source: str | os.PathLike[str], output: str | os.PathLike[str]) -> dict[str, Any]:
    """Stores a file of GOAL text as a message program that `prism replay` and `prism inspect` open at once.

    Returns:
        What is in the program, as `prism inspect` says it.
    """
    program = open_program(source)
    try:
        program.save(os.fspath(output))
    except OSError as error:
        raise ConfigError(str(error)) from error
    return inspect_program(program)


def inspect_program(program_or_path: MessageProgram | str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a message program: ranks, ops by kind, bytes."""
    program = program_or_path if isinstance(program_or_path, MessageProgram) else open_program(program_or_path)
    summary: dict[str, Any] = json.loads(program.summary_json())
    return summary


def loggops_text(loggops: str | Mapping[str, float] | None) -> str:
    """The parameters as the engine reads them: `L=14000,G=0.02`."""
    if loggops is None or isinstance(loggops, str):
        return loggops or ""
    return ",".join(f"{name}={value}" for name, value in loggops.items())


def replay_program(
    program_or_path: MessageProgram | str | os.PathLike[str], loggops: str | Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Evaluates a message program by the LogGOPS model.

    Args:
        program_or_path: The program, or the path of its file in either form.
        loggops: Parameters by name, as a mapping or as text (`L=250000,o=0,g=0,G=1,tick_ps=20`): `L` latency, `o` CPU
            time per message, `g` NIC time per message, `G` NIC time per byte, `O` CPU time per byte, all in ticks; `S`
            bytes above which a message is a rendezvous (`inf`: none); `tick_ps` picoseconds per tick. Those not named
            come from the network of the h100-sxm profile (14 us, 48e9 bytes per second; ticks of 1 ns).

    Returns:
        The document that `prism replay --json` prints.
    """
    start = time.monotonic_ns()
    program = program_or_path if isinstance(program_or_path, MessageProgram) else open_program(program_or_path)
    document: dict[str, Any] = json.loads(program.replay_json(loggops_text(loggops)))
    document["wall_ns"] = time.monotonic_ns() - start
    document["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return document


def refuse_message_program(path: str | os.PathLike[str]) -> None:
    """Refuses a file that is a message program where an execution graph is needed."""
    if is_message_program(path):
        raise ConfigError(
            f"{Path(path)} is a message-level program (GOAL): only replay and inspect take it; "
            "other verbs need an execution graph (prism collect)"
        )
