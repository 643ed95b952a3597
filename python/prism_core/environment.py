"""What a rank's process finds in its environment: the place torchrun would give it, and the preloaded libraries."""

from __future__ import annotations

import os
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prism_core.errors import ShimError

_PACKAGE = Path(__file__).resolve().parent
SHIM_FOLDER = _PACKAGE / "_shim"
BOOTSTRAP_FOLDER = _PACKAGE / "_bootstrap"
SHIM_NAMES = ("libprism_cuda.so", "libprism_nccl.so", "libprism_nvml.so")
#: The libraries where a real GPU computes: the session's and NCCL's; CUDA is the machine's.
REAL_SHIM_NAMES = ("libprism_gpu.so", "libprism_nccl.so")
#: Leads every way of loading NCCL or the driver to the libraries above (LD_AUDIT).
AUDIT_NAME = "libprism_audit.so"
#: Set to `off`: no LD_AUDIT. A client that loads NCCL past the preload then ends the run.
ENV_AUDIT = "PRISM_AUDIT"
HOW_TO_BUILD = "build it with `make build`"
#: Files with NCCL code (`:` between them) of which the user says that the run does not call it; told to the libraries.
ENV_UNUSED_NCCL = "PRISM_UNUSED_NCCL"
#: Path of the real NCCL, for communicators of ranks that all run on real devices.
ENV_REAL_NCCL = "PRISM_REAL_NCCL"
#: Blocks of the kernel that holds a stream of a real device.
ENV_HOLD_BLOCKS = "PRISM_HOLD_BLOCKS"
#: Exit code of an interpreter that finds itself without the preload (set by the hook, which imports nothing of ours).
EXIT_NO_PRELOAD = 97
#: Exit code of a process with NCCL code that is not caught (set by the preloaded libraries).
EXIT_NOT_CAUGHT = 98
#: Exit code of a program that reads an unknown value in a strict run (set by the preloaded libraries).
EXIT_UNKNOWN_VALUE = 96

#: The version of NCCL to answer with; what the user says goes before what torch was built for.
NCCL_VERSION = "PRISM_NCCL_VERSION"
#: `0`: every wait asks the engine.
FORESIGHT = "PRISM_FORESIGHT"
#: ELF machine numbers (elf.h) by the name Python gives the machine.
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


#: What is not the same for all ranks of a run.
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PRISM_SESSION",
    "PRISM_RANK", "PRISM_STORE", "PRISM_LIVE_RANKS", "TRITON_LIBCUDA_PATH", "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where ranks live and whom they talk to."""

    world_size: int
    gpus_per_node: int
    device: str
    socket: str
    store_host: str
    store_port: int
    #: On a real device: zero of the session's clock, ns of the monotonic clock, and the GPU of each rank played here.
    epoch_ns: int | None = None
    gpus: Mapping[int, int] = field(default_factory=dict)
    #: On a real device: where the real NCCL is.
    real_nccl: str | None = None
    #: More of the environment.
    variables: Mapping[str, str] = field(default_factory=dict)
    #: Ranks that run in this session; none named: only the one that is started.
    live: tuple[int, ...] = ()


def check_shims(folder: Path = SHIM_FOLDER, device: str = "emulated") -> list[Path]:
    """The libraries to preload, checked: the loader only warns about one that it cannot use."""
    paths = [folder / name for name in (REAL_SHIM_NAMES if device == "real" else SHIM_NAMES)]
    for path in [*paths, folder / AUDIT_NAME]:
        problem = shim_problem(path)
        if problem is not None:
            raise ShimError(problem)
    return paths


def shim_problem(path: Path) -> str | None:
    """Why the library cannot be preloaded here, or `None`."""
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError:
        return f"{path.name} is missing in {path.parent}: {HOW_TO_BUILD}"
    if len(header) < 20 or header[:4] != b"\x7fELF":
        return f"{path} is not an ELF library: {HOW_TO_BUILD}"
    (machine,) = struct.unpack_from("<H" if header[5] == 1 else ">H", header, 18)
    ours = _ELF_MACHINES.get(platform.machine())
    if header[4] != 2 or machine != ours:
        names = {number: name for name, number in _ELF_MACHINES.items()}
        theirs = names.get(machine, f"ELF machine {machine}") if header[4] == 2 else "a 32-bit machine"
        return f"{path.name} is built for {theirs}, this machine is {platform.machine()}: {HOW_TO_BUILD}"
    return None


