"""Groups that die in a perturbation file: the replay of `prism spare replay`, from `prism replay --perturb`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import prism_core
import pytest
from prism_core import spare, synthetic
from prism_core.diagnose import diagnose
from prism_core.errors import ConfigError
from prism_core.perturb import split_group_failures
from test_spare import cli
from test_spare_job import data_parallel

FAILURES = """
[spare]
redundancy = 3
detection_ns = 500_000_000
shrink_ns = 100_000_000

[[group_failure]]
iteration = 2
groups = [5]
"""


def prism(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prism_core.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_replay_is_that_of_prism_spare_replay_byte_for_byte(tmp_path: Path) -> None:
    graph, file, plain = tmp_path / "job.prism", tmp_path / "failures.toml", tmp_path / "slow.toml"
    synthetic.transformer_step(12, 2, 2, 4, 2, iterations=2).save(str(graph))
    rest = '\n[[perturb]]\nkind = "straggler"\nranks = [0]\nfactor = 1.5\n\n[slow]\n7 = 1.25\n'
    second = "\n[[group_failure]]\niteration = 4\ngroups = [7, 9]\n"
    file.write_text(FAILURES + second + rest)
    plain.write_text(rest)
    found = prism("replay", str(graph), "--perturb", str(file), "--json")
    expected = cli(
        "replay", str(graph), "-r", "3", "--fail", "2:5", "--fail", "4:7,9", "--detection", "500ms",
        "--shrink", "100ms", "--perturb", str(plain), "--json",
    )  # fmt: skip
    assert expected.returncode == 0, expected.stderr
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert json.dumps(document["group_failures"], indent=2, ensure_ascii=False) + "\n" == expected.stdout
    rows = document["group_failures"]["iterations"]
    assert document["iteration_time_ns"] == [row["time_ns"] for row in rows]
    assert len(rows) == 7
    text = prism("replay", str(graph), "--perturb", str(file)).stdout
    assert "iteration time" in text
    assert "groups 5 die: reorder" in text
    assert "groups 7, 9 die: " in text


def test_steps_before_and_after_a_failure_agree_with_the_closed_form() -> None:
    graph = data_parallel()
    found = prism_core.replay(graph, perturb=FAILURES)
    facts = spare.read_job(graph)
    entry, rest, reduction = 9_000_000, facts.rest_ns, facts.reduction_ns
    assert [row["live"] for row in found.group_failures["iterations"]] == [12, 12, 11, 11, 11]
    # The reduction is one among 11 ranks after the failure, of which the closed form knows nothing.
    fewer = found.iteration_time_ns[3] - 2 * entry - rest
    assert found.iteration_time_ns[:2] == [entry + rest] * 2
    assert found.iteration_time_ns[2] == 2 * entry + rest + fewer + 600_000_000 + reduction // 2
    assert found.iteration_time_ns[3:] == [2 * entry + rest + fewer] * 2
    assert abs(fewer) < reduction // 10


def test_other_settings_of_a_replay_count_for_the_steps_and_for_their_closed_form() -> None:
    graph = data_parallel()
    fair, slow = prism_core.replay(graph, perturb=FAILURES, contention="fair-share"), {0: 2.0}
    shared = spare.read_job(graph, contention="fair-share")
    assert fair.traffic["contention"] == "fair-share"
    assert fair.group_failures["job"] == shared.to_dict()
    slowed = prism_core.replay(graph, perturb=FAILURES, slow=slow)
    # Rank 0 computes two entries of 9 ms after the failure, and the optimiser of 1 ms, in twice the time.
    healthy = prism_core.replay(graph, perturb=FAILURES)
    assert slowed.iteration_time_ns[3] - healthy.iteration_time_ns[3] == 19_000_000
    assert slowed.group_failures["job"] == healthy.group_failures["job"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[spare]\nredundancy = 3\n", "there are none"),
        ("spare = 3\n" + FAILURES.replace("[spare]", "[other]"), "`spare` must be a table"),
        ("[[group_failure]]\niteration = 2\ngroups = [5]\n", "`spare.redundancy` is missing"),
        ("group_failure = 3\n[spare]\nredundancy = 3\n", "must be a list of tables"),
        (
            FAILURES.replace("redundancy = 3", "redundancy = 0"),
            "`spare.redundancy` must be a whole number of 1 or more",
        ),
        (FAILURES.replace("redundancy = 3", "redundancy = true"), "`spare.redundancy` must be .*, not True"),
        (FAILURES.replace("redundancy = 3", "redundancy = 5"), "at most 4"),
        (FAILURES.replace("shrink_ns", "shrink"), "`spare`: unknown key `shrink`; there are redundancy, "),
        (FAILURES.replace("500_000_000", "-1"), "`spare.detection_ns` must be .*, not -1"),
        (FAILURES.replace("500_000_000", "1e9"), "`spare.detection_ns` must be a whole number"),
        (FAILURES.replace("500_000_000", "9_000_000_000_000_000_000"), "at most 1000000000000000"),
        (FAILURES.replace("[[", 'placement = "heap"\n[['), "heap"),
        (FAILURES.replace("[[", "placement = 4\n[["), "`spare.placement` must be a name, or offsets"),
        (FAILURES.replace("[[", "groups = 4\n[["), "it has 12 groups that reduce gradients, not 4"),
        (FAILURES.replace("[[", "iterations = 2\n[["), "iteration 2, but only 2 are replayed"),
        (FAILURES.replace("iteration = 2", "iteration = 1_000_000_000_000"), "there must be 1 to 10000"),
        (FAILURES.replace("iteration = 2", ""), r"`group_failure\[0\].iteration` is missing"),
        (FAILURES.replace("iteration = 2", "iteration = -2"), r"`group_failure\[0\].iteration` must be .*, not -2"),
        (FAILURES.replace("iteration", "step"), r"`group_failure\[0\]`: unknown key `step`"),
        (FAILURES.replace("[5]", "[]"), r"`group_failure\[0\].groups` must be a list of groups"),
        (FAILURES.replace("[5]", "[-5]"), r"`group_failure\[0\].groups` must be a list of groups"),
        (FAILURES.replace("[5]", "5"), r"`group_failure\[0\].groups` must be a list of groups"),
        (FAILURES.replace("[5]", "[12]"), "12"),
        (
            FAILURES + "[[group_failure]]\niteration = 3\ngroups = [5]\n",
            r"group 5 has died already in group_failure\[0\]",
        ),
        (FAILURES + '[[perturb]]\nkind = "flood"\n', r"perturb\[0\] \(flood\): unknown kind"),
        (FAILURES + "[groups]\n", "unknown key `groups`"),
        (FAILURES.replace("[5]", "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]"), "leaves no host for type"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prism_core.replay(data_parallel(iterations=1), perturb=text)


def test_only_a_replay_takes_them() -> None:
    with pytest.raises(ConfigError, match="only a replay takes it"):
        diagnose(data_parallel(), perturb=FAILURES)


def test_other_tables_are_left_as_they_are() -> None:
    rest = '[[perturb]]\nkind = "straggler"\nranks = [1]\nfactor = 1.3\nnames = ["a \\"b\\" \\\\ *"]\n[slow]\n4 = 2\n'
    assert split_group_failures(rest) == (rest, None)
    assert split_group_failures(FAILURES)[0] is None
    changed, tables = split_group_failures(FAILURES + rest)
    assert tables is not None
    graph = data_parallel()
    assert prism_core.replay(graph, perturb=changed).iteration_time_ns == (
        prism_core.replay(graph, perturb=rest).iteration_time_ns
    )
    assert split_group_failures("= nothing") == ("= nothing", None)
