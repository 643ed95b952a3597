"""Tells the preloaded library what only Python knows: members of process groups, iterations, peaks of the allocator.

Runs inside the training program, before its first line. It imports nothing but the standard library, and PyTorch never:
the parts it hooks are changed right after the program itself has imported them.

The library's side is seven C functions of `libprism_cuda.so`: `prism_note_group`, `prism_clear_group`, `prism_marker`,
`prism_memory_stats`, `prism_provide`, for forked ranks `prism_is_touched`, and, looked for by `prism doctor`,
`prism_session_table_v1`.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

#: Exit code of a program that was started without the preloaded library.
EXIT_NO_PRELOAD = 97
#: Set in the environment of children, so that only the first interpreter insists on the library.
ENV_HOOKED = "PRISM_HOOKED"

MARKER_TRAINING_BEGIN = 1
MARKER_ITERATION_END = 2


def _complain(text: str) -> None:
    sys.stderr.write(f"prism: {text}\n")
    sys.stderr.flush()


class Library:
    """The preloaded library's functions for the hook.

    Args:
        handle: Where to look the symbols up.

    Raises:
        AttributeError: A symbol is missing, so the library is not loaded.
    """

    def __init__(self, handle: Any) -> None:
        self._note_group = handle.prism_note_group
        self._note_group.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint32]
        self._clear_group = handle.prism_clear_group
        self._clear_group.argtypes = []
        self._marker = handle.prism_marker
        self._marker.argtypes = [ctypes.c_uint32, ctypes.c_void_p]
        self._memory_stats = handle.prism_memory_stats
        self._memory_stats.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        self._provide = handle.prism_provide
        self._provide.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
        for function in (self._note_group, self._clear_group, self._marker, self._memory_stats, self._provide):
            function.restype = ctypes.c_int
        self._complained = False

    def _check(self, code: int, what: str) -> None:
        """One line when the engine does not take what it is told: its own message says why."""
        if code != 0 and not self._complained:
            self._complained = True
            _complain(f"the engine did not take {what}")

    def note_group(self, name: str, ranks: Sequence[int]) -> None:
        """A process group of these global ranks is about to be created."""
        members = array.array("I", ranks)
        address, length = members.buffer_info()
        self._check(self._note_group(name.encode(), address, length), f"process group '{name}' of {length} ranks")

    def clear_group(self) -> None:
        """The creation of the noted group is over."""
        self._clear_group()

    def marker(self, kind: int, stream: int) -> None:
        """A point of the program, timed by the progress of a stream."""
        self._check(self._marker(kind, stream), "a mark of an iteration")

    def provide(self, address: int, data: bytes) -> None:
        """Bytes that another rank would have put into device memory."""
        self._check(self._provide(address, data, len(data)), "a value of another rank")

    def memory_stats(self, peak_allocated: int, peak_reserved: int) -> None:
        """Peaks of the caching allocator since the start of the program."""
        self._check(self._memory_stats(peak_allocated, peak_reserved), "the peaks of the allocator")


class GroupHook:
    """Reports every process group, before a communicator for it can come into being."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._splitting = threading.local()

    def install(self, c10d: ModuleType) -> None:
        """Wraps the functions of `torch.distributed.distributed_c10d` that create groups."""
        self._wrap_helper(c10d)
        self._wrap_split(c10d)

    def _wrap_helper(self, c10d: ModuleType) -> None:
        original = getattr(c10d, "_new_process_group_helper", None)
        if original is None:
            _complain("this PyTorch has no _new_process_group_helper: members of process groups are not known")
            return
        # A job of 8,192 ranks makes tens of thousands of groups: no general way to bind arguments is used here.
        size, ranks, name = (
            _argument(original, what) for what in ("group_size", "global_ranks_in_group", "group_name")
        )
        note, clear = self._library.note_group, self._library.clear_group

        @functools.wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            members = ranks(args, kwargs) or range(max(size(args, kwargs) or 0, 0))
            if not members:
                return original(*args, **kwargs)
            note(str(name(args, kwargs) or ""), members)
            try:
                return original(*args, **kwargs)
            finally:
                clear()

        c10d._new_process_group_helper = create  # type: ignore[attr-defined]

    def _wrap_split(self, c10d: ModuleType) -> None:
        original = getattr(c10d, "split_group", None)
        name_group = getattr(c10d, "_process_group_name", None)
        if original is None:
            return  # older versions split only inside _new_process_group_helper
        if name_group is None:
            _complain("this PyTorch has no _process_group_name: members of split groups are not known")
            return
        hash_ranks = getattr(c10d, "_hash_ranks_to_str", None)  # as _process_group_name would name the others
        signature = inspect.signature(original)

        @functools.wraps(name_group)
        def name(ranks: Any, *args: Any, **kwargs: Any) -> Any:
            split = getattr(self._splitting, "split", None)
            if split is None:
                return name_group(ranks, *args, **kwargs)
            others = [part for part in split.parts if list(part) != list(ranks)] if hash_ranks else []
            names = [hash_ranks(part) for part in others] if hash_ranks else []
            result = name_group(ranks, *args, **kwargs)
            for group, part in zip([*names, result], [*others, ranks], strict=True):
                self._library.note_group(str(group), [split.to_global[rank] for rank in part])
            return result

        @functools.wraps(original)
        def create(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            parent = arguments.get("parent_pg")
            parent = c10d._get_default_group() if parent is None else parent
            self._splitting.split = _Split(c10d._world.pg_group_ranks[parent], arguments.get("split_ranks") or [])
            try:
                return original(*args, **kwargs)
            finally:
                self._splitting.split = None
                self._library.clear_group()

        c10d._process_group_name = name  # type: ignore[attr-defined]
        c10d.split_group = create  # type: ignore[attr-defined]


def _argument(function: Callable[..., Any], name: str) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
    """Finds the argument of this name in a call of the function; `None` if it is left out."""
    names = list(inspect.signature(function).parameters)
    place = names.index(name) if name in names else len(names)

    def find(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return args[place] if len(args) > place else kwargs.get(name)

    return find


class _Split:
    """The groups a parent group is being split into."""

    def __init__(self, group_rank_of: dict[int, int], parts: Sequence[Sequence[int]]) -> None:
        self.to_global = {group_rank: rank for rank, group_rank in group_rank_of.items()}
        self.parts = parts


class MemoryHook:
    """Keeps the highest peaks of the caching allocator, whatever resets the program makes."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._cuda: Any = None
        self._torch_c: Any = None
        self._peaks = (0, 0)

    def install(self, cuda: ModuleType) -> None:
        """Looks at the allocator before every reset and at exit."""
        self._torch_c = sys.modules["torch._C"]
        self._cuda = cuda
        if not hasattr(self._torch_c, "_cuda_memoryStats"):
            _complain("this PyTorch is built without CUDA: peak memory is not known")
            return
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            self._wrap_reset(name)
        atexit.register(self.report)

    def _wrap_reset(self, name: str) -> None:
        original = getattr(self._torch_c, name, None)
        if original is None:
            if name == "_cuda_resetPeakMemoryStats":
                _complain(f"this PyTorch has no {name}: peaks before a reset by the program are lost")
            return

        @functools.wraps(original)
        def reset(device: int) -> Any:
            self._look(device)
            return original(device)

        setattr(self._torch_c, name, reset)

    def _look(self, device: int) -> None:
        if not self._cuda.is_initialized():
            return
        stats = self._torch_c._cuda_memoryStats(device)
        allocated = stats["allocated_bytes"]["all"]["peak"]
        reserved = stats["reserved_bytes"]["all"]["peak"]
        self._peaks = (max(self._peaks[0], allocated), max(self._peaks[1], reserved))

    def report(self) -> None:
        """Tells the library the peaks so far."""
        if not self._cuda.is_initialized():
            return
        self._look(self._torch_c._cuda_getDevice())
        self._library.memory_stats(*self._peaks)


class IterationHook:
    """Marks the begin of training and the end of every iteration."""

    def __init__(self, library: Library, memory: MemoryHook) -> None:
        self._library = library
        self._memory = memory
        self._leader: weakref.ref[Any] | None = None
        self._has_begun = False

    def install_optimizer(self, optimizer: ModuleType) -> None:
        """Marks the end of an iteration after each step of the program's first optimizer."""
        register = getattr(optimizer, "register_optimizer_step_post_hook", None)
        if register is None:
            _complain("this PyTorch has no register_optimizer_step_post_hook: iterations are not marked")
            return
        register(self._after_step)

    def install_module(self, module: ModuleType) -> None:
        """Marks the begin of training before the first forward on the device."""
        register = getattr(module, "register_module_forward_pre_hook", None)
        if register is None:
            _complain("this PyTorch has no register_module_forward_pre_hook: the begin of training is not marked")
            return

        def before_forward(_module: Any, _inputs: Any) -> None:
            if self.begin():
                handle.remove()

        handle = register(before_forward)

    def begin(self) -> bool:
        """Marks the begin of training, once: at the first forward, or when activations of another stage are received.

        Returns whether it is marked.
        """
        if not self._has_begun:
            self._has_begun = self._mark(MARKER_TRAINING_BEGIN)
        return self._has_begun

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        leader = self._leader() if self._leader is not None else None
        if leader is None:
            self._leader = weakref.ref(optimizer)
        elif leader is not optimizer:
            return
        if self._mark(MARKER_ITERATION_END):
            self._memory.report()

    def _mark(self, kind: int) -> bool:
        """Sends a marker; false while the program has not touched the device."""
        cuda = sys.modules.get("torch.cuda")
        if cuda is None or not cuda.is_initialized():
            return False
        self._library.marker(kind, cuda.current_stream().cuda_stream)
        return True


class AfterImport(MetaPathFinder):
    """Calls a function on a module as soon as the program has imported it.

    Args:
        actions: What to do, by full name of the module. Each is done once.
    """

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def add(self, name: str, action: Callable[[ModuleType], None]) -> None:
        """Adds an action on a module, after those that are there; at once if the module is imported already."""
        if name in sys.modules:
            action(sys.modules[name])
            return
        before = self._actions.get(name)

        def act(module: ModuleType) -> None:
            if before is not None:
                before(module)
            action(module)

        self._actions[name] = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds the module as the other finders do and puts the action behind its execution."""
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                _act_after_execution(spec, action)
                return spec
        return None


def _act_after_execution(spec: ModuleSpec, action: Callable[[ModuleType], None]) -> None:
    loader: Any = spec.loader
    if not hasattr(loader, "exec_module"):
        _complain(f"{spec.name} is loaded in an unknown way and is not hooked")
        return
    execute = loader.exec_module

    def execute_and_act(module: ModuleType) -> None:
        execute(module)
        try:
            action(module)
        except Exception as error:
            _complain(f"cannot hook {spec.name}: {type(error).__name__}: {error}")

    loader.exec_module = execute_and_act


def load_library() -> Library | None:
    """The preloaded library, or `None` where there need not be one. Ends a program that runs without it by accident."""
    is_first = ENV_HOOKED not in os.environ and os.environ.get("PRISM_DEVICE", "emulated") == "emulated"
    os.environ[ENV_HOOKED] = "1"
    try:
        return Library(ctypes.CDLL(None))
    except AttributeError:
        if is_first:
            _complain("preload is not in place")
            os._exit(EXIT_NO_PRELOAD)
        return None


def tell_nccl_version() -> None:
    """Has the NCCL stand-in answer with the version that this torch was built for, unless the user chose one.

    PyTorch's process group asks at run time and takes paths that depend on the answer.
    """
    code: int = getattr(sys.modules.get("torch._C"), "_nccl_version", lambda: 0)()
    version = ".".join(str(part) for part in (code >> 32, code >> 16 & 0xFFFF, code & 0xFFFF))
    if code and not os.environ.get("PRISM_NCCL_VERSION"):
        os.environ["PRISM_NCCL_VERSION"] = version


def sibling(name: str) -> ModuleType:
    """Another file of this folder: the program's interpreter need not have `prism_core` installed."""
    location = f"{__file__.removesuffix('hook.py')}{name}.py"
    spec = spec_from_file_location(f"_prism_torch_{name}", location)
    if spec is None or spec.loader is None:
        raise ImportError(f"prism: a part of the PyTorch hook is missing: {name}.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def install_values(finder: AfterImport) -> None:
    """Has small operators computed and rules for values applied, on the emulated device."""
    if os.environ.get("PRISM_DEVICE", "emulated") != "emulated" or not os.environ.get("PRISM_PROGRAM_RULES"):
        return
    values = sibling("values").load(ctypes.CDLL(None))
    if values is not None:
        finder.add("torch.cuda", values.install_cuda)
        values.install(finder.add)


#: What has read the environment: told when a forked process becomes a rank.
_of_rank: list[Any] = []


def take_rank() -> None:
    """Makes a rank of a process that was forked from one with the hook: the environment says which."""
    for part in _of_rank:
        part.take_rank()


def record_imports(finder: AfterImport) -> None:
    """Tells the launcher what the program imports, where it asks for that."""
    if not os.environ.get("PRISM_IMPORTS"):
        return
    recorder = sibling("imports").record()
    sys.meta_path.insert(0, recorder)
    finder.add("torch.distributed.distributed_c10d", recorder.install_distributed)
    finder.add("torch.optim.optimizer", recorder.install_optimizer)


def install() -> None:
    """Hooks the parts of PyTorch as they are imported."""
    library = load_library()
    finder = AfterImport({})
    if library is not None:
        sys.meta_path.insert(0, finder)
        hook_pytorch(library, finder)
    record_imports(finder)


def hook_pytorch(library: Library, finder: AfterImport) -> None:
    """Has everything told that the library should know."""
    memory = MemoryHook(library)
    iterations = IterationHook(library, memory)

    def install_cuda(cuda: ModuleType) -> None:
        tell_nccl_version()
        memory.install(cuda)

    control = sibling("control").ControlHook(library.provide, iterations.begin)
    _of_rank.append(control)
    groups = GroupHook(library)

    def install_collectives(c10d: ModuleType) -> None:
        groups.install(c10d)
        control.install(c10d)

    finder.add("torch.distributed.distributed_c10d", install_collectives)
    finder.add("torch.cuda", install_cuda)
    finder.add("torch.optim.optimizer", iterations.install_optimizer)
    finder.add("torch.nn.modules.module", iterations.install_module)
    sibling("checkpoint").install(finder.add)
    install_values(finder)