def preload_variable(shims: list[Path], existing: str | None) -> str:
    """Value of LD_PRELOAD or LD_AUDIT: ours first, then what was there."""
    return ":".join([*map(str, shims), *([existing] if existing else [])])


def loader_variables(shims: list[Path], base: Mapping[str, str]) -> dict[str, str]:
    """What makes the loader use our libraries, in addition to what `base` already asks of it.

    Raises:
        ShimError: The switch for the audit library has an unknown value.
    """
    variables = {"LD_PRELOAD": preload_variable(shims, base.get("LD_PRELOAD"))}
    switch = base.get(ENV_AUDIT, "on")
    if switch not in ("on", "off"):
        raise ShimError(f"{ENV_AUDIT}={switch} is neither on nor off")
    if switch == "on" and shims:
        variables["LD_AUDIT"] = preload_variable([shims[0].parent / AUDIT_NAME], base.get("LD_AUDIT"))
    return variables


def rank_environment(rank: int, placement: Placement, shims: list[Path], base: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of one rank's process."""
    theirs = ("PRISM_", "TORCHELASTIC_")
    kept = {
        name: value for name, value in base.items() if name in (NCCL_VERSION, FORESIGHT) or not name.startswith(theirs)
    }
    kept.setdefault("OMP_NUM_THREADS", "1")
    kept.setdefault("PYTHONHASHSEED", "0")
    kept.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # PyTorch's monitor ends a process whose watchdog does not move for minutes: in virtual time they pass at once.
    kept.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    for name, value in _compiler_variables(rank, Path(placement.socket).parent).items():
        kept.setdefault(name, value)
    return kept | _torchrun_variables(rank, placement) | _our_variables(rank, placement, shims, base)


def _compiler_variables(rank: int, folder: Path) -> dict[str, str]:
    """What `torch.compile` needs: a driver to link with, and caches that are empty for every rank and every run.

    What a cache holds decides which buffers the compiler's benchmarks allocate, hence peaks. A user who sets the
    caches' variables says so for all ranks alike.
    """
    driver = folder / "driver"
    if folder.is_dir() and not driver.exists():
        driver.mkdir()
        for name in ("libcuda.so", "libcuda.so.1"):
            (driver / name).symlink_to(SHIM_FOLDER / SHIM_NAMES[0])
    caches = folder / "caches" / f"rank-{rank}"
    return {
        "TRITON_LIBCUDA_PATH": str(driver),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def _torchrun_variables(rank: int, placement: Placement) -> dict[str, str]:
    """What torchrun tells a worker, as if one agent per node had started it and hosted the store."""
    world, per_node = placement.world_size, placement.gpus_per_node
    node, local_rank = divmod(rank, per_node)
    num_nodes = -(-world // per_node)
    return {
        "RANK": str(rank),
        # Programs take their GPU by it: on a real device the GPU that is there for the rank.
        "LOCAL_RANK": str(placement.gpus.get(rank, local_rank)),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(min(per_node, world - node * per_node)),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": placement.store_host,
        "MASTER_PORT": str(placement.store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "prism",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def _our_variables(rank: int, placement: Placement, shims: list[Path], base: Mapping[str, str]) -> dict[str, str]:
    python_path = [str(BOOTSTRAP_FOLDER), *([base["PYTHONPATH"]] if base.get("PYTHONPATH") else [])]
    return {
        "PRISM_SESSION": placement.socket,
        "PRISM_RANK": str(rank),
        "PRISM_WORLD_SIZE": str(placement.world_size),
        "PRISM_DEVICE": placement.device,
        "PRISM_STORE": f"{placement.store_host}:{placement.store_port}",
        "PRISM_LIVE_RANKS": ",".join(map(str, placement.live or (rank,))),
        "PYTHONPATH": os.pathsep.join(python_path),
        **({"PRISM_EPOCH_NS": str(placement.epoch_ns)} if placement.epoch_ns is not None else {}),
        **({ENV_REAL_NCCL: placement.real_nccl} if placement.real_nccl is not None else {}),
        **{name: base[name] for name in (ENV_UNUSED_NCCL, ENV_HOLD_BLOCKS) if base.get(name)},
        **placement.variables,
        **loader_variables(shims, base),
    }
