"""GOAL, the text form of LogGOPSim's message-level programs."""

from __future__ import annotations

import os

from prism_core._native import MessageProgram
from prism_core.messages import open_program

__all__ = ["MessageProgram", "read", "write"]


def read(path: str | os.PathLike[str]) -> MessageProgram:
    """Reads a file of GOAL text, or of the stored form.

    Raises:
        GraphFormatError: The text is wrong; the message names line, rank and label.
        ConfigError: The file cannot be opened or is neither.
    """
    return open_program(path)


def write(program: MessageProgram, path: str | os.PathLike[str]) -> None:
    """Writes a program as GOAL text, which LogGOPSim reads too."""
    program.write_goal(os.fspath(path))
