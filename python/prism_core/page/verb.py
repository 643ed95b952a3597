"""What `prism report` does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prism_core.diagnose import diagnose_text
from prism_core.errors import ConfigError
from prism_core.page import gather, render
from prism_core.report import emulate_text, read_run, to_json


def say_report(source: Path, output: Path | None, graph: Path | None, how: Mapping[str, Any], as_json: bool) -> None:
    """Writes the page, if there is an output, and says what is in it on standard output."""
    if not source.exists():
        raise ConfigError(f"{source} does not exist: it is not a run folder, and no graph")
    is_run = source.is_dir()
    if is_run and how:
        raise ConfigError(f"{source} is a run folder: {', '.join(how)} change a job, the run is over")
    if not is_run and graph is not None:
        raise ConfigError(f"--graph is for run folders, and {source} is none")
    if is_run:
        summary, timing = read_run(source)
    content = None if is_run and output is None else gather(source, graph, **how)
    if output is not None and content is not None:
        output.write_text(render(content), encoding="utf-8")
    document = {**summary, **timing} if is_run else content or {}
    if as_json:
        text = to_json(document)
    else:
        text = (emulate_text(document) if is_run else diagnose_text(document["diagnosis"])) + "\n"
    sys.stdout.write(text)
