"""A process that has imported what a program imports, and becomes one of its ranks after the other by forking.

Started by the launcher with the program's own interpreter, from this file: it imports nothing but the standard library.
Two arguments: a file with the plan (`prism_core.forks` writes it) and the descriptor of a socket of whole messages. It
says what keeps ranks from being forked, or that it is ready; then it forks a rank per request, says its process number,
and later how it ended. What imports print is kept and goes first into the output of every rank, where it would be had
the rank imported.

A rank finds itself as `python script.py` or `python -m module` would have it: its environment, `sys.argv`, `sys.path`,
and a `__main__` of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from typing import Any

#: How often to look for ranks that have ended, while there are any.
REAP_S = 0.02
#: Told to the preloaded library of this process; no rank has it.
ENV_FORKS = "PRISM_FORKS"
MAX_MESSAGE_BYTES = 1 << 20
MAX_DESCRIPTORS = 4
#: Exit code of a program that is interrupted, as a shell reports it.
EXIT_INTERRUPTED = 128 + signal.SIGINT

#: Variables that modules read while they are imported, and read again when they use them.
HARMLESS = {"TORCHINDUCTOR_CACHE_DIR": {"torch._dynamo.package", "torch._inductor.compiler_bisector"}}

Plan = dict[str, Any]


class UnfitError(Exception):
    """Why ranks cannot be forked from this process, and the module to blame."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(reason)
        self.module = module


class Watch:
    """Sees whether modules depend, while they are imported, on what differs between ranks."""

    def __init__(self, variables: list[str]) -> None:
        self._variables = frozenset(variables)
        self._is_touched = getattr(ctypes.CDLL(None), "prism_is_touched", lambda: 0)
        self._read: list[str] = []

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """While this lasts, reads of the variables are seen."""
        kind: Any = type(os.environ)
        read = kind.__getitem__

        def getitem(environ: Any, name: Any) -> Any:
            # Who goes over all variables is after none of these.
            if name in self._variables and sys._getframe(1).f_code.co_name not in ("__iter__", "copy"):
                readers = _readers()
                if HARMLESS.get(name, set()).isdisjoint(readers):
                    self._read.append(f"{readers[-1]} reads {name}")
            return read(environ, name)

        kind.__getitem__ = getitem
        try:
            yield
        finally:
            kind.__getitem__ = read

    def check(self, module: str) -> None:
        """Refuses what the import of the module has done, if a rank could not be forked after it.

        Raises:
            UnfitError: It could not.
        """
        if self._read:
            raise UnfitError(module, f"{self._read[0]} while it is imported")
        if self._is_touched():
            raise UnfitError(module, f"{module} uses the device while it is imported")
        if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
            raise UnfitError(module, f"{module} starts a thread while it is imported")


def _readers() -> list[str]:
    """The modules of the functions that are at work, up to the module that is being executed."""
    names = []
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        names.append(str(frame.f_globals.get("__name__")))
        if frame.f_code.co_name == "<module>":
            break
        frame = frame.f_back
    return names


