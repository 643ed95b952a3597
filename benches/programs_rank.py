"""Runs a program as `python` would (`SCRIPT ARGS` or `-m MODULE ARGS`) and prints at its end what the process cost."""

from __future__ import annotations

import atexit
import re
import resource
import runpy
import sys
from pathlib import Path


def report() -> None:
    """CPU time of the process and its children, largest resident set, memory that this process wrote: the kernel's.

    Pages of a library that nobody changed are not counted as private: the last process alive would own them all.
    """
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_ms = 1e3 * sum(usage.ru_utime + usage.ru_stime for usage in spent)
    sizes = re.findall(r"^Private_Dirty:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    figures = {"cpu_ms": int(cpu_ms), "rss": 1024 * spent[0].ru_maxrss, "private": 1024 * sum(map(int, sizes))}
    for name, value in figures.items():
        print(f"\nusage {name} {value}", flush=True)


def main() -> None:
    """Runs the program."""
    atexit.register(report)
    words = sys.argv[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
