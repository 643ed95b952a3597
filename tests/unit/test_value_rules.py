"""Rules for values, and what becomes of the library's notes about reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prism_core import values
from prism_core.errors import ConfigError
from prism_core.rules import Read, Routing, ValueRules, load_rules, load_value_rules
from prism_core.torch.values import quotas


def test_notes_about_reads_become_counts_and_sites() -> None:
    notes = {
        "something else": 3,
        "value\tknown": 7,
        "value\tprovided\t4\tloss\ttrain.py:9": 5,
        "value\tunknown\t8\tkernel\ttrain.py:1": 2,
    }
    others, found = values.split_notes(notes)
    assert others == {"something else": 3}
    assert (found["known"], found["provided"], found["unknown"]) == (7, 5, 2)
    assert [site["grade"] for site in found["sites"]] == ["unknown", "provided"], "unknown ones first"
    assert values.site_text(found["sites"][0]) == "8 B at train.py:1, last written by kernel (2 times)"


def test_a_list_of_sites_is_cut_and_counted() -> None:
    notes = {f"value\tunknown\t4\tkernel\ta.py:{line}": 1 for line in range(60)}
    _, found = values.split_notes(notes)
    assert len(found["sites"]) == values.MOST_SITES and found["more_sites"] == 10 and found["unknown"] == 60


def test_rules_are_read_from_toml(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def install(rules): ...\n")
    path = tmp_path / "rules.toml"
    path.write_text(
        """
        [[read]]
        place = "*/train.py:88"
        name = "loss"
        values = [2.5, 2]
        [[read]]
        writer = "*norm*"
        policy = "allow"
        [loss_scale]
        overflows = [3]
        [routing]
        kind = "zipf"
        exponent = 1.5
        [plane]
        max_bytes = 4096
        [python]
        files = ["mine.py"]
        """
    )
    rules = load_value_rules(path)
    assert rules.read_lines() == "value\t*\t*/train.py:88\tloss\tfloat32\t2.5,2.0\nallow\t*norm*\t*\n"
    program = json.loads(rules.for_program())
    assert program["overflows"] == [3] and program["routing"]["kind"] == "zipf"
    assert program["plane"] == {"enabled": True, "max_bytes": 4096}
    assert program["python"] == [str(tmp_path / "mine.py")]
    assert load_value_rules(None) == ValueRules()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[read]]\nplace = 'a'", "either `values` or"),
        ("[[read]]\nvalues = [1]", "has a `name`"),
        ("[[read]]\nname = 'x'\nvalues = ['a']", "are numbers"),
        ("[[read]]\nname = 'x'\nvalues = [1]\ntype = 'complex'", "'complex' is not one of float32"),
        ("[[read]]\nplace = 'a\\tb'\npolicy = 'stop'", "not a text of one line"),
        ("[read]\nplace = 'a'", "are written [[read]]"),
        ("[routing]\nkind = 'recorded'", "has `counts` if"),
        ("[routing]\nkind = 'recorded'\ncounts = [[0, 0]]", "not all zero"),
        ("[routing]\ntargets = ['router']", "module:Class.method"),
        ("[routing]\nexponent = 'steep'", "wrong type"),
        ("[loss_scale]\noverflows = [-1]", "numbers of updates"),
        ("[plane]\nmax_bytes = -1", "is not between"),
        ("[plane]\nsize = 1", "[plane] has size: known are enabled, max_bytes"),
        ("[python]\nfiles = ['missing.py']", "does not exist"),
        ("[loss]\nvalue = 1", "unknown tables: loss"),
        ("[", "are not TOML"),
    ],
)
def test_a_bad_rule_is_an_error_that_says_why(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text.replace("\\t", "\t") if "policy" not in text else text.replace("'a\\tb'", '"a\\tb"'))
    with pytest.raises(ConfigError) as failure:
        load_value_rules(path)
    assert message in str(failure.value) and str(path) in str(failure.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the rules"):
        load_value_rules(tmp_path / "none.toml")


def test_variables_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRISM_CACHE_DIR", "/cache")
    monkeypatch.delenv("PRISM_VALUES", raising=False)
    found = values.program_variables(ValueRules(), tmp_path / "logs", strict=True)
    assert found["PRISM_VALUES"] == "strict" and found["PRISM_CACHE_DIR"] == "/cache"
    assert "PRISM_VALUE_RULES" not in found and not (tmp_path / "logs").exists()
    rules = ValueRules(reads=[Read(policy="stop")], routing=Routing(kind="off"))
    found = values.program_variables(rules, tmp_path / "logs", strict=False)
    assert Path(found["PRISM_VALUE_RULES"]).read_text() == "stop\t*\t*\n"
    assert json.loads(found["PRISM_PROGRAM_RULES"])["routing"]["kind"] == "off"
    monkeypatch.setenv("PRISM_VALUES", "off")
    assert values.program_variables(rules, tmp_path, strict=True) == {"PRISM_VALUES": "off"}


def test_the_cache_is_in_the_users_folder() -> None:
    assert values.cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/prism_core")
    assert values.cache_folder({}) == Path.home() / ".cache/prism_core"


@pytest.mark.parametrize(
    ("counts", "total", "most", "expected"),
    [
        ([1, 1, 1], 9, 9, [3, 3, 3]),
        ([1, 1, 1], 10, 9, [4, 3, 3]),
        ([5, 1], 8, 4, [4, 4]),
        ([1, 0], 6, 8, [6, 0]),
    ],
)
def test_quotas_add_up_and_keep_proportions(counts: list[int], total: int, most: int, expected: list[int]) -> None:
    assert quotas(counts, total, most) == expected


def test_rules_that_are_no_text_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(b"\xff\xfe")
    for load in (load_rules, load_value_rules):
        with pytest.raises(ConfigError, match=r"cannot read the rules .*rules\.toml: not UTF-8"):
            load(path)
