"""Values inside the program: the value plane (small operators on the CPU) and the rules that need PyTorch.

Imported by the hook from its file. Like the hook it imports nothing but the standard library; PyTorch is only looked up
once the program has imported it. Run as a program it compiles the plane for the PyTorch of this interpreter.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCE = Path(__file__).with_name("plane.cpp")
ENV_CACHE = "PRISM_CACHE_DIR"
#: Methods and modules of known frameworks that return router logits, as `module:Class.attribute`.
ROUTERS = (
    "megatron.core.transformer.moe.router:TopKRouter.gating",
    "torchtitan.models.moe:TokenChoiceTopKRouter.gate",
    "torchtitan.models.moe.moe:TokenChoiceTopKRouter.gate",
    "torchtitan.models.common.moe:TokenChoiceTopKRouter.gate",
    "torchtitan.models.common.moe.moe:TokenChoiceTopKRouter.gate",
)
#: Router logits up to this size are computed with, whatever the plane's limit is.
MOST_ROUTING_BYTES = 64 << 20


class PlaneError(RuntimeError):
    """Why there is no value plane."""


class NoCompilerError(PlaneError):
    """The machine has no C++ compiler."""


# The plane's library


def plane_path(torch: Any, cache: Path) -> Path:
    """Where the compiled plane for this PyTorch is, or will be."""
    version = str(torch.__version__)
    text = "\0".join([SOURCE.read_text(encoding="utf-8"), version, str(getattr(torch.version, "git_version", ""))])
    return cache / f"plane-{version}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"


def compile_plane(torch: Any, cache: Path) -> Path:
    """The compiled plane, which is made if there is none.

    Raises:
        NoCompilerError: There is no compiler.
        PlaneError: It fails, or the cache cannot be written.
    """
    path = plane_path(torch, cache)
    if path.exists():
        return path
    with _locked(cache / "plane.lock"):
        if path.exists():
            return path
        compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
        if compiler is None:
            raise NoCompilerError("there is no C++ compiler (g++)")
        sys.stderr.write(f"prism: compiling the value plane for PyTorch {torch.__version__}, once\n")
        root = Path(torch.__file__).parent
        draft = path.with_suffix(f".{os.getpid()}.draft")
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        command = [
            compiler, "-O1", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            f"-I{root / 'include'}", str(SOURCE), "-o", str(draft), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu",
        ]  # fmt: skip
        kept = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "LD_AUDIT")}
        result = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            errors = [line for line in result.stderr.splitlines() if "error" in line]
            raise PlaneError(f"{compiler} failed: {(errors or [f'exit code {result.returncode}'])[0]}")
        draft.replace(path)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise PlaneError(f"cannot write to the cache {path.parent}: {error.strerror}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Rules in the program


class Provider:
    """The preloaded library's functions for values.

    Args:
        handle: Where to look the symbols up.
    """

    def __init__(self, handle: Any) -> None:
        self._provide = handle.prism_value_provide
        self._provide.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
        self._note = handle.prism_value_note
        self._note.argtypes = [ctypes.c_char_p]
        self._noted: set[str] = set()

    def note(self, text: str) -> None:
        """A remark for the run's summary, once."""
        if text not in self._noted:
            self._noted.add(text)
            self._note(text.encode())

    def fill(self, tensor: Any, values: Any, rule: str) -> None:
        """Puts `values` (a CPU tensor of as many elements) into a tensor of the device, in the name of a rule.

        Takes no time on the device, and autograd does not see it.
        """
        if tensor.device.type != "cuda":
            tensor.detach().copy_(values.reshape(tensor.shape))
            return
        if not tensor.is_contiguous():
            raise ValueError(f"rule {rule}: only contiguous tensors can be filled")
        data = values.detach().to(device="cpu", dtype=tensor.dtype).reshape(tensor.shape).contiguous()
        raw = ctypes.string_at(data.data_ptr(), data.numel() * data.element_size())
        if self._provide(tensor.data_ptr(), raw, len(raw), rule.encode()) != 0:
            raise ValueError(f"rule {rule}: the tensor is not in device memory")


