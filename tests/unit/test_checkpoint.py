"""Distributed checkpoints are refused by name where ranks are missing, and left alone where none is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from prism_core.torch import checkpoint

SAVER = "torch.distributed.checkpoint.state_dict_saver"


def install() -> dict[str, ModuleType]:
    """Modules of these names after the hook has seen them imported."""
    modules: dict[str, ModuleType] = {}

    def add(name: str, act: Any) -> None:
        module = modules[name] = ModuleType(name)
        module.save = module.load = lambda *args, **_: ("done", args)  # type: ignore[attr-defined]
        act(module)

    checkpoint.install(add)
    return modules


def test_a_save_that_needs_absent_ranks_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRISM_WORLD_SIZE", "8")
    monkeypatch.setenv("PRISM_LIVE_RANKS", "0,3")
    modules = install()
    with pytest.raises(checkpoint.CheckpointRefusedError) as refusal:
        modules[SAVER].save({}, checkpoint_id="x")
    assert f"prism: {SAVER}.save plans with what every rank tells, and 6 of 8 ranks do not run" in str(refusal.value)
    assert "switch checkpoints off" in str(refusal.value)
    assert modules[SAVER].save(1, no_dist=True) == ("done", (1,))
    with pytest.raises(checkpoint.CheckpointRefusedError, match=r"megatron\.core\.dist_checkpointing\.load plans"):
        modules["megatron.core.dist_checkpointing.serialization"].load()


@pytest.mark.parametrize("world", ["2", "1"])
def test_where_everybody_runs_nothing_is_touched(monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    monkeypatch.setenv("PRISM_WORLD_SIZE", world)
    monkeypatch.setenv("PRISM_LIVE_RANKS", "0,1" if world == "2" else "")
    assert install() == {}
