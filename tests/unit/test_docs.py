"""The documentation: links lead somewhere, commands exist, the quickstart runs, the reference is current."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from prism_core import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
#: Signs that a command of a page is a pattern, not a command.
PATTERN = re.compile(r"\[|\.\.\. *$|\||[A-Z]{3,}(?:\.\w+)?(?: |$)")


def anchors(page: Path) -> set[str]:
    """What links to a page may name, as GitHub makes it of headings."""
    text = BLOCK.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(BLOCK.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if re.match(r"https?://|mailto:", target):
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        assert not anchor or there.suffix != ".md" or anchor in anchors(there), f"{page.name}: no heading for {target}"


def test_every_page_is_reached() -> None:
    """From the README, over links."""
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = (target.partition("#")[0] for target in LINK.findall(BLOCK.sub("", page.read_text())))
        waiting += [there for target in targets if target and (there := (page.parent / target).resolve()).is_file()]
    assert set(ROOT.glob("docs/**/*.md")) - reached == set()


def commands() -> Iterator[tuple[str, str]]:
    """Commands of `prism` in the pages' shell blocks, with where they stand."""
    for page in PAGES:
        for language, _, text in BLOCK.findall(page.read_text()):
            if language not in ("bash", "sh"):
                continue
            for line in text.replace("\\\n", " ").splitlines():
                command = line.partition(" #")[0].strip()
                if command.startswith("prism ") and not PATTERN.search(command.partition(" -- ")[0]):
                    yield f"{page.relative_to(ROOT)}: {command}", command


def test_commands_of_the_pages_exist() -> None:
    """Each is parsed as the command line parses it; nothing is run."""
    found = dict(commands())
    assert len(found) > 20, "the pages' commands are found"
    root = typer.main.get_command(cli.app)
    for where, text in found.items():
        words = shlex.split(text)[1:]
        command = root
        while hasattr(command, "commands"):
            assert words and words[0] in command.commands, where
            command, words = command.commands[words[0]], words[1:]
        try:
            command.make_context("prism", words)
        except Exception as error:
            pytest.fail(f"{where}: {error}")


def test_the_quickstart_runs(tmp_path: Path) -> None:
    scripts = tmp_path / "bin"
    scripts.mkdir()
    (scripts / "prism").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m prism_core.cli "$@"\n')
    (scripts / "prism").chmod(0o755)
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"}
    for language, info, text in BLOCK.findall((ROOT / "docs/quickstart.md").read_text()):
        if "no-test" in info:
            continue
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euc", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{text}\n{done.stderr}"
    written = {path.name for path in tmp_path.iterdir()}
    assert {"report.html", "job.pftrace", "sweep.csv", "sweep.svg", "sweep.results.jsonl"} <= written


def test_the_reference_of_the_command_line_is_current() -> None:
    location = ROOT / "scripts/cli_reference.py"
    spec = importlib.util.spec_from_file_location("cli_reference", location)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/reference/cli.md").read_text() == module.page(), f"run {location}"
