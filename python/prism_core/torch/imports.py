"""Tells the launcher what a program imports, and in which order, so that further ranks can start with it imported.

Runs inside the first rank of a run, and imports nothing but the standard library. Recorded are the imports that the
program itself asks for, not those that modules make while they are imported: these follow by themselves. What the
program writes into its environment between imports is recorded too, as modules may read it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import FrameType, ModuleType
from typing import Any

#: Where to write, and the names of variables that are not the same for all ranks (separated by commas).
ENV_IMPORTS = "PRISM_IMPORTS"
ENV_RANK_VARIABLES = "PRISM_RANK_VARIABLES"


def is_importing(frame: FrameType | None) -> bool:
    """Tells whether a module other than the program itself is being executed."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


class ImportRecorder(MetaPathFinder):
    """Keeps the program's imports, and its changes to the environment, in order.

    Args:
        path: The file to write them to.
        rank_variables: Variables with other values in other ranks.
    """

    def __init__(self, path: str, rank_variables: Sequence[str]) -> None:
        self._path = path
        self._pid = os.getpid()
        self._rank_variables = frozenset(rank_variables)
        self._knows_rank = False
        #: `["import", module]` or `["set", variable, value]`.
        self._steps: list[list[str | None]] = []
        self._seen: set[str] = set()
        #: Variables that were set once the program had asked for its rank.
        self._varying: set[str] = set()
        self._num_written = -1

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Finds nothing; looks at who asks."""
        if fullname not in self._seen and not is_importing(sys._getframe(1)):
            self._seen.add(fullname)
            self._steps.append(["import", fullname])

    def watch_environment(self) -> None:
        """Sees what the program reads from and writes into `os.environ`."""
        kind: Any = type(os.environ)
        read, write, delete = kind.__getitem__, kind.__setitem__, kind.__delitem__

        @functools.wraps(read)
        def getitem(environ: Any, name: Any) -> Any:
            if name in self._rank_variables and not is_importing(sys._getframe(1)):
                self._knows_rank = True
            return read(environ, name)

        @functools.wraps(write)
        def setitem(environ: Any, name: Any, value: Any) -> None:
            write(environ, name, value)
            self._is_set(str(name), str(value))

        @functools.wraps(delete)
        def delitem(environ: Any, name: Any) -> None:
            delete(environ, name)
            self._is_set(str(name), None)

        kind.__getitem__, kind.__setitem__, kind.__delitem__ = getitem, setitem, delitem

    def _is_set(self, name: str, value: str | None) -> None:
        if is_importing(sys._getframe(2)):
            return
        if self._knows_rank:
            self._varying.add(name)
        else:
            self._steps.append(["set", name, value])

    def install_distributed(self, c10d: ModuleType) -> None:
        """Writes what is known before the first process group is made: from then on the rank may wait for others."""
        original = getattr(c10d, "_new_process_group_helper", None)
        if original is None:
            return

        @functools.wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            c10d._new_process_group_helper = original  # type: ignore[attr-defined]
            self.write()
            return original(*args, **kwargs)

        c10d._new_process_group_helper = create  # type: ignore[attr-defined]

    def install_optimizer(self, optimizer: ModuleType) -> None:
        """Writes again after the first step, for what is imported on first use."""
        register: Callable[..., Any] | None = getattr(optimizer, "register_optimizer_step_post_hook", None)
        if register is None:
            return

        seen: list[None] = []

        def after_step(*_: Any) -> None:
            if not seen:
                seen.append(None)
                self.write()

        register(after_step)

    def write(self) -> None:
        """Replaces the file, if there is anything new. A child that was forked has nothing to say."""
        if os.getpid() != self._pid or len(self._steps) == self._num_written:
            return
        self._num_written = len(self._steps)
        modules = list(sys.modules.items())
        document = {
            "steps": [step for step in self._steps if step[0] == "set" or step[1] in sys.modules],
            "varying": sorted(self._varying),
            "files": {name: str(getattr(module, "__dict__", {}).get("__file__") or "") for name, module in modules},
        }
        draft = f"{self._path}.draft"
        try:
            with open(draft, "w", encoding="utf-8") as file:  # noqa: PTH123 - pathlib is not imported for this
                json.dump(document, file)
            os.replace(draft, self._path)  # noqa: PTH105
        except OSError as error:
            sys.stderr.write(f"prism: cannot tell what is imported: {error}\n")


def record() -> ImportRecorder | None:
    """Begins to record, if the launcher asks for it; children of this process are not asked."""
    path = os.environ.pop(ENV_IMPORTS, "")
    names = os.environ.pop(ENV_RANK_VARIABLES, "")
    if not path:
        return None
    recorder = ImportRecorder(path, names.split(","))
    recorder.watch_environment()
    atexit.register(recorder.write)
    return recorder
