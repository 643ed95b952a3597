"""Where values come from on the host device when not all members run at once: tiers T0 to T3.

``nccl_host.py`` and ``nccl_training.py`` have the programs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nccl_values import AVG, BF16, MAX, MIN, PROD, STORED, SUM, contribution
from prism_core.errors import ConfigError
from test_nccl_host import HANG_S, run, run_processes, session

rules = pytest.importorskip("prism_core.rules", reason="prism_core is not installed")

TRAINING = Path(__file__).with_name("nccl_training.py")
DTYPES = ["Int8", "Uint8", "Int32", "Uint32", "Int64", "Uint64", "Float16", "Float32", "Float64", "Bfloat16"]
DTYPES += ["Float8e4m3", "Float8e5m2"]
OPS = {"Sum": SUM, "Prod": PROD, "Max": MAX, "Min": MIN, "Avg": AVG}


def what_they_would(call: Any) -> np.ndarray | None:
    """The contributions of virtual ranks to ``case_collectives``, as if they ran."""
    dtype, n = DTYPES.index(call.dtype), len(call.members)
    own = slice(call.group_rank * call.count, (call.group_rank + 1) * call.count)
    if call.kind in ("AllReduce", "Reduce"):
        rows = [contribution(dtype, rank, call.count, OPS[call.reduce]) for rank in call.virtual_ranks]
    elif call.kind == "ReduceScatter":
        rows = [contribution(dtype, rank, call.count * n, OPS[call.reduce])[own] for rank in call.virtual_ranks]
    elif call.kind == "AlltoAll":
        rows = [contribution(dtype, rank, call.count * n, 78)[own] for rank in call.virtual_ranks]
    elif call.kind == "Scatter":
        rows = [contribution(dtype, call.rank, call.count, 77)]
    else:
        rows = [contribution(dtype, rank, call.count, 77) for rank in call.virtual_ranks]
    return np.concatenate(rows)


def used(summary: dict[str, Any]) -> set[tuple[str, str]]:
    """Calls and their tiers, of all ranks."""
    return {(use["call"], use["tier"]) for rank in summary["ranks"] for use in rank["tiers"]}


COLLECTIVES = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "Gather", "Scatter"}


@pytest.mark.parametrize(("live", "at_once"), [([0], 0), ([1, 3], 0), ([1, 3], 1), ([0, 2, 4], 2)])
def test_collectives_with_virtual_members_by_a_rule_are_numpys(live: list[int], at_once: int, tmp_path: Path) -> None:
    values = rules.Rules([rules.Rule(what_they_would)])
    summary = run("collectives", 5, tmp_path, live=live, at_once=at_once, values=values)
    assert summary["failed"] is None
    calls = COLLECTIVES if 4 in live else COLLECTIVES - {"Reduce"}
    calls = calls if 2 in live else calls - {"Gather"}
    exact = {"T3" if at_once else "live"}
    assert {call for call, tier in used(summary) if tier == "T2"} >= calls - {"Broadcast", "Scatter"}
    # A root that runs needs no rule.
    assert {tier for call, tier in used(summary) if call in ("Broadcast", "Scatter")} == (
        exact if 2 in live else {"T2"}
    )


@pytest.mark.parametrize("at_once", [1, 2])
def test_collectives_of_ranks_in_turns_are_numpys(at_once: int, tmp_path: Path) -> None:
    summary = run("collectives", 5, tmp_path, at_once=at_once)
    assert summary["failed"] is None
    assert used(summary) == {(call, "T3") for call in COLLECTIVES}


@pytest.mark.parametrize("at_once", [0, 1])
def test_without_a_rule_small_payloads_are_mirrored(at_once: int, tmp_path: Path) -> None:
    summary = run("mirrored", 6, tmp_path, live=[1, 3], at_once=at_once)
    exact = "T3" if at_once else "live"
    counts = {(use["call"], use["tier"]): use["count"] for use in summary["ranks"][0]["tiers"]}
    assert counts == {
        ("AllGather", "T1"): 12,
        ("AllReduce", "T1"): 60,
        ("AllReduce", "T0"): 1,
        ("Broadcast", "T0"): 1,
        ("Broadcast", exact): 1,
        ("Recv", "T0"): 1,
        ("Recv", exact): 1,
    }


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("large", 5), ("premul", 2), ("uneven_all_to_all", 2), ("messages", 3), ("groups", 4), ("split", 8),
        ("non_blocking", 4), ("mismatch", 2), ("fork", 2), ("alone", 2), ("memory", 2), ("cffi", 3), ("lost", 3),
        ("watchdog", 2),
    ],
)  # fmt: skip
def test_programs_cannot_tell_that_ranks_take_turns(case: str, ranks: int, tmp_path: Path) -> None:
    at_once = 2 if case == "watchdog" else 1
    run(case, ranks, tmp_path, at_once=at_once)


def test_splits_and_messages_by_a_rule(tmp_path: Path) -> None:
    table = [
        rules.Rule(lambda call: [[rank % 2, -rank] for rank in call.virtual_ranks], kind="Split"),
        rules.Rule("rank", kind="AllGather", dtype="Int64"),
        rules.Rule(lambda call: 100 * call.number + call.rank, kind="Recv", size=6),
    ]
    summary = run("ruled", 6, tmp_path, live=[0, 1, 2], values=rules.Rules(table))
    assert used(summary) == {("AllGather", "T2"), ("Recv", "T2")}


@pytest.mark.parametrize("ruled", [False, True], ids=["mirrored", "by a rule"])
def test_fake_02_sizes_from_virtual_ranks_are_theirs(ruled: bool, tmp_path: Path) -> None:
    """Rank 5 gets 9 elements from each of 16 peers, 144 in all: never its own sizes echoed."""
    table = [rules.Rule(lambda call: [9] * len(call.virtual_ranks), kind="AlltoAll", dtype="Int64")]
    summary = run("sizes", 16, tmp_path, live=[5], values=rules.Rules(table) if ruled else None)
    assert summary["failed"] is None
    assert ("AlltoAll", "T2" if ruled else "T1") in used(summary)


def test_ranks_that_wait_for_each_other_are_a_deadlock_with_names(tmp_path: Path) -> None:
    summary = run("stuck", 3, tmp_path, at_once=2)
    assert summary["failed"].startswith("deadlock: every running rank waits for another")
    assert "rank 0 waits in a message of communicator 0 for rank 1" in summary["failed"]


def test_a_rule_with_a_row_too_few_ends_the_run(tmp_path: Path) -> None:
    values = rules.Rules([rules.Rule(lambda _: [1, 2])])
    with pytest.raises(AssertionError, match="rank 1 gave 2 bytes: 185 are one row for all 4 virtual members"):
        run("collectives", 5, tmp_path, live=[1], values=values)


def learnt(outputs: list[str]) -> list[str]:
    return sorted(line for output in outputs for line in output.splitlines() if line.startswith("parameters"))


def trained(ranks: int, tmp_path: Path, **how: Any) -> list[str]:
    """Digests of all ranks' parameters."""
    with session(range(ranks), ranks, **how) as (engine, environment):
        command = [sys.executable, str(TRAINING), "4", str(tmp_path), str(how.get("at_once") or ranks)]
        outputs = run_processes([(rank, command) for rank in range(ranks)], environment)
        assert json.loads(engine.finish())["failed"] is None
    return learnt(outputs)