def load_hook(path: str) -> Any:
    """The hook into PyTorch, from its file, as every rank has it."""
    spec = importlib.util.spec_from_file_location("_prism_torch_hook", path)
    if spec is None or spec.loader is None:
        raise UnfitError("", f"the PyTorch hook is missing: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.install()
    return module


def prepare(plan: Plan) -> types.ModuleType:
    """Makes this process look as a rank's does before the first line of the program; returns its `__main__`."""
    kind, target = plan["kind"], plan["target"]
    if not sys.flags.safe_path:
        folder = os.path.dirname(os.path.realpath(target))  # noqa: PTH120
        sys.path[0] = {"script": folder, "module": os.getcwd(), "code": ""}[kind]  # noqa: PTH109
    sys.argv = {"script": [target], "module": ["-m"], "code": ["-c"]}[kind] + plan["arguments"]
    sys.orig_argv = plan["command"]
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": sys.modules["builtins"], "__annotations__": {}})
    if kind == "script":
        path = os.path.join(os.getcwd(), target)  # noqa: PTH109, PTH118
        main.__dict__.update({"__file__": path, "__cached__": None, "__loader__": SourceFileLoader("__main__", path)})
    else:
        main.__dict__["__loader__"] = importlib.import_module("_frozen_importlib").BuiltinImporter
    sys.modules["__main__"] = main
    return main


def preload(plan: Plan) -> None:
    """Repeats the program's imports, and what it did to its environment before them.

    Raises:
        UnfitError: A module cannot be shared by ranks.
    """
    excluded = set(plan["excluded"])
    watch = Watch([*plan["rank_variables"], *plan["varying"]])
    before: dict[str, str | None] = {}
    with watch.environment():
        for step in plan["steps"]:
            if step[0] == "set":
                before.setdefault(step[1], os.environ.get(step[1]))
                _set_variable(step[1], step[2])
            elif step[1] not in excluded and step[1] not in sys.modules:
                _import(step[1])
                watch.check(step[1])
    for name, value in before.items():
        _set_variable(name, value)
    _compare_files(plan)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _import(name: str) -> None:
    """A module that fails here fails in the program, which has its own way to take that."""
    try:
        importlib.import_module(name)
    except Exception as error:
        raise UnfitError(name, f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    except SystemExit as error:
        raise UnfitError(name, f"{name} ends the program") from error


def _compare_files(plan: Plan) -> None:
    """The same names must be the same modules: the program may have changed where it looks for them."""
    files: dict[str, str] = plan["files"]
    own = (sys.modules["__main__"], sys.modules.get("sitecustomize"))
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__dict__", {}).get("__file__") or "")
        if name in files and file != files[name] and module not in own:
            raise UnfitError(name.partition(".")[0], f"{name} is {file} and not {files[name]}")


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Imports make next to no garbage, and it is looked for once, after them.

    What a module itself does to the collector stays.
    """
    before, ours = gc.get_threshold(), (1 << 20, 100, 100)
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*before)


class Server:
    """Forks ranks on request.

    Args:
        channel: To the launcher.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: set[int] = set()
        self._is_fit = True

    def learn(self, path: str) -> None:
        """Imports what a plan says, and tells the launcher whether ranks can be forked afterwards."""
        try:
            with open(path, encoding="utf-8") as file, _few_collections():  # noqa: PTH123
                preload(json.load(file))
        except UnfitError as error:
            self._is_fit = False
            self._say(unfit=str(error), module=error.module)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        # What was imported is nobody's garbage: ranks that end need not go over all of it, nor copy the pages it is in.
        gc.freeze()
        self._say(ready=True)

    def _say(self, **message: Any) -> None:
        self._channel.send(json.dumps(message).encode())

    def serve(self) -> dict[str, str] | None:
        """Returns its environment in each forked rank, and nothing in this process once the launcher has gone."""
        while self._is_fit or self._children:
            ready, _, _ = select.select([self._channel], [], [], REAP_S if self._children else None)
            self._reap()
            if not ready:
                continue
            data, descriptors, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
            if not data:
                return None
            request: dict[str, Any] = json.loads(data)
            if "plan" in request:
                self.learn(request["plan"])
                continue
            pid = os.fork()
            if pid == 0:
                self._channel.close()
                take_place(request["environment"], descriptors[0])
                environment: dict[str, str] = request["environment"]
                return environment
            os.close(descriptors[0])
            self._children.add(pid)
            self._say(started=pid)
        return None

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._children.discard(pid)
            self._say(ended=pid, code=os.waitstatus_to_exitcode(status))


def take_place(environment: dict[str, str], output: int) -> None:
    """Gives a forked process the place of a rank: a process group, an environment and an output of its own."""
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    os.environ.pop(ENV_FORKS, None)
    os.environ.update(environment)
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
    _answer_for_the_fork()


def _answer_for_the_fork() -> None:
    """PyTorch refuses the device to forked processes. Nothing of it was used before this fork, so a rank may use it."""
    cuda: Any = sys.modules.get("torch.cuda")
    original = getattr(cuda, "_is_in_bad_fork", None)
    if original is None or not original():
        return
    own = os.getpid()
    cuda._is_in_bad_fork = lambda: os.getpid() != own


def run_program(plan: Plan, main: types.ModuleType) -> None:
    """Runs the program as its interpreter would.

    Raises:
        SystemExit: It has ended.
    """
    try:
        if plan["kind"] == "module":
            run_module: Callable[[str], Any] = runpy._run_module_as_main  # type: ignore[attr-defined]
            run_module(plan["target"])
        else:
            code = plan["target"], "<string>"
            if plan["kind"] == "script":
                with open(plan["target"], "rb") as file:  # noqa: PTH123
                    code = file.read(), main.__dict__["__file__"]
            exec(compile(*code, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - the user's program
    except SystemExit:
        raise
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except BaseException as error:
        _report(error)
        raise SystemExit(1) from None


def _report(error: BaseException) -> None:
    """As the interpreter does at its top level: without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def replay_output(path: str) -> None:
    """Prints what the imports printed."""
    sys.stdout.flush()
    with open(path, "rb") as file:  # noqa: PTH123
        data = file.read()
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    """Prepares, serves, and ends as a rank or with the launcher."""
    channel = socket.socket(fileno=int(sys.argv[2]))
    path = sys.argv[1]
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        plan: Plan = json.load(file)
    program = prepare(plan)
    hook = load_hook(plan["hook"])
    server = Server(channel)
    server.learn(path)
    if server.serve() is not None:
        hook.take_rank()
        replay_output(plan["output"])
        run_program(plan, program)


if __name__ == "__main__":
    main()
