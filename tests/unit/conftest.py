"""A run without the engine and without the preloaded libraries."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import fakes
import pytest
from prism_core import cli


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[fakes.FakeSession]]:
    """Replaces sessions and graphs where collect and emulate use them; nothing is preloaded."""
    for name in ("program_of", "comms", "failure"):
        monkeypatch.setattr(fakes.FakeSession, name, fakes.FakeSession.__dict__[name])
    monkeypatch.setattr(fakes.FakeSession, "made", [])

    def assemble(world_size: int, recordings: list[object], assignment: list[int], meta: str) -> fakes.FakeGraph:
        import json

        return fakes.FakeGraph(world_size, [recordings[index].rank for index in assignment], json.loads(meta))  # type: ignore[attr-defined]

    engine = types.SimpleNamespace(
        Session=fakes.FakeSession,
        Recording=fakes.FakeRecording,
        assemble=assemble,
        build_info=lambda: {"version": "0.0.test"},
    )
    for name in ("collect", "emulate"):
        monkeypatch.setattr(importlib.import_module(f"prism_core.{name}"), "_native", engine)
    monkeypatch.setattr(importlib.import_module("prism_core.launch"), "check_shims", lambda **_: [])
    yield fakes.FakeSession


@pytest.fixture
def prism(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the command line in this process: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["prism", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capfd.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run
