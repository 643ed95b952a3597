"""Starting ranks, watching them, ending them."""

from __future__ import annotations

import os
import platform
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import fakes
import pytest
from prism_core import environment, launch
from prism_core.errors import (
    DeadlockError,
    DeviceMemoryError,
    MismatchError,
    PrismError,
    RankFailedError,
    SessionError,
    ShimError,
    TorchMissingError,
    error_entry,
)

PLACEMENT = environment.Placement(
    world_size=20, gpus_per_node=8, device="emulated", socket="/tmp/none/socket", store_host="127.0.0.1", store_port=7
)


def run(
    script: str, tmp_path: Path, ranks: list[int], **options: object
) -> tuple[launch.GroupResult, fakes.FakeSession, PrismError | None]:
    session = fakes.FakeSession(f'{{"live": {ranks}, "world_size": 20}}')
    placement = environment.Placement(
        world_size=20, gpus_per_node=8, device="emulated", socket=session.listen(str(tmp_path)),
        store_host="127.0.0.1", store_port=7,
    )  # fmt: skip
    seat = launch.Seat(session, placement)
    group = launch.RankGroup(lambda rank: seat, ["sh", "-c", script], tmp_path / "logs", **options)  # type: ignore[arg-type]
    result = group.run(ranks)
    return result, session, launch.failure_of(result, session, tmp_path / "logs")


def test_a_rank_finds_the_place_torchrun_would_give_it() -> None:
    variables = environment.rank_environment(17, PLACEMENT, [Path("/s/a.so"), Path("/s/b.so")], {"A": "1"})
    expected = {
        "RANK": "17", "LOCAL_RANK": "1", "WORLD_SIZE": "20", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCH_GLOO_LAZY_INIT": "1", "PRISM_RANK": "17", "PRISM_WORLD_SIZE": "20",
        "PRISM_SESSION": "/tmp/none/socket", "PRISM_DEVICE": "emulated", "LD_PRELOAD": "/s/a.so:/s/b.so",
        "LD_AUDIT": "/s/libprism_audit.so", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "A": "1",
    }  # fmt: skip
    assert expected.items() <= variables.items()
    assert {name for name in variables if name.startswith("PRISM_")} == {
        "PRISM_SESSION", "PRISM_RANK", "PRISM_WORLD_SIZE", "PRISM_DEVICE", "PRISM_STORE", "PRISM_LIVE_RANKS",
    }  # fmt: skip
    assert (variables["PRISM_STORE"], variables["PRISM_LIVE_RANKS"]) == ("127.0.0.1:7", "17")
    assert "CUBLAS_WORKSPACE_CONFIG" not in variables


def test_what_the_user_preloads_stays_and_an_outer_session_does_not() -> None:
    base = {
        "LD_PRELOAD": "/usr/lib/other.so", "PYTHONPATH": "/mine", "OMP_NUM_THREADS": "4", "PRISM_HOOKED": "1",
        "PRISM_NCCL_VERSION": "2.27.7",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHELASTIC_ERROR_FILE": "/e",
    }  # fmt: skip
    variables = environment.rank_environment(0, PLACEMENT, [Path("/s/a.so")], base)
    assert variables["LD_PRELOAD"] == "/s/a.so:/usr/lib/other.so"
    assert variables["PYTHONPATH"] == f"{environment.BOOTSTRAP_FOLDER}:/mine"
    assert variables["OMP_NUM_THREADS"] == "4"
    assert variables["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert variables["PRISM_NCCL_VERSION"] == "2.27.7"
    assert "PRISM_HOOKED" not in variables and "TORCHELASTIC_ERROR_FILE" not in variables


def test_the_audit_library_can_be_left_out() -> None:
    variables = environment.rank_environment(0, PLACEMENT, [Path("/s/a.so")], {"PRISM_AUDIT": "off"})
    assert "LD_AUDIT" not in variables and "PRISM_AUDIT" not in variables
    unused = environment.rank_environment(0, PLACEMENT, [Path("/s/a.so")], {"PRISM_UNUSED_NCCL": "/x.so:/y.so"})
    assert unused["PRISM_UNUSED_NCCL"] == "/x.so:/y.so"
    both = environment.rank_environment(0, PLACEMENT, [Path("/s/a.so")], {"PRISM_AUDIT": "on", "LD_AUDIT": "/u.so"})
    assert both["LD_AUDIT"] == "/s/libprism_audit.so:/u.so"
    with pytest.raises(ShimError, match="PRISM_AUDIT=no is neither on nor off"):
        environment.rank_environment(0, PLACEMENT, [Path("/s/a.so")], {"PRISM_AUDIT": "no"})


def elf(machine: int) -> bytes:
    return b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 3, machine)


