"""Kernels of a trace as the emulated device would see them: library calls by shape, launches by grid and bytes.

A trace of `torch.profiler` with shapes says what went into the operator behind a launch. The emulated device takes the
bytes of a launch from the kernel's own parameters (`shim/cuda/src/values/sizes.rs`); here the same numbers are found
from the operator's shapes, kernel by kernel. Where the shapes do not tell (what indices point to, operators without
shapes), a launch has no bytes here, and name and grid are all there is.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prism_core.kernels import COMMUNICATION, _arguments, _library_key, _nanoseconds, _owners, plain_name, read_trace

SIZES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "bool": 1,
    "unsigned char": 1, "signed char": 1, "c10::Float8_e4m3fn": 1,
}  # fmt: skip
#: Of these kernels every element of the operator's first tensor is moved so often.
FIRST_TENSOR = {
    "reduce_kernel": 1, "vectorized_layer_norm_kernel": 2, "layer_norm_grad_input_kernel": 3,
    "GammaBetaBackwardCUDAKernel": 2, "GammaBetaBackwardSimpleCUDAKernel": 2, "RowwiseMomentsCUDAKernel": 1,
    "softmax_warp_forward": 2, "softmax_warp_backward": 3, "cunn_SoftMaxForward": 2, "cunn_SoftMaxBackward": 3,
}  # fmt: skip
#: Operators whose results are among their arguments, so that their shapes are the blocks behind the kernel's pointers.
IN_PLACE = re.compile(r"^_C(_\w+)?::(fused_add_rms_norm|rms_norm|rotary_embedding)$")
#: Of these operators the kernels read the first tensor and write another like it.
COPIES = re.compile(r"permute_pooled_embs|PermutePooledEmbs|recat_embedding_grad_output")


@dataclass(slots=True)
class Group:
    """Launches alike: the work as `work_durations_json` takes it, and how long each took, in ns."""

    work: dict[str, Any]
    ns: list[float] = field(default_factory=list)


def works_of(path: Path) -> list[Group]:
    """What the device of a trace did, communication left out."""
    document = read_trace(path)
    events = [event for event in document["traceEvents"] if isinstance(event, dict) and event.get("ph") == "X"]
    owners = _owners(events)
    groups: dict[Any, Group] = {}
    calls: dict[int, tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = {}
    for event in events:
        if event.get("cat") not in ("kernel", "Kernel") or "dur" not in event or COMMUNICATION.search(event["name"]):
            continue
        owner = owners.get(_arguments(event).get("correlation"))
        if owner is not None and _library_key(owner, [event]) is not None:
            calls.setdefault(id(owner), (owner, []))[1].append(event)
        else:
            _launch(groups, event, owner)
    fields = ("m", "n", "k", "batch", "input", "compute")
    for owner, kernels in calls.values():
        key = _library_key(owner, kernels)
        total = sum(map(_nanoseconds, kernels))
        if key is not None and len(key) == 6 and total > 0:
            groups.setdefault(key, Group({"gemm": dict(zip(fields, key, strict=True))})).ns.append(total)
    return list(groups.values())


def _launch(groups: dict[Any, Group], event: Mapping[str, Any], owner: Mapping[str, Any] | None) -> None:
    arguments = _arguments(event)
    grid, block = arguments.get("grid"), arguments.get("block")
    if not (isinstance(grid, list) and isinstance(block, list)) or _nanoseconds(event) <= 0:
        return
    name = plain_name(event["name"])
    moved = moved_bytes(name, grid, owner) if owner is not None else 0
    work = {"name": name, "grid": grid, "threads": math.prod(block), "bytes": moved}
    groups.setdefault((name, *grid, *block, moved), Group({"kernel": work})).ns.append(_nanoseconds(event))


def _tensors(owner: Mapping[str, Any]) -> list[tuple[list[int], int]]:
    """Shapes and element sizes of an operator's tensors; of lists of tensors, which traces give no type, float's."""
    arguments = _arguments(owner)
    dims = arguments.get("Input Dims") or arguments.get("Input dims") or []
    types = arguments.get("Input type") or arguments.get("Input Types") or []
    found: list[tuple[list[int], int]] = []
    for shape, kind in zip(dims, types, strict=False):
        if not isinstance(shape, list) or not shape:
            continue
        if isinstance(shape[0], list):
            found += [(item, 4) for item in shape if item]
        elif kind in SIZES:
            found.append((shape, SIZES[kind]))
    return found


def moved_bytes(name: str, grid: Sequence[int], owner: Mapping[str, Any]) -> int:
    """Bytes that a launch moves; 0 where the operator's shapes do not tell."""
    tensors = _tensors(owner)
    if not tensors:
        return 0
    operator = str(owner.get("name", ""))
    kernel = (
        name.replace("(anonymous namespace)::", "").split("<")[0].split("(")[0].split("::")[-1].removeprefix("void ")
    )
    sizes = [math.prod(shape) * size for shape, size in tensors]
    if kernel in FIRST_TENSOR and operator.startswith("aten::"):
        return FIRST_TENSOR[kernel] * sizes[0]
    if kernel.startswith("CatArrayBatchedCopy") and grid[1] == len(sizes):
        return 2 * sum(sizes)
    if kernel in ("permute_pooled_embs_kernel", "recat_copy_async_kernel") and COPIES.search(operator):
        return 2 * sizes[0]
    if kernel.startswith("indexSelect") and operator == "aten::index_select" and len(tensors) > 1:
        rows = math.prod(tensors[1][0])
        return 2 * rows * sizes[0] // max(1, tensors[0][0][0])
    if IN_PLACE.match(operator):
        return sum(sizes)
    return 0


#: Purposes of kernels inside library calls: the emulated device sees the call with its shape.
_LIBRARY = ("gemm", "convolution", "attention")


def by_class(
    groups: Sequence[Group], found: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, str], list[tuple[float, Group]]]:
    """Groups with the model's ns, by provenance and purpose. Library calls without shapes are no test of any model."""
    classes: dict[tuple[str, str], list[tuple[float, Group]]] = defaultdict(list)
    for group, model in zip(groups, found, strict=True):
        is_modelled = model["provenance"] == "modelled"
        is_call = not is_modelled and model["family"] in _LIBRARY
        family = model["family"] if is_modelled else "library calls without shapes" if is_call else "everything else"
        classes[model["provenance"], family].append((model["ns"], group))
    return classes
