"""Kernel tables: durations of kernels from profiler traces, in the form the engine reads.

A trace of `torch.profiler` names every kernel with its launch, and, where it was recorded with shapes, the operator
behind it. Kernels of a matrix product or of an attention operator become one row by shape, because the emulated device
sees library calls, not the kernels inside; every other kernel becomes a row by name and launch. Of several launches
the median counts.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prism_core.errors import ConfigError

#: Version of the form, as in the engine's `cost::kernels`.
VERSION = 1

_TYPES = {
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "float": "fp32",
    "double": "fp64",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "signed char": "int8",
}
#: Operators that are one matrix product, with the positions of their factors.
_PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::_addmm_activation": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
    "aten::_int_mm": (0, 1),
}
#: Attention through cuDNN: the engine's name, the position of the query, products over the depths of query and value.
_ATTENTION = {
    "aten::_scaled_dot_product_cudnn_attention": ("cudnn.sdpa_forward", 0, 1, 1),
    "aten::_cudnn_attention_forward": ("cudnn.sdpa_forward", 0, 1, 1),
    "aten::_scaled_dot_product_cudnn_attention_backward": ("cudnn.sdpa_backward", 1, 3, 2),
    "aten::_cudnn_attention_backward": ("cudnn.sdpa_backward", 1, 3, 2),
}
#: Position of `is_causal` among the inputs of these operators.
_CAUSAL = {
    "aten::_scaled_dot_product_cudnn_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention_backward": 12,
}
#: Kernels of communication, by name.
COMMUNICATION = re.compile(r"nccl|nvshmem|multimem_all_reduce", re.IGNORECASE)

GemmKey = tuple[int, int, int, int, str, str]
KernelKey = tuple[str, tuple[int, ...], int]
OperatorKey = tuple[str, int, str]


@dataclass(slots=True)
class Samples:
    """Durations in ns by what they are of."""

    device: str | None = None
    kernels: dict[KernelKey, list[float]] = field(default_factory=lambda: defaultdict(list))
    gemms: dict[GemmKey, list[float]] = field(default_factory=lambda: defaultdict(list))
    operators: dict[OperatorKey, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def num_rows(self) -> int:
        """Rows of the table these samples make."""
        return len(self.kernels) + len(self.gemms) + len(self.operators)


def read_trace(path: Path) -> dict[str, Any]:
    """A Kineto trace, plain or gzipped."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        document = json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"{path} is not a Kineto trace: {error}") from error
    if isinstance(document, list):
        document = {"traceEvents": document}
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ConfigError(f"{path} is not a Kineto trace: it has no list `traceEvents`")
    return document


def collect_samples(paths: Sequence[Path], device: str | None = None) -> Samples:
    """The durations in traces of one device.

    Args:
        paths: Kineto traces.
        device: Name of the device, for traces that do not say it.
    """
    if not paths:
        raise ConfigError("no trace is named")
    samples = Samples(device)
    for path in paths:
        _add_trace(samples, read_trace(path), path, named=device is not None)
    if samples.num_rows == 0:
        raise ConfigError("the traces have no GPU kernels: profile with ProfilerActivity.CUDA")
    return samples


def _add_trace(samples: Samples, document: Mapping[str, Any], path: Path, *, named: bool) -> None:
    events = [event for event in document["traceEvents"] if isinstance(event, dict) and event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "Kernel") and "dur" in event]
    if not kernels:
        return
    if not named:
        device = _device_of(document, kernels, path)
        if samples.device not in (None, device):
            raise ConfigError(f"{path} is of {device}, the traces before it of {samples.device}: one table, one device")
        samples.device = device
    owners = _owners(events)
    by_operator: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    operators: dict[int, Mapping[str, Any]] = {}
    for kernel in kernels:
        if COMMUNICATION.search(kernel["name"]):
            continue
        owner = owners.get(_arguments(kernel).get("correlation"))
        if owner is not None and _library_key(owner, [kernel]) is not None:
            operators[id(owner)] = owner
            by_operator[id(owner)].append(kernel)
        else:
            _add_kernel(samples, kernel)
    for number, group in by_operator.items():
        key = _library_key(operators[number], group)
        total = sum(_nanoseconds(kernel) for kernel in group)
        if key is None or total <= 0:
            continue
        (samples.gemms if len(key) == 6 else samples.operators)[key].append(total)  # type: ignore[index]


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _nanoseconds(kernel: Mapping[str, Any]) -> float:
    return float(kernel["dur"]) * 1000