def test_libraries_are_checked_before_anything_starts(tmp_path: Path) -> None:
    own = {"x86_64": 62, "aarch64": 183}[platform.machine()]
    other, name = (183, "aarch64") if own == 62 else (62, "x86_64")
    with pytest.raises(ShimError, match=r"libprism_cuda.so is missing .*make build"):
        environment.check_shims(tmp_path)
    for shim in environment.SHIM_NAMES:
        (tmp_path / shim).write_bytes(elf(own))
    with pytest.raises(ShimError, match=r"libprism_audit\.so is missing"):
        environment.check_shims(tmp_path)
    (tmp_path / environment.AUDIT_NAME).write_bytes(elf(own))
    assert environment.check_shims(tmp_path) == [tmp_path / shim for shim in environment.SHIM_NAMES]
    (tmp_path / "libprism_nccl.so").write_bytes(elf(other))
    with pytest.raises(ShimError, match=f"libprism_nccl.so is built for {name}, this machine is {platform.machine()}"):
        environment.check_shims(tmp_path)
    (tmp_path / "libprism_nccl.so").write_bytes(b"text")
    with pytest.raises(ShimError, match="not an ELF library"):
        environment.check_shims(tmp_path)


@pytest.mark.usefixtures("fake_engine")
def test_every_rank_runs_and_its_output_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = f"{fakes.CONNECT}; echo out $RANK; echo err $RANK >&2"
    result, session, failure = run(script, tmp_path, [3, 17], echo=True)
    assert failure is None
    assert result.returncodes == session.exited == {3: 0, 17: 0}
    assert sorted((tmp_path / "logs/rank-17.log").read_text().split("\n")) == ["", "err 17", "out 17"]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert {"[rank 3] out 3", "[rank 17] err 17"} <= set(captured.err.splitlines())


@pytest.mark.usefixtures("fake_engine")
def test_at_most_as_many_ranks_as_jobs_run_at_a_time(tmp_path: Path) -> None:
    script = f"""
        {fakes.CONNECT}
        mkdir "{tmp_path}/alone" || exit 9
        sleep 0.1
        rmdir "{tmp_path}/alone"
    """
    result, _, failure = run(script, tmp_path, [1, 2, 3], jobs=1)
    assert failure is None and len(result.returncodes) == 3


@pytest.mark.usefixtures("fake_engine")
def test_a_dead_rank_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    script = f'{fakes.CONNECT}; [ "$RANK" = 5 ] && exit 42; echo $$ > "{tmp_path}/pid"; sleep 60'
    start = time.monotonic()
    result, _, failure = run(script, tmp_path, [0, 5])
    assert time.monotonic() - start < 20
    assert result.failed_rank == 5
    assert isinstance(failure, RankFailedError)
    assert (failure.rank, failure.returncode, failure.last_op) == (5, 42, "all_reduce of 4 bf16")
    assert "rank 5 ended with exit code 42 after 1 iterations, last op: all_reduce" in str(failure)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.usefixtures("fake_engine")
def test_a_signal_counts_as_a_shell_counts_it(tmp_path: Path) -> None:
    _, _, failure = run(f"{fakes.CONNECT}; kill -SEGV $$", tmp_path, [0])
    assert isinstance(failure, RankFailedError) and failure.returncode == 128 + signal.SIGSEGV


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("deadlock: nothing can move\n  rank 0 waits", DeadlockError),
        ("rank 5: deadlock: nothing can move", DeadlockError),
        ("collective 3 of communicator 1 (8 ranks): 7 call all_reduce, but rank 2 calls broadcast", MismatchError),
        ('process group "7" has rank 9, the world 8 ranks', SessionError),
    ],
)
def test_the_engine_s_verdict_ends_the_run(
    text: str,
    kind: type[PrismError],
    tmp_path: Path,
    fake_engine: type[fakes.FakeSession],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.1)
    fake_engine.failure = text
    _, _, failure = run(f"{fakes.CONNECT}; sleep 60", tmp_path, [0, 5])
    assert type(failure) is kind and str(failure) == text


@pytest.mark.usefixtures("fake_engine")
def test_a_program_that_never_connects_is_told_from_a_missing_preload(tmp_path: Path) -> None:
    _, _, failure = run("true", tmp_path, [0])
    assert isinstance(failure, SessionError) and "without one CUDA or NCCL call" in str(failure)
    _, _, failure = run(f"exec {sys.executable} -c pass", tmp_path, [0])
    assert isinstance(failure, ShimError) and "ran without the preloaded libraries" in str(failure)


