"""The NCCL stand-in on the host device: processes that exchange real data (``nccl_host.py`` has the programs)."""

from __future__ import annotations

import ast
import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nccl_support
import pytest

_native = pytest.importorskip("prism_core._native", reason="the engine's binding is not built")

PROGRAM = Path(__file__).with_name("nccl_host.py")
#: Only a hang takes so long.
HANG_S = 240.0


@contextmanager
def session(
    live: Sequence[int], world: int, *, at_once: int = 0, values: Any = None
) -> Iterator[tuple[Any, dict[str, str]]]:
    """An engine with the ranks ``live`` of ``world``, and the environment of its processes (host device).

    At most ``at_once`` of them run at a time; ``values`` are the rules for the others.
    """
    profile = _native.profile_toml("h100-sxm")
    options = {"mode": "collect", "world_size": world, "live": list(live), "profile": profile, "at_once": at_once}
    engine = _native.Session(json.dumps(options), values=values)
    with tempfile.TemporaryDirectory(prefix="prism-") as folder:
        socket = engine.listen(str(Path(folder) / "s"))
        yield (
            engine,
            nccl_support.environment(
                PRISM_SESSION=socket,
                PRISM_WORLD_SIZE=str(world),
                PRISM_DEVICE="host",
                NCCL_UNDER_TEST=str(nccl_support.shim()),
                OMP_NUM_THREADS="1",
            ),
        )


def unique_id() -> str:
    """One that no other run has."""

    class UniqueId(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_uint8 * 128)]

    identifier = UniqueId()
    assert ctypes.CDLL(str(nccl_support.shim())).ncclGetUniqueId(ctypes.byref(identifier)) == 0
    return bytes(identifier).hex()


def run(
    case: str, ranks: int, tmp_path: Path, world: int | None = None, live: Sequence[int] | None = None, **how: Any
) -> dict[str, Any]:
    """Runs a program of so many ranks, or the ranks ``live`` of it; the engine's summary.

    ``how``: see :func:`session`.
    """
    live = list(range(ranks)) if live is None else live
    identifier = unique_id()
    command = [sys.executable, str(PROGRAM), case]
    commands = [(rank, [*command, str(rank), str(ranks), identifier, str(tmp_path)]) for rank in live]
    with session(live, world or ranks, **how) as (engine, environment):
        outputs = run_processes(commands, environment)
        assert [output.splitlines()[-1:] for output in outputs] == [["done"]] * len(live), "\n".join(outputs)
        summary: dict[str, Any] = json.loads(engine.finish())
        return summary


def run_processes(commands: Sequence[tuple[int, Sequence[str]]], environment: dict[str, str]) -> list[str]:
    """Runs a command for each rank, all at once; what they print. They must end well."""
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"PRISM_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, command in commands
    ]
    try:
        outputs = [process.communicate(timeout=HANG_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_are_numpys_in_every_type(ranks: int, tmp_path: Path) -> None:
    summary = run("collectives", ranks, tmp_path)
    assert summary["failed"] is None


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("large", 3),
        pytest.param("premul", 2, id="nccl_03-premul"),
        pytest.param("uneven_all_to_all", 2, id="nccl_01-uneven_all_to_all"),
        ("messages", 3),
        ("groups", 4),
        pytest.param("split", 8, id="nccl_06-split"),
        pytest.param("non_blocking", 4, id="nccl_06-non_blocking"),
        ("membership", 4),
        ("watchdog", 2),
        ("mismatch", 2),
        ("fork", 2),
        ("alone", 2),
        ("memory", 2),
        ("lost", 2),
        ("cffi", 3),
        ("refused", 1),
        pytest.param("far_offsets", 2, marks=pytest.mark.slow),
    ],
)
def test_program(case: str, ranks: int, tmp_path: Path) -> None:
    run(case, ranks, tmp_path)


def test_a_part_of_the_world_may_communicate_for_real(tmp_path: Path) -> None:
    """Two of 64 ranks run; a communicator of the two is theirs, and the engine knows its members."""
    summary = run("messages", 2, tmp_path, world=64)
    assert [comm["members"] for comm in summary["ranks"][0]["communicators"]] == [[0, 1]]


#: Recorded on a machine without a GPU, where NCCL stops at the missing device; here there is one. The code, and whether
#: there is a handle or an address.
WITH_A_DEVICE = {
    "initrank_nogpu": (0, True),
    "initrank_badrank": (4, False),
    "memalloc_nogpu": (0, True),
    "memfree_null": 0,
    "split_null": 4,
}


@pytest.mark.parametrize("version", ["2.27.7", "2.30.7", "2.32.3"])
def test_answers_like_nccl_where_no_device_is_needed(version: str) -> None:
    wanted = json.loads(nccl_support.shared(f"edge_cu12-{version}.json").read_text())
    with session([0], 1) as (_, environment):
        answers = nccl_support.edge_answers(environment | {"PRISM_RANK": "0", "PRISM_NCCL_VERSION": version})
    for case, expected in WITH_A_DEVICE.items():
        answer = ast.literal_eval(answers.pop(case))
        got = (answer[0], answer[1] is not None) if isinstance(answer, tuple) else answer
        assert (case, got) == (case, expected)
        wanted.pop(case)
    # How many bytes of a unique id are not zero depends on the machine.
    assert ast.literal_eval(answers.pop("uid"))[0] == ast.literal_eval(wanted.pop("uid"))[0] == 0
    assert answers == wanted


#: Every rank knows the unique id; ranks come from the environment, as under torchrun or mpirun.
CLIENT = """
import ctypes, os

class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_uint8 * 128)]

rank, ranks, address = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), ctypes.c_void_p
nccl = ctypes.CDLL("libnccl.so.2")
nccl.ncclCommInitRank.argtypes = [address, ctypes.c_int, UniqueId, ctypes.c_int]
nccl.ncclAllReduce.argtypes = [address, address, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, address, address]
comm, value = address(), ctypes.c_double(rank + 1)
assert nccl.ncclCommInitRank(ctypes.byref(comm), ranks, UniqueId((7,)), rank) == 0
for _ in range(2):
    assert nccl.ncclAllReduce(ctypes.byref(value), ctypes.byref(value), 1, 8, 0, comm, None) == 0
print("value", value.value)
"""


def test_programs_without_cuda_run_from_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from prism_core.environment import SHIM_FOLDER

    if not (SHIM_FOLDER / "libprism_nccl.so").exists():
        pytest.skip("the shims are not built in place")
    (tmp_path / "client.py").write_text(CLIENT)
    program = ["--", sys.executable, "client.py"]

    def prism(*arguments: str) -> str:
        command = [sys.executable, "-m", "prism_core.cli", *arguments, *program]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout + run.stderr

    prism("collect", "--world-size=4", "--device=host", "--ranks=all", "--output=job.prism")
    # All four run: 1 + 2 + 3 + 4, and four times that. Rank 1 alone: what it has, four times, twice.
    assert prism("emulate", "job.prism", "--sandbox=0-3", "--output=all").count("value 40.0") == 4
    alone = prism("emulate", "job.prism", "--sandbox=1", "--output=one")
    assert "value 32.0" in alone and "payload mirrored" in alone