def _device_of(document: Mapping[str, Any], kernels: Sequence[Mapping[str, Any]], path: Path) -> str:
    names = {item.get("id"): item.get("name") for item in document.get("deviceProperties") or []}
    used = {names.get(_arguments(kernel).get("device")) for kernel in kernels}
    if len(used) == 1 and (name := used.pop()):
        return str(name)
    raise ConfigError(f"{path} does not say which one device its kernels ran on: name it with --device-name")


def _add_kernel(samples: Samples, kernel: Mapping[str, Any]) -> None:
    arguments = _arguments(kernel)
    grid, block = arguments.get("grid"), arguments.get("block")
    if not (isinstance(grid, list) and isinstance(block, list) and len(grid) == len(block) == 3):
        return
    threads = int(block[0]) * int(block[1]) * int(block[2])
    if _nanoseconds(kernel) > 0:
        key = (plain_name(kernel["name"]), tuple(int(side) for side in grid), threads)
        samples.kernels[key].append(_nanoseconds(kernel))


def _owners(events: Iterable[Mapping[str, Any]]) -> dict[Any, Mapping[str, Any]]:
    """The innermost operator that launched each correlation id."""
    by_thread: dict[Any, list[tuple[float, int, float, Mapping[str, Any]]]] = defaultdict(list)
    for event in events:
        category = event.get("cat")
        start, length = float(event.get("ts", 0)), float(event.get("dur", 0))
        if category in ("cpu_op", "Operator"):
            by_thread[event.get("tid")].append((start, 0, start + length, event))
        elif category in ("cuda_runtime", "cuda_driver", "Runtime"):
            by_thread[event.get("tid")].append((start, 1, start + length, event))
    owners: dict[Any, Mapping[str, Any]] = {}
    for entries in by_thread.values():
        entries.sort(key=lambda entry: (entry[0], entry[1], -entry[2]))
        open_operators: list[tuple[float, Mapping[str, Any]]] = []
        for start, is_launch, end, event in entries:
            while open_operators and open_operators[-1][0] < start:
                open_operators.pop()
            if not is_launch:
                open_operators.append((end, event))
            elif open_operators:
                owners[_arguments(event).get("correlation")] = open_operators[-1][1]
    return owners


def _library_key(operator: Mapping[str, Any], kernels: Sequence[Mapping[str, Any]]) -> GemmKey | OperatorKey | None:
    """What the emulated device sees of an operator that one library call carries out."""
    arguments = _arguments(operator)
    dims = arguments.get("Input Dims") or arguments.get("Input dims")
    types = arguments.get("Input type") or arguments.get("Input Types")
    if not isinstance(dims, list) or not isinstance(types, list):
        return None
    name = operator.get("name", "")
    try:
        if name in _PRODUCTS:
            return _product_key(dims, types, *_PRODUCTS[name], kernels)
        if name in _ATTENTION:
            return _attention_key(name, dims, types, arguments.get("Concrete Inputs"))
    except (IndexError, TypeError, ValueError):
        return None
    return None


def _product_key(
    dims: Sequence[Any], types: Sequence[str], left: int, right: int, kernels: Sequence[Mapping[str, Any]]
) -> GemmKey | None:
    a, b = [int(size) for size in dims[left]], [int(size) for size in dims[right]]
    kind = _TYPES.get(types[left])
    if kind is None or len(a) != len(b) or len(a) not in (2, 3) or a[-1] != b[-2]:
        return None
    names = " ".join(kernel["name"] for kernel in kernels)
    is_tf32 = kind == "fp32" and re.search(r"tf32|s1688|s16816", names) is not None
    return (a[-2], b[-1], a[-1], a[0] if len(a) == 3 else 1, kind, "tf32" if is_tf32 else kind)