class RuleBook:
    """What a user's file of rules works with: `install(rules)` gets one of these.

    Args:
        provider: The preloaded library.
        after_import: Calls a function on a module as soon as the program has imported it.
    """

    def __init__(self, provider: Provider, after_import: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
        self._provider = provider
        self._after_import = after_import
        self.rank = int(os.environ.get("PRISM_RANK", "0"))
        self.world_size = int(os.environ.get("PRISM_WORLD_SIZE", "1"))

    def fill(self, tensor: Any, values: Any, rule: str) -> None:
        """Provides the value of a tensor; see [`Provider.fill`]."""
        self._provider.fill(tensor, values, rule)

    def note(self, text: str) -> None:
        """A remark for the run's summary."""
        self._provider.note(text)

    def after(self, target: str, act: Callable[..., Any]) -> None:
        """Calls `act(result, owner)` after each call of `module:Class.method`, or of the submodule of that name."""
        module, _, attribute = target.partition(":")
        self._after_import(module, functools.partial(_wrap, attribute=attribute, act=act))


def _wrap(module: ModuleType, attribute: str, act: Callable[..., Any]) -> None:
    class_name, _, name = attribute.partition(".")
    owner = getattr(module, class_name, None)
    if owner is None:
        return
    method = getattr(owner, name, None)
    if callable(method):

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            act(result, self)
            return result

        setattr(owner, name, call)
        return
    construct = owner.__init__

    @functools.wraps(construct)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        part: Any = getattr(self, name, None)
        if hasattr(part, "register_forward_hook"):
            part.register_forward_hook(lambda _part, _inputs, result: act(result, self))

    owner.__init__ = build


class Router:
    """Gives router logits by the rule for routing.

    Args:
        provider: The preloaded library.
        rule: Table `routing` of the rules.
        allow_bytes: Has the plane compute with tensors of this size.
    """

    def __init__(self, provider: Provider, rule: Mapping[str, Any], allow_bytes: Callable[[int], None]) -> None:
        self._provider = provider
        self._rule = rule
        self._allow_bytes = allow_bytes
        self._layers: dict[int, int] = {}
        self._calls: dict[int, int] = {}

    def __call__(self, logits: Any, owner: Any) -> None:
        """Fills logits (..., experts) that a router has returned; of a distributed tensor, this rank's part."""
        logits = logits.to_local() if hasattr(logits, "to_local") else logits
        experts = logits.shape[-1]
        tokens = logits.numel() // max(experts, 1)
        if tokens == 0 or experts == 0 or logits.device.type != "cuda":
            return
        layer = self._layers.setdefault(id(owner), len(self._layers))
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        values = self._values(layer, call, tokens, experts, _top_k(owner))
        kind = self._rule["kind"]
        self._allow_bytes(min(4 * tokens * experts * 8, MOST_ROUTING_BYTES))
        self._provider.fill(logits, values, f"routing: {kind}")
        self._provider.note(f"rule routing ({kind}): router logits of {experts} experts are given by the rule")

    def _values(self, layer: int, call: int, tokens: int, experts: int, top_k: int) -> Any:
        torch = sys.modules["torch"]
        kind = self._rule["kind"]
        if kind == "balanced":
            # Token t prefers experts t, t + 1, ...: equal counts for every number of experts a token goes to.
            places = torch.arange(experts, device="cpu")[None, :] - torch.arange(tokens, device="cpu")[:, None]
            return -(places % experts).float() / experts
        if kind == "recorded":
            counts = self._rule["counts"][layer % len(self._rule["counts"])]
            return _logits_of_counts(torch, counts, tokens, experts, top_k)
        generator = torch.Generator(device="cpu")
        generator.manual_seed(_seed(self._rule["seed"], layer))
        order = torch.randperm(experts, generator=generator, device="cpu")
        popularity = -self._rule["exponent"] * torch.log(torch.arange(1, experts + 1, device="cpu").float())[order]
        generator.manual_seed(_seed(self._rule["seed"], layer, call))
        uniform = torch.rand(tokens, experts, generator=generator, device="cpu").clamp_(1e-9, 1 - 1e-7)
        # The largest k of popularity plus Gumbel noise are a sample without replacement.
        return popularity[None, :] - torch.log(-torch.log(uniform))


def _seed(*numbers: int) -> int:
    text = ",".join(map(str, numbers))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


def _top_k(owner: Any) -> int:
    """How many experts a token goes to, as routers call it."""
    for name in ("topk", "top_k", "num_experts_per_tok"):
        value = getattr(owner, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1


def quotas(counts: Sequence[int], total: int, most: int) -> list[int]:
    """Whole numbers with the proportions of `counts` that add up to `total`, none above `most`."""
    weights = sum(counts)
    exact = [count * total / weights for count in counts]
    shares = [min(int(share), most) for share in exact]
    order = sorted(range(len(counts)), key=lambda index: (shares[index] - exact[index], index))
    missing = total - sum(shares)
    while missing > 0:
        open_ones = [index for index in order if shares[index] < most]
        if not open_ones:
            break
        for index in open_ones[:missing]:
            shares[index] += 1
        missing = total - sum(shares)
    return shares


def _logits_of_counts(torch: Any, counts: Sequence[int], tokens: int, experts: int, top_k: int) -> Any:
    """Logits whose top k give each expert its count: runs of one expert go to neighbouring tokens, no token twice."""
    if len(counts) != experts:
        raise ValueError(f"the rule for routing has counts of {len(counts)} experts, the router has {experts}")
    shares = torch.tensor(quotas(counts, tokens * top_k, tokens), device="cpu")
    chosen = torch.repeat_interleave(torch.arange(experts, device="cpu"), shares)
    logits = torch.zeros(tokens, experts, device="cpu")
    place = torch.arange(len(chosen), device="cpu")
    logits[place % tokens, chosen] = 2.0 + 1.0 / (1 + place // tokens).float()
    return logits


# Putting it in place


class Values:
    """Installs the plane and the rules.

    Args:
        rules: What the launcher says (`PRISM_PROGRAM_RULES`).
        provider: The preloaded library.
    """

    def __init__(self, rules: Mapping[str, Any], provider: Provider) -> None:
        self._rules = rules
        self._provider = provider
        self._plane: Any = None
        self._most_bytes = int(rules["plane"]["max_bytes"])

    def install(self, after_import: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
        """Hooks routers and runs the user's files."""
        book = RuleBook(self._provider, after_import)
        routing = self._rules["routing"]
        if routing["kind"] != "off":
            router = Router(self._provider, routing, self._allow_bytes)
            for target in dict.fromkeys([*ROUTERS, *routing["targets"]]):
                book.after(target, router)
        for index, name in enumerate(self._rules["python"]):
            spec = importlib.util.spec_from_file_location(f"_prism_rules_{index}", name)
            if spec is None or spec.loader is None:
                raise ImportError(f"prism: cannot load the rules {name}")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.install(book)

    def install_cuda(self, cuda: ModuleType) -> None:
        """Has the plane started together with the device."""
        if self._rules["plane"]["enabled"]:
            cuda._lazy_call(self._start)

    def _start(self) -> None:
        try:
            cache = os.environ.get(ENV_CACHE)
            if not cache:
                raise PlaneError(f"{ENV_CACHE} is not set")
            path = compile_plane(sys.modules["torch"], Path(cache))
            plane = ctypes.CDLL(str(path))
        except (PlaneError, OSError) as error:
            self._provider.note(f"small operators are not computed: no value plane, as {error}")
            return
        plane.prism_plane_set_most_bytes.argtypes = [ctypes.c_int64]
        plane.prism_plane_add_overflow.argtypes = [ctypes.c_int64]
        plane.prism_plane_set_most_bytes(self._most_bytes)
        for update in self._rules["overflows"]:
            plane.prism_plane_add_overflow(update)
        if plane.prism_plane_start() == 0:
            self._plane = plane

    def _allow_bytes(self, size: int) -> None:
        if self._plane is not None and size > self._most_bytes:
            self._most_bytes = size
            self._plane.prism_plane_set_most_bytes(size)


def load(handle: Any) -> Values | None:
    """The values of this program, or `None` where they are not treated."""
    rules = os.environ.get("PRISM_PROGRAM_RULES")
    if not rules or os.environ.get("PRISM_VALUES") == "off":
        return None
    return Values(json.loads(rules), Provider(handle))


def main() -> int:
    """Compiles the plane for the PyTorch of this interpreter; a machine without a C++ compiler goes without it."""
    import torch

    folder = os.environ.get(ENV_CACHE) or str(
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prism_core"
    )
    try:
        path = compile_plane(torch, Path(folder))
    except PlaneError as error:
        sys.stderr.write(f"prism: no value plane: {error}\n")
        return 0 if isinstance(error, NoCompilerError) else 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
