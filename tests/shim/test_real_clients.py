"""Published clients of NCCL on the stand-in: vLLM's wrapper, nccl4py, CuPy.

They are large, so they are not part of the development install: ``pip install -e '.[clients]'``, and for vLLM
``pip install --no-deps --target FOLDER vllm==0.33.0``; ``PRISM_TEST_CLIENTS`` names folders to look in as well.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nccl_support
import pytest
from prism_core.environment import SHIM_NAMES, loader_variables

FOLDERS = [folder for folder in os.environ.get("PRISM_TEST_CLIENTS", "").split(":") if folder]
pytestmark = pytest.mark.clients

#: Ends each program: what NCCL is mapped, beside the client's own modules?
REPORT = """
import json, os
files = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
names = sorted({name for name in map(os.path.basename, files) if name.startswith(("libnccl", "libprism_nccl"))})
print(json.dumps({"mapped": names, "answers": answers}))
"""

NCCL4PY = """
import nccl.core
version = nccl.core.get_version().libnccl
answers = [str(version.version), os.path.basename(str(version.path)), len(bytes(nccl.core.get_unique_id().as_bytes))]
"""

CUPY = """
from cupy.cuda import nccl
identity = nccl.get_unique_id()
try:
    nccl.NcclCommunicator(8, identity, 0)
    error = None
except nccl.NcclError as caught:
    error = str(caught)
answers = [nccl.get_version(), len(identity), error]
"""

# The wrapper is one file of a package whose import needs dozens of others: it gets the four names it uses of them.
VLLM = """
import importlib.util, logging, sys, types
folder = sys.argv[1]
class Logger(logging.Logger):
    debug_once = info_once = logging.Logger.debug
def module(name, **names):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(names)
def load(name):
    spec = importlib.util.spec_from_file_location(name, f"{folder}/{name.replace('.', '/')}.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
envs = types.SimpleNamespace(VLLM_NCCL_SO_PATH=os.environ.get("VLLM_NCCL_SO_PATH"), VLLM_NCCL_INCLUDE_PATH=None)
module("vllm", envs=envs, __path__=[])
module("vllm.envs", **vars(envs))
module("vllm.logger", init_logger=Logger)
module("vllm.platforms", current_platform=types.SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: True))
module("vllm.utils", __path__=[])
load("vllm.utils.nccl")
wrapper = load("vllm.distributed.device_communicators.pynccl_wrapper")
library = wrapper.NCCLLibrary()
try:
    library.ncclCommInitRank(8, library.ncclGetUniqueId(), 0)
    error = None
except RuntimeError as caught:
    error = str(caught)
answers = [library.ncclGetRawVersion(), error]
"""


def folder_of(package: str) -> str:
    """Where the package is, or a skip."""
    spec = importlib.machinery.PathFinder.find_spec(package, [*FOLDERS, *sys.path])
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    if not locations:
        pytest.skip(f"{package} is not installed (extra `clients`, or PRISM_TEST_CLIENTS)")
    return str(Path(locations[0]).parent)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with another NCCL, where clients look for theirs."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    library = tmp_path / "libnccl.so.2"
    source = Path(__file__).parent / "c/other_nccl.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", source, "-o", library], check=True)
    return tmp_path


def ask(program: str, folder: str, other: Path, **changes: str) -> dict[str, Any]:
    changes = {"PRISM_NCCL_VERSION": "2.30.7", "PYTHONPATH": ":".join([*FOLDERS, folder]), **changes}
    environment = nccl_support.environment(LD_LIBRARY_PATH=str(other), **changes)
    environment |= loader_variables([nccl_support.shim().parent / name for name in SHIM_NAMES], environment)
    command = [sys.executable, "-W", "ignore", "-c", f"import os\n{program}{REPORT}", folder]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout.splitlines()[-1])


def test_nccl4py(other: Path) -> None:
    answers = ask(NCCL4PY, folder_of("nccl"), other)
    assert answers == {"mapped": ["libprism_nccl.so"], "answers": ["2.30.7", "libprism_nccl.so", 128]}


def test_cupy(other: Path) -> None:
    answers = ask(CUPY, folder_of("cupy"), other, PRISM_NCCL_VERSION="2.28.9")
    assert answers["mapped"] == ["libprism_nccl.so"]
    version, length, error = answers["answers"]
    assert (version, length) == (22809, 128)
    assert "NCCL_ERROR_UNHANDLED_CUDA_ERROR" in error  # no session: as on a machine without a GPU


@pytest.mark.torch
@pytest.mark.parametrize("by", ["name", "path"])
def test_the_wrapper_of_vllm(by: str, other: Path) -> None:
    changes = {"VLLM_NCCL_SO_PATH": str(other / "libnccl.so.2")} if by == "path" else {}
    answers = ask(VLLM, folder_of("vllm"), other, **changes)
    assert answers["mapped"] == ["libprism_nccl.so"]
    version, error = answers["answers"]
    assert version == 23007
    assert "unhandled cuda error" in error
