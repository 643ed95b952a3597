"""Writes docs/reference/cli.md from the command line's own definitions; `--check` only says whether it is current."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from prism_core.cli import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# Command line

Written by `scripts/cli_reference.py` from the commands themselves: do not edit. Exit codes, bars, colours and settings:
[cli.md](../cli.md).
"""


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands with their full names, groups left out."""
    if hasattr(command, "commands"):
        for own, sub in command.commands.items():
            yield from commands(sub, f"{name} {own}")
    else:
        yield name, command


def cell(text: object) -> str:
    """Text that is one cell of a table."""
    return str(text).replace("\n", " ").replace("|", "\\|").strip()


def default(parameter: Any) -> str:
    """The default in words, where there is one to tell."""
    value = parameter.default() if callable(parameter.default) else parameter.default
    if value is None or value is False or value == () or value == [] or repr(value).startswith("Sentinel"):
        return ""
    return f"`{str(value).lower() if value is True else value}`"


def section(name: str, command: Any) -> Iterator[str]:
    """What there is to say about a command."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join(p.metavar or p.name.upper() for p in arguments)
    yield f"\n## `{name}`\n\n{cell(command.help or '')}\n\n```\n{name} [OPTIONS] {usage}\n```\n"
    rows = [(f"`{cell(p.metavar or p.name.upper())}`", p.help or "", "") for p in arguments]
    for option in options:
        names = ", ".join(f"`{each}`" for each in [*option.opts, *option.secondary_opts])
        metavar = f" `{cell(option.metavar)}`" if option.metavar else ""
        help_text = (option.help or "") + (" Required." if option.required else "")
        rows.append((names + metavar, help_text, default(option)))
    if rows:
        yield "| | | default |\n|---|---|---|\n" + "".join(f"| {a} | {cell(b)} | {cell(c)} |\n" for a, b, c in rows)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, command in commands(typer.main.get_command(app), "prism"):
        parts += section(name, command)
    return "".join(parts)


def main() -> None:
    """Writes or checks."""
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PAGE} is not current: run {sys.argv[0]}")
        return
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
