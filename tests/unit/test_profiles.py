"""`prism profile`: what is listed, printed and written is what the engine runs on."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from prism_core import _native
from prism_core.config import read_profile
from prism_core.errors import ConfigError
from prism_core.profiles import list_profiles, list_text, profile_text, write_profile


def test_all_profiles_are_listed_with_what_they_say() -> None:
    found = list_profiles()["profiles"]
    assert [entry["name"] for entry in found] == _native.profile_names()
    h100 = next(entry for entry in found if entry["name"] == "h100-sxm")
    assert h100["nic_bytes_per_s"] == 50_000_000_000 and h100["gpus_per_node"] == 8
    lines = list_text({"profiles": found}).splitlines()
    assert len(lines) == 1 + len(found) and all(entry["device"] in line for entry, line in zip(found, lines[1:]))  # noqa: B905


@pytest.mark.parametrize("name", _native.profile_names())
def test_the_text_is_the_profile_and_says_where_its_numbers_are_from(name: str) -> None:
    text = profile_text(name)
    assert tomllib.loads(text) == tomllib.loads(_native.profile_toml(name))
    entries = [line for line in text.splitlines() if "=" in line.partition("#")[0]]
    # Those without belong to a table that has one for all of them.
    assert sum("#" in line for line in entries) > len(entries) / 2


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    settings = ["node.nics=4", "network.nic_bytes_per_s = 25_000_000_000", 'name="site"', "network.ll.launch_ns=7000"]
    assert write_profile("h100-sxm", path, settings) == {"profile": "h100-sxm", "output": str(path)}
    changed, built_in = tomllib.loads(read_profile(str(path))), tomllib.loads(_native.profile_toml("h100-sxm"))
    assert changed["network"].pop("ll")["launch_ns"] == 7000 and built_in["network"].pop("ll")["launch_ns"] != 7000
    assert (changed["node"].pop("nics"), built_in["node"].pop("nics")) == (4, 8)
    assert changed["network"].pop("nic_bytes_per_s") == built_in["network"].pop("nic_bytes_per_s") // 2
    assert (changed.pop("name"), built_in.pop("name")) == ("site", "h100-sxm") and changed == built_in
    assert "# data sheet" in path.read_text()
    with pytest.raises(ConfigError, match=r"site\.toml exists: remove it, or choose another name"):
        write_profile("h100-sxm", path)
    # A file is as good as a name.
    assert tomllib.loads(profile_text(str(path), ["node.nics=2"]))["node"]["nics"] == 2


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("h100", [], "'h100' is neither a device profile"),
        ("h100-sxm", ["node.nic=4"], "the profile has no node.nic: what is there can be changed"),
        ("h100-sxm", ["node.nics"], "not of the form table.key=value"),
        ("h100-sxm", ["node.gpus=0"], "`node.gpus` must be at least 1, got 0"),
        ("h100-sxm", ["node.gpus=eight"], "profile: TOML parse error"),
        ("h100-sxm", ["node.gpus=4\n[evil]"], "not of the form table.key=value"),
    ],
)
def test_what_is_no_profile_is_named(name: str, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile_text(name, settings)


def test_from_the_command_line(prism: Any, tmp_path: Path) -> None:
    code, out, _ = prism("profile", "--json")
    assert code == 0 and json.loads(out) == list_profiles()
    code, out, _ = prism("profile", "a100-sxm", "--set", "node.gpus=4")
    assert code == 0 and tomllib.loads(out)["node"]["gpus"] == 4 and not out.endswith("\n\n")
    code, out, _ = prism("profile", "a100-sxm", "-o", tmp_path / "site.toml", "--json")
    assert code == 0 and json.loads(out)["output"] == str(tmp_path / "site.toml")
    code, _, err = prism("profile", "a100-sxm", "-o", tmp_path / "site.txt")
    assert code == 1 and "known by its name's end, .toml" in err
    code, _, err = prism("profile", "-o", tmp_path / "other.toml")
    assert code == 2 and "which profile?" in err
