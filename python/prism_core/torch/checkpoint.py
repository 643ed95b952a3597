"""Refuses distributed checkpoints by name where they cannot be planned.

A checkpoint begins with every rank telling one what it holds. Most ranks do not run here, and a plan made of one rank's
answers in the place of all is wrong in ways that show late, if at all: pieces that are missing or written twice,
assertions about types deep in a validation. So the call fails at once and says what to do.

Runs inside the training program and imports nothing but the standard library.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

#: Functions that plan with what all ranks tell, by the module that defines them.
PLANNED: dict[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "torch.distributed.checkpoint.state_dict_loader": ("load",),
    "megatron.core.dist_checkpointing.serialization": ("save", "load"),
}


class CheckpointRefusedError(RuntimeError):
    """A checkpoint that needs the answers of ranks that do not run."""


def missing_ranks() -> tuple[int, int]:
    """How many ranks of the job do not run in this session, and how many there are."""
    world = int(os.environ.get("PRISM_WORLD_SIZE", "1"))
    live = [word for word in os.environ.get("PRISM_LIVE_RANKS", "").split(",") if word]
    return max(0, world - max(len(live), 1)), world


def install(add: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Has the functions wrapped as soon as their modules are imported."""
    if missing_ranks()[0] == 0:
        return
    for name, functions in PLANNED.items():
        add(name, functools.partial(_wrap, functions))


def _wrap(functions: tuple[str, ...], module: ModuleType) -> None:
    for name in functions:
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, _refusing(original, f"{module.__name__.removesuffix('.serialization')}.{name}"))


def _refusing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # What a rank saves for itself needs nobody.
        if kwargs.get("no_dist"):
            return original(*args, **kwargs)
        missing, world = missing_ranks()
        raise CheckpointRefusedError(
            f"prism: {name} plans with what every rank tells, and {missing} of {world} ranks do not run: "
            "switch checkpoints off for this run (no --save or --load, an interval beyond the last iteration)"
        )

    return call