def test_a_few_ranks_at_a_time_learn_what_all_at_once_do(tmp_path: Path) -> None:
    pytest.importorskip("cffi")
    together = trained(8, tmp_path)
    assert len(set(together)) == 8
    assert trained(8, tmp_path, at_once=1) == together
    assert trained(8, tmp_path, at_once=3) == together


def prism(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prism_core.cli", *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)


def need_shims() -> None:
    pytest.importorskip("typer")
    from prism_core.environment import SHIM_FOLDER

    if not (SHIM_FOLDER / "libprism_nccl.so").exists():
        pytest.skip("the shims are not built in place")


@pytest.mark.slow
def test_sixty_four_ranks_two_at_a_time_from_the_command_line(tmp_path: Path) -> None:
    """A numpy program on 64 ranks learns, bit for bit, the same when two of them run at a time."""
    pytest.importorskip("cffi")
    need_shims()
    (tmp_path / "marks").mkdir()
    program = ["--", sys.executable, str(TRAINING), "4", str(tmp_path / "marks"), "2"]
    ran = prism(
        tmp_path, "collect", "--world-size=64", "--device=host", "--ranks=all", "--exact", "--jobs=2",
        "--output=job.prism", "--json", *program,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    tiers = [use["tier"] for rank in json.loads(ran.stdout)["ranks"] for use in rank["tiers"]]
    assert set(tiers) == {"T3"}
    in_turns = learnt([log.read_text() for log in (tmp_path / "job.logs").glob("rank-*.log")])
    assert in_turns == trained(64, tmp_path / "marks")


#: The mean over the job of what each rank has, and a message from the last rank.
CLIENT = """
import ctypes, os

class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_uint8 * 128)]

rank, ranks, address = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), ctypes.c_void_p
nccl = ctypes.CDLL("libnccl.so.2")
nccl.ncclCommInitRank.argtypes = [address, ctypes.c_int, UniqueId, ctypes.c_int]
nccl.ncclAllReduce.argtypes = [address, address, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, address, address]
comm, value = address(), (ctypes.c_double * 2)(rank, 1)
assert nccl.ncclCommInitRank(ctypes.byref(comm), ranks, UniqueId((7,)), rank) == 0
assert nccl.ncclAllReduce(value, value, 2, 8, 0, comm, None) == 0
print("value", list(value))
"""

RULES = """
[[rule]]
kind = "AllReduce"
size = 8
number = [0, 1]
dtype = "Float64"
value = "rank"
"""


def test_rules_from_a_file_and_turns_from_the_command_line(tmp_path: Path) -> None:
    need_shims()
    (tmp_path / "client.py").write_text(CLIENT)
    (tmp_path / "rules.toml").write_text(RULES)
    program = ["--", sys.executable, "client.py"]
    ran = prism(tmp_path, "collect", "--world-size=8", "--device=host", "--ranks=all", "--output=job.prism", *program)
    assert ran.returncode == 0, ran.stderr
    emulate = ["emulate", "job.prism", "--sandbox=2,5,6", "--jobs=1", "--rules=rules.toml", "--output=run", "--json"]
    ran = prism(tmp_path, *emulate, *program)
    assert ran.returncode == 0, ran.stderr
    # 0 + 1 + ... + 7; three ones of those that run, and the virtual ranks' ranks in the second element, too.
    assert ran.stderr.count("value [28.0, 18.0]") == 3, ran.stderr
    ranks = json.loads((tmp_path / "run" / "summary.json").read_text())["ranks"]
    one = {"communicator": 0, "size": 8, "call": "AllReduce", "tier": "T2", "count": 1}
    assert [rank["tiers"] for rank in ranks] == [[one]] * 3
    said = prism(tmp_path, "report", "run").stdout
    assert said.count("payloads by tier: 1 T2") == 3, said


def call_of(**changes: Any) -> Any:
    facts = {
        "rank": 0, "members": (0, 1, 2, 3), "communicator": 0, "number": 0, "kind": "AllGather", "dtype": "Float32",
        "reduce": "", "root": 0, "group_rank": 0, "count": 2, "row_bytes": 8, "virtual_ranks": (1, 3),
    }  # fmt: skip
    return rules.Call(**facts | changes)


def test_values_are_stored_as_nccl_stores_them() -> None:
    assert rules.encode(1.5, call_of()) == np.full(2, 1.5, np.float32).tobytes()
    assert rules.encode([[1, 2], [3, 4]], call_of()) == np.arange(1, 5, dtype=np.float32).tobytes()
    assert rules.encode(np.arange(2.0), call_of()) == np.arange(2, dtype=np.float32).tobytes()
    assert rules.encode(b"12345678", call_of()) == b"12345678"
    for dtype, stored in zip(DTYPES, STORED, strict=True):
        array = np.arange(3).astype(stored)
        assert rules.encode(array, call_of(dtype=dtype)) == array.tobytes()
    # 1 + 2^-8 lies between two bfloat16: ties to even.
    assert rules.encode([1 + 2**-8, 1 + 3 * 2**-8], call_of(dtype="Bfloat16")) == b"\x80\x3f\x82\x3f"
    assert len(DTYPES) == len(STORED) and DTYPES[BF16] == "Bfloat16"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[rule]]\nkind = 'AllReduce'", "has no value"),
        ("[[rule]]\nvalue = 1\nkid = 'x'", "a rule has kid"),
        ("[[rule]]\nvalue = 1\nkind = 'allreduce'", "a rule for 'allreduce'"),
        ("[[rule]]\nvalue = 1\ndtype = 'float'", "type 'float'"),
        ("[rule]", "written"),
        ("[[rule", "are not TOML"),
    ],
)
def test_bad_rules_are_told(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        rules.load_rules(tmp_path / "rules.toml")


@pytest.mark.parametrize(
    ("value", "said"), [("mirro", "must be mirror"), (lambda _: "mirror", "nobody who runs"), (300, "does not fit")]
)
def test_bad_values_are_told(value: Any, said: str) -> None:
    document = {"rank": 0, "members": [0, 1], "communicator": 0, "number": 0, "kind": "Recv", "dtype": "Uint8"}
    document |= {"reduce": "", "root": 1, "group_rank": 0, "count": 1, "row_bytes": 1, "virtual_ranks": [1]}
    with pytest.raises(ConfigError, match=said):
        rules.Rules([rules.Rule(value)])(json.dumps(document))
