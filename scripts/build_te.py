"""Builds Transformer Engine for the slim torch of this interpreter: its core wheel, its torch extension, stand-ins.

    python scripts/build_te.py [--work FOLDER] [--jobs N]

The core library is NVIDIA's own wheel. The torch extension is on PyPI as source only; here it is compiled without
optimisation, as it does nothing but call the core. The headers come out of NVIDIA's wheels, which are not installed:
their libraries would take the place of the stand-ins. Downloads 2 GB, keeps 0.5 GB; the compilation takes long.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

VERSION = "2.20.2"
INSTALLED = [
    f"transformer-engine=={VERSION}", f"transformer-engine-cu13=={VERSION}", "einops==0.8.2", "pydantic==2.14.4",
    "pydantic-core==2.50.5", "annotated-types==0.8.0", "typing-inspection==0.4.5", "triton==3.8.0",
    "onnxscript==0.7.2", "onnx==1.23.2", "onnx-ir==1.1.0", "ml-dtypes==0.6.0", "protobuf==7.36.2",
]  # fmt: skip
#: Wheels whose headers torch 2.14.1 and the extension include, in the versions that torch was built with.
HEADERS = [
    "nvidia-cublas==13.1.0.3", "nvidia-cuda-cccl==13.0.85", "nvidia-cuda-crt==13.0.88", "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-profiler-api==13.0.85", "nvidia-cuda-runtime==13.0.96",
    "nvidia-cudnn-cu13==9.24.0.43", "nvidia-cufft==12.0.0.61", "nvidia-curand==10.4.0.35", "nvidia-cusolver==12.0.4.66",
    "nvidia-cusparse==12.6.3.3", "nvidia-nccl-cu13==2.30.7", "nvidia-nvtx==13.0.85",
]  # fmt: skip
SLIM = Path(__file__).resolve().parent.parent / "python" / "prism_core" / "slim.py"


def run(*words: str | Path, **variables: str) -> None:
    """Runs a command; ends the script when it fails."""
    environment = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "LD_AUDIT")}
    child = subprocess.run([str(word) for word in words], check=False, env=environment | variables)
    if child.returncode != 0:
        raise SystemExit(f"failed: {' '.join(str(word) for word in words)}")


def pip(*words: str | Path, **variables: str) -> None:
    """Runs pip of this interpreter."""
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *words, **variables)


def fetch_headers(work: Path) -> Path:
    """The folder `nvidia` with the headers of all wheels."""
    target = work / "headers"
    for requirement in HEADERS:
        done = target / f".{requirement}"
        if done.exists():
            continue
        download = work / "wheel"
        shutil.rmtree(download, ignore_errors=True)
        pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", download, requirement)
        with zipfile.ZipFile(next(download.glob("*.whl"))) as wheel:
            wheel.extractall(target, [name for name in wheel.namelist() if "/include/" in name or "/bin/" in name])
        for program in target.glob("nvidia/*/bin/*"):  # zipfile leaves out the modes
            program.chmod(0o755)
        shutil.rmtree(download)
        done.touch()
    return target / "nvidia"


def fetch_source(work: Path, nvidia: Path) -> Path:
    """The unpacked source of the torch extension."""
    source = work / f"transformer_engine_torch-{VERSION}"
    if not source.exists():
        # pip asks the source for its metadata, and that looks for CUDA.
        pip(
            "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", work,
            f"transformer-engine-torch=={VERSION}",
            CUDA_HOME=str(nvidia / "cu13"), NVTE_PYTORCH_FORCE_BUILD="TRUE",
        )  # fmt: skip
        with tarfile.open(work / f"{source.name}.tar.gz") as archive:
            archive.extractall(work, filter="data")
    return source


def compile_extension(source: Path, nvidia: Path, torch: Path, jobs: int) -> Path:
    """Compiles and links the torch extension."""
    includes = [source / "common_headers", source / "common_headers/common", source / "common_headers/common/include"]
    system = [nvidia / "cu13/include", nvidia / "cudnn/include", nvidia / "nccl/include", torch / "include"]
    system += [torch / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    flags = ["-O0", "-g0", "-fPIC", "-w", "-std=c++20", "-fvisibility=hidden", "-DNDEBUG"]
    flags += ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=transformer_engine_torch"]
    flags += [f"-I{folder}" for folder in [*includes, source / "csrc"]]
    flags += [word for folder in system for word in ("-isystem", str(folder))]
    objects = source / "objects"
    objects.mkdir(exist_ok=True)
    header = objects / "all.h"
    if not (objects / "all.h.gch").exists():
        header.write_text('#include "extensions.h"\n')
        run("g++", *flags, "-x", "c++-header", header, "-o", objects / "all.h.gch")

    def build(path: Path) -> Path:
        made = objects / path.with_suffix(".o").name
        if not made.exists():
            print(path.relative_to(source), flush=True)
            run("g++", *flags, "-include", header, "-c", path, "-o", made.with_suffix(".tmp"))
            made.with_suffix(".tmp").rename(made)
        return made

    with ThreadPoolExecutor(jobs) as pool:
        made = list(pool.map(build, sorted((source / "csrc").rglob("*.cpp"))))
    library = source / "transformer_engine_torch.so"
    names = ["c10", "torch", "torch_cpu", "torch_python", "c10_cuda", "torch_cuda"]
    libraries = [f"-L{torch / 'lib'}", *(f"-l{name}" for name in names)]
    run("g++", "-shared", "-o", library, *made, *libraries, "-Wl,--allow-shlib-undefined")
    return library


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("target/transformer-engine"), help="downloads and objects")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time, 2 GB each")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    torch = Path(str(metadata.distribution("torch").locate_file("torch")))
    packages = Path(sysconfig.get_path("purelib"))
    pip("install", "--quiet", "--no-deps", *INSTALLED)
    nvidia = fetch_headers(work)
    library = compile_extension(fetch_source(work, nvidia), nvidia, torch, options.jobs)
    shutil.copyfile(library, packages / library.name)
    # Transformer Engine has its own kernels compiled at run time and looks for these; nothing is compiled here.
    shutil.copytree(nvidia / "cu13" / "include", packages / "nvidia" / "cu13" / "include", dirs_exist_ok=True)
    core = packages / "transformer_engine" / "wheel_lib" / "libtransformer_engine.so"
    run(sys.executable, SLIM, "--no-install", "--also", core, "--also", packages / library.name)


if __name__ == "__main__":
    main()
