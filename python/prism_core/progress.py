"""How far long work is: a bar on standard error, where somebody can see it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

#: Set to anything: no bars (as `--no-progress`).
NO_PROGRESS = "PRISM_NO_PROGRESS"


def wants_progress(asked: bool = True) -> bool:
    """Tells whether bars are of use: asked for, on a terminal, and not switched off by the environment."""
    return asked and sys.stderr.isatty() and not os.environ.get(NO_PROGRESS) and os.environ.get("TERM") != "dumb"


class StderrHandler(logging.StreamHandler[TextIO]):
    """Logs to what standard error is now: above a bar, where there is one."""

    @property
    def stream(self) -> TextIO:
        """Standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        pass


class Progress:
    """Shows bars, or does nothing. Colours follow `NO_COLOR`."""

    def __init__(self, *, enabled: bool | None = None) -> None:
        """Takes whether to show anything; what is of use here if not said."""
        self._enabled = wants_progress() if enabled is None else enabled

    @property
    def enabled(self) -> bool:
        """Tells whether it shows anything."""
        return self._enabled

    @contextmanager
    def task(self, name: str, total: int | None) -> Iterator[Callable[[str], None]]:
        """A piece of work of so many steps, if that is known; the value is called after each, with what it was."""
        if not self._enabled:
            yield lambda _: None
            return
        # Where nobody sees bars, nothing waits for this import.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("prism: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # The bar goes away when it is over: logs and the answer remain.
        with RichProgress(
            *columns, TextColumn("{task.fields[last]}"), console=Console(stderr=True), transient=True
        ) as bars:
            bar = bars.add_task(name, total=total, last="")

            def advance(last: str) -> None:
                bars.update(bar, advance=1, last=last[:40])

            yield advance

    @contextmanager
    def watched(self, name: str, total: int | None, count: Callable[[], int]) -> Iterator[None]:
        """A piece of work that tells how far it is when asked, twice a second."""
        if not self._enabled:
            yield
            return
        over = threading.Event()

        def watch(advance: Callable[[str], None]) -> None:
            seen = 0
            while not over.wait(0.5):
                now = count()
                for _ in range(now - seen):
                    advance("")
                seen = max(seen, now)

        with self.task(name, total) as advance:
            watcher = threading.Thread(target=watch, args=(advance,), daemon=True)
            watcher.start()
            try:
                yield
            finally:
                over.set()
                watcher.join()
