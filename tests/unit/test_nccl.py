"""NCCL's environment variables: read, kept in profiles, compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fakes
import prism_core
import pytest
from prism_core import _native, nccl
from prism_core.errors import ConfigError
from prism_core.replay import replay

PROGRAM = ["sh", "-c", fakes.CONNECT]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _native.nccl_setting_names():
        monkeypatch.delenv(name, raising=False)


def test_a_profile_keeps_settings_and_names_what_it_cannot_follow() -> None:
    plain = _native.profile_toml("h100-sxm")
    assert nccl.settings_of_profile(plain) == {}
    ring = nccl.with_settings(plain, {"NCCL_ALGO": "Ring", "NCCL_PROTO": ""})
    assert nccl.settings_of_profile(ring) == {"NCCL_ALGO": "Ring"}
    assert 'tuning = "nccl-2.22"' in nccl.with_settings(plain, {}, "nccl-2.22")
    for settings, tuning, message in [
        ({"NCCL_ALGO": "CollNetDirect"}, None, "CollNetDirect.*not modelled"),
        ({"NCCL_DEBUG": "INFO"}, None, "NCCL_DEBUG=INFO: changes nothing"),
        ({}, "nccl-1.0", "no tuning `nccl-1.0`"),
        ({"NCCL_ALGO": "allreduce:ring"}, "nccl-2.22", "2.24 is the first"),
        ({"NCCL_ALGO": "Ring"}, "fastest", "only followed under NCCL's tuning"),
    ]:
        with pytest.raises(ConfigError, match=message):
            nccl.with_settings(plain, settings, tuning)


def test_settings_from_texts_and_environments() -> None:
    assert nccl.parse_settings(["NCCL_ALGO=allreduce:tree", "NCCL_PROTO="]) == {
        "NCCL_ALGO": "allreduce:tree",
        "NCCL_PROTO": "",
    }
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        nccl.parse_settings(["NCCL_ALGO"])
    environment = {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO", "NCCL_PROTO": "", "HOME": "/"}
    assert nccl.settings_of_environment(environment) == {"NCCL_ALGO": "Ring"}
    assert nccl.merged({"NCCL_ALGO": "Ring", "NCCL_NTHREADS": "256"}, {"NCCL_ALGO": ""}) == {"NCCL_NTHREADS": "256"}
    flat = '[network]\ntuning = "fastest"\n'
    profile, notes = nccl.with_environment(flat, environment)
    assert profile == flat and "NCCL_ALGO=Ring of the environment is not followed" in notes[0]


def test_collect_and_emulate_follow_the_environment(
    tmp_path: Path, fake_engine: type[fakes.FakeSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    prism_core.collect(PROGRAM, 4, tmp_path / "job.prism", ranks="all")
    profiles = {session.options["profile"] for session in fake_engine.made}
    assert [nccl.settings_of_profile(profile) for profile in profiles] == [{"NCCL_ALGO": "Ring"}]

    import importlib

    graph = fakes.FakeGraph(4, meta={"device": "emulated:h100-sxm", "profile": profiles.pop()})
    monkeypatch.setattr(importlib.import_module("prism_core.emulate"), "open_graph", lambda path: graph)
    monkeypatch.setenv("NCCL_ALGO", "allreduce:tree")
    summary = prism_core.emulate(PROGRAM, "job.prism", [0], tmp_path / "run", echo=False)
    assert nccl.settings_of_profile(fake_engine.made[-1].options["profile"]) == {"NCCL_ALGO": "allreduce:tree"}
    assert summary["notes"][-1] == "NCCL_ALGO is allreduce:tree, and was Ring when the graph was collected"
    monkeypatch.delenv("NCCL_ALGO")
    summary = prism_core.emulate(PROGRAM, "job.prism", [0], tmp_path / "run", echo=False)
    assert nccl.settings_of_profile(fake_engine.made[-1].options["profile"]) == {"NCCL_ALGO": "Ring"}
    assert summary["notes"][-1] == "NCCL_ALGO is not set, and was Ring when the graph was collected"


def test_a_replay_may_change_the_settings_and_says_so() -> None:
    graph = _native.transformer_step(
        json.dumps({"dp": 64, "tp": 8, "pp": 1, "latency_ns": 5000, "bytes_per_s": 50_000_000_000})
    )
    plain = replay(graph, tuning="nccl-2.30", nccl={})
    changed = replay(graph, tuning="nccl-2.30", nccl={"NCCL_ALGO": "Ring", "NCCL_MAX_NCHANNELS": "2"})
    assert plain.notes == [] and plain.nccl == {}
    assert changed.nccl == {"NCCL_ALGO": "Ring", "NCCL_MAX_NCHANNELS": "2"}
    assert len(changed.notes) == 2 and changed.notes[0].startswith("NCCL_ALGO is Ring, and was not set")
    assert changed.iteration_time_ns[0] > plain.iteration_time_ns[0]
    with pytest.raises(ConfigError, match="CollNetChain"):
        replay(graph, nccl={"NCCL_ALGO": "CollNetChain"})


def test_the_command_line_names_differences_and_errors(tmp_path: Path) -> None:
    options = {"dp": 4, "tp": 2, "pp": 1, "latency_ns": 5000, "bytes_per_s": 50_000_000_000}
    graph = tmp_path / "job.prism"
    _native.transformer_step(json.dumps(options)).save(str(graph))

    def prism(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "prism_core.cli", "replay", str(graph), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    found = prism("--tuning", "nccl-2.27", "--nccl", "NCCL_ALGO=Ring", "--nccl", "NCCL_MAX_NCHANNELS=2")
    assert found.returncode == 0, found.stderr
    assert "NCCL_ALGO=Ring" in found.stdout
    assert "NCCL_MAX_NCHANNELS is 2, and was not set when the graph was collected" in found.stdout
    for arguments, message in [
        (("--nccl", "NCCL_ALGO=PAT"), "leaves only PAT"),
        (("--nccl", "NCCL_ALGO"), "NAME=VALUE"),
        (("--tuning", "nccl-9"), "no tuning `nccl-9`"),
    ]:
        failed = prism(*arguments)
        assert failed.returncode != 0 and message in failed.stderr, failed.stderr