@pytest.mark.usefixtures("fake_engine")
def test_nccl_that_is_not_caught_is_the_failure_whatever_else_is_said(tmp_path: Path) -> None:
    reason = "a second NCCL is loaded and its calls are not emulated: /opt/libnccl.so.2. It was opened by its path"
    fakes.FakeSession.failure = "rank 5: deadlock: no progress is possible"
    script = f"{fakes.CONNECT}; echo 'prism: {reason}'; echo more; exit 98"
    _, _, failure = run(script, tmp_path, [5])
    assert isinstance(failure, ShimError) and str(failure).startswith(f"rank 5: {reason} (output: ")


@pytest.mark.usefixtures("fake_engine")
def test_a_program_that_cannot_be_preloaded_is_told_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "program_problem", lambda command: f"{command} is linked statically")
    _, _, failure = run("true", tmp_path, [0])
    assert isinstance(failure, SessionError) and str(failure).endswith("under the preload: sh is linked statically")
    assert "sh is linked statically" in caplog.text
    _, _, failure = run("exit 3", tmp_path, [0])
    assert isinstance(failure, RankFailedError) and str(failure).endswith("; sh is linked statically")
    _, _, failure = run(f"{fakes.CONNECT}; exit 3", tmp_path, [0])
    assert isinstance(failure, RankFailedError) and "statically" not in str(failure)


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize(
    "line",
    [
        "ModuleNotFoundError: No module named 'torch'",
        "OSError: libcudart.so.13: cannot open shared object file: No such file or directory",
        "ValueError: libcublasLt.so.*[0-9] not found in the system path",
    ],
)
def test_a_missing_pytorch_says_what_to_install(tmp_path: Path, line: str) -> None:
    _, _, failure = run(f'echo "{line}"; exit 1', tmp_path, [0])
    assert isinstance(failure, TorchMissingError) and "python -m prism_core.slim" in str(failure)


@pytest.mark.usefixtures("fake_engine")
def test_a_full_card_names_rank_step_op_and_line(tmp_path: Path) -> None:
    text = "CUDA out of memory. Tried to allocate 200.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
    log = [
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 7, in main',
        '  File "/venv/lib/python3.11/site-packages/torch/nn/x.py", line 3, in call',
        f"torch.OutOfMemoryError: {text} 40 GiB is free.",
    ]
    script = tmp_path / "log"
    script.write_text("\n".join(f"[rank3]: {line}" for line in log))
    _, _, failure = run(f"cat {script}; exit 1", tmp_path, [3])
    assert isinstance(failure, DeviceMemoryError) and (failure.rank, failure.returncode) == (3, 1)
    assert f"rank 3 ran out of device memory in iteration {failure.iteration}" in str(failure)
    assert f", at /home/me/train.py:7: {text} 40 GiB is free." in str(failure)
    script.write_text(script.read_text() + "\n[rank3]: ValueError: something else")
    _, _, other = run(f"cat {script}; exit 1", tmp_path, [3])
    assert not isinstance(other, DeviceMemoryError), "it went on after that"
    entry = error_entry(failure)
    assert entry["kind"] == "DeviceMemoryError" and entry["iteration"] == failure.iteration


@pytest.mark.usefixtures("fake_engine")
def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    session = fakes.FakeSession('{"live": [0], "world_size": 20}')
    group = launch.RankGroup(lambda rank: launch.Seat(session, PLACEMENT), ["/no/such/program"], tmp_path / "logs")
    with pytest.raises(RankFailedError, match=r"cannot start `/no/such/program`: No such file") as caught:
        group.run([0])
    assert caught.value.returncode == 127


INTERRUPTED = """
import pathlib, sys
sys.path.insert(0, {tests!r})
import fakes
from prism_core import environment, launch
launch.check_shims = lambda **_: []
session = fakes.FakeSession('{{"live": [0, 1], "world_size": 2}}')
placement = environment.Placement(world_size=2, gpus_per_node=8, device="emulated", socket=session.listen({folder!r}),
                                  store_host="127.0.0.1", store_port=7)
script = 'echo $$ > {folder}/pid-$RANK; sleep 60'
seat = launch.Seat(session, placement)
launch.RankGroup(lambda rank: seat, ["sh", "-c", script], pathlib.Path({folder!r})).run([0, 1])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_launcher_leaves_nobody_behind(tmp_path: Path, number: signal.Signals) -> None:
    script = INTERRUPTED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    pids = [tmp_path / "pid-0", tmp_path / "pid-1"]
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in pids):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait(timeout=30) != 0
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