def _attention_key(name: str, dims: Sequence[Any], types: Sequence[str], values: Any) -> OperatorKey | None:
    row, first, over_query, over_value = _ATTENTION[name]
    query, key, value = (
        [int(size) for size in dims[first]],
        [int(size) for size in dims[first + 1]],
        [int(size) for size in dims[first + 2]],
    )
    kind = _TYPES.get(types[first])
    if kind is None or len(query) != 4:
        return None
    batch, heads, rows, depth = query
    columns = key[2]
    flop = 2 * batch * heads * rows * columns * (over_query * depth + over_value * value[3])
    if name in _CAUSAL:
        if not isinstance(values, list):
            return None
        if values[_CAUSAL[name]] == "True":
            square = min(rows, columns)
            flop = flop * (square * (square + 1) // 2 + (rows - square) * columns) // (rows * columns)
    return (row, flop, kind)


def plain_name(name: str) -> str:
    """The name as a C++ programmer reads it."""
    if not name.startswith("_Z"):
        return name
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return name
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    plain = ctypes.string_at(text).decode(errors="replace")
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(text)
    return plain


def table_text(samples: Samples, provenance: Literal["measured", "imported"], source: str) -> str:
    """The table as TOML."""
    lines = [
        f"version = {VERSION}",
        f"device = {_quoted(samples.device or '')}",
        f'provenance = "{provenance}"',
        f"source = {_quoted(source)}",
    ]
    for (m, n, k, batch, kind, compute), durations in sorted(samples.gemms.items()):
        shape = [f"m = {m}", f"n = {n}", f"k = {k}", f"batch = {batch}", f'input = "{kind}"', f'compute = "{compute}"']
        lines += ["", "[[gemm]]", *shape, *_sampled(durations)]
    for (name, flop, kind), durations in sorted(samples.operators.items()):
        row = [f"name = {_quoted(name)}", f"flop = {flop}", f'input = "{kind}"']
        lines += ["", "[[operator]]", *row, *_sampled(durations)]
    for (name, grid, threads), durations in sorted(samples.kernels.items()):
        row = [f"name = {_quoted(name)}", f"grid = {list(grid)}", f"threads = {threads}"]
        lines += ["", "[[kernel]]", *row, *_sampled(durations)]
    return "\n".join(lines) + "\n"


def _sampled(durations: Sequence[float]) -> list[str]:
    return [f"ns = {statistics.median(durations):.1f}", f"samples = {len(durations)}"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def import_kineto_kernels(paths: Sequence[Path], output: Path, device: str | None = None) -> dict[str, Any]:
    """Makes a kernel table from Kineto traces; returns what `prism import kineto-kernels --json` prints."""
    samples = collect_samples(paths, device)
    return _write(samples, output, "imported", ", ".join(path.name for path in paths))


def _write(samples: Samples, output: Path, provenance: Literal["measured", "imported"], source: str) -> dict[str, Any]:
    output.write_text(table_text(samples, provenance, source), encoding="utf-8")
    return {
        "table": str(output),
        "device": samples.device,
        "provenance": provenance,
        "kernels": len(samples.kernels),
        "gemms": len(samples.gemms),
        "operators": len(samples.operators),
        "samples": sum(
            len(durations)
            for rows in (samples.kernels, samples.gemms, samples.operators)
            for durations in rows.values()
        ),
    }


def table_report(document: Mapping[str, Any]) -> str:
    """What the commands that write a table print."""
    return (
        f"{document['table']}: {document['kernels']} kernels, {document['gemms']} matrix products and "
        f"{document['operators']} operators of {document['device']}, {document['provenance']} "
        f"({document['samples']} launches)"
    )


def read_tables(paths: Sequence[Path]) -> list[str]:
    """Texts of kernel tables, as a session takes them."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the kernel table {path} cannot be read: {error}") from error
    return texts
