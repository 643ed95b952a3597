"""The hook inside a training program: a small C library stands in for the preloaded one and writes down its calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import prism_core.environment as environment
import pytest
from prism_core.torch.hook import EXIT_NO_PRELOAD, tell_nccl_version

FAKE_LIBRARY = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
static FILE *log_file(void) { return fopen(getenv("FAKE_LOG"), "a"); }
static int refuse(void) { return getenv("FAKE_REFUSES") ? -1 : 0; }
int prism_note_group(const char *name, const uint32_t *ranks, uint32_t count) {
    FILE *file = log_file();
    fprintf(file, "group %s:", name);
    for (uint32_t i = 0; i < count; i++) fprintf(file, " %u", ranks[i]);
    fprintf(file, "\\n");
    fclose(file);
    return refuse();
}
int prism_clear_group(void) { FILE *file = log_file(); fprintf(file, "clear\\n"); fclose(file); return 0; }
int prism_marker(uint32_t kind, void *stream) {
    FILE *file = log_file(); fprintf(file, "marker %u %p\\n", kind, stream); fclose(file); return refuse();
}
int prism_provide(void *address, const char *data, uint64_t bytes) {
    FILE *file = log_file(); fprintf(file, "provide %lu\\n", bytes); fclose(file); return refuse();
}
int prism_memory_stats(uint64_t allocated, uint64_t reserved) {
    FILE *file = log_file(); fprintf(file, "memory %lu %lu\\n", allocated, reserved); fclose(file); return refuse();
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("library")
    (folder / "fake.c").write_text(FAKE_LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "fake.so", folder / "fake.c"], check=True)
    return folder / "fake.so"


def run_program(
    program: str, tmp_path: Path, preload: Path | None, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs a program under the bootstrap; its output and what the library was told."""
    log = tmp_path / "calls.log"
    log.touch()
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PRISM_")},
        "PRISM_SESSION": "/nowhere",
        "PYTHONPATH": str(environment.BOOTSTRAP_FOLDER),
        "FAKE_LOG": str(log),
        **({"LD_PRELOAD": str(preload)} if preload else {}),
        **variables,
    }
    command = [sys.executable, "-c", textwrap.dedent(program)]
    child = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    return child, log.read_text().splitlines()


@pytest.fixture(scope="module")
def torch_works() -> None:
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this interpreter cannot import torch")


def test_a_program_without_the_preload_is_stopped(tmp_path: Path) -> None:
    child, _ = run_program("print('ran')", tmp_path, preload=None)
    assert child.returncode == EXIT_NO_PRELOAD == environment.EXIT_NO_PRELOAD
    assert child.stderr == "prism: preload is not in place\n"
    assert child.stdout == ""


def test_a_child_without_the_preload_is_left_alone(tmp_path: Path, library: Path) -> None:
    program = """
        import os, subprocess, sys
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        subprocess.run([sys.executable, "-c", "print('child ran')"], env=environment, check=True)
    """
    child, _ = run_program(program, tmp_path, library)
    assert (child.returncode, child.stdout, child.stderr) == (0, "child ran\n", "")


def test_without_a_session_nothing_happens(tmp_path: Path) -> None:
    program = "import sys; print('_prism_torch_hook' in sys.modules)"
    child, _ = run_program(program, tmp_path, preload=None, PRISM_SESSION="")
    assert (child.returncode, child.stdout) == (0, "False\n")


def test_another_sitecustomize_is_still_run(tmp_path: Path, library: Path) -> None:
    other = tmp_path / "site"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import builtins; builtins.other_ran = __file__")
    path = os.pathsep.join([str(environment.BOOTSTRAP_FOLDER), str(other)])
    child, _ = run_program("print(other_ran)", tmp_path, library, PYTHONPATH=path)
    assert child.stdout.strip() == str(other / "sitecustomize.py")


def test_torch_is_not_imported_by_the_hook(tmp_path: Path, library: Path) -> None:
    child, calls = run_program("import sys; print('torch' in sys.modules)", tmp_path, library)
    assert (child.stdout, child.stderr, calls) == ("False\n", "", [])


@pytest.mark.torch
@pytest.mark.usefixtures("torch_works")
def test_every_process_group_is_told_before_it_is_made(tmp_path: Path, library: Path) -> None:
    program = """
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", rank=3, world_size=6, store=FakeStore())
        for first in range(0, 6, 2):
            dist.new_group([first, first + 1])
        dist.new_group([5, 3, 1], use_local_synchronization=False)
        dist.destroy_process_group()
    """
    child, calls = run_program(program, tmp_path, library)
    assert child.returncode == 0, child.stderr
    groups = [call for call in calls if call.startswith("group")]
    assert groups == [
        "group 0: 0 1 2 3 4 5",
        "group 1: 0 1",
        "group 2: 2 3",
        "group 3: 4 5",
        "group 4: 1 3 5",
    ]
    assert calls.count("clear") == len(groups)
    assert "prism" not in child.stderr


@pytest.mark.torch
@pytest.mark.usefixtures("torch_works")
def test_groups_of_a_split_are_told_with_their_names(tmp_path: Path, library: Path) -> None:
    program = """
        import torch, torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        c10d = dist.distributed_c10d
        dist.init_process_group("fake", rank=3, world_size=6, store=FakeStore())
        class Parent:  # the C++ half of a split, as far as the hook can see it
            bound_device_id = torch.device("cpu")
            group_desc = ""
            def rank(self): return 3
            def size(self): return 6
            def _get_backend(self, device): return type("Backend", (), {"supports_splitting": True})()
            _device_types = []
            def split_group(self, ranks, **options):
                print("made", options["group_name"], ranks)
        parent = Parent()
        c10d._world.pg_group_ranks[parent] = {rank: rank for rank in range(6)}
        c10d._world.pg_map[parent] = ("fake", None)
        c10d._get_default_group = lambda: parent
        torch.accelerator.is_available = lambda: True
        torch.accelerator.current_accelerator = lambda: torch.device("cpu")
        dist.split_group(parent, [[0, 1], [2, 3], [4, 5]])
    """
    child, calls = run_program(program, tmp_path, library)
    assert child.returncode == 0, child.stderr
    made = child.stdout.split()[1]
    told = [call for call in calls if call.startswith("group")][1:]
    assert told[-1] == f"group {made}: 2 3"
    assert sorted(call.partition(": ")[2] for call in told) == ["0 1", "2 3", "4 5"]
    assert len({call.split()[1] for call in told}) == 3
    assert calls[-1] == "clear"


ON_A_DEVICE = """
    import types, torch
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_stream = lambda *_: types.SimpleNamespace(cuda_stream=0x77)
    peaks = {"allocated": 0, "reserved": 0}
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_memoryStats = lambda device: {
        f"{kind}_bytes": {"all": {"peak": peak}} for kind, peak in peaks.items()
    }
"""


@pytest.mark.torch
@pytest.mark.usefixtures("torch_works")
def test_training_begin_and_iterations_are_marked(tmp_path: Path, library: Path) -> None:
    program = textwrap.dedent(ON_A_DEVICE) + textwrap.dedent("""
        model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, other)]
        for _ in range(2):
            (model(torch.ones(2)) + other(torch.ones(2))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    """)
    child, calls = run_program(program, tmp_path, library)
    assert child.returncode == 0, child.stderr
    markers = [call for call in calls if call.startswith("marker")]
    assert markers == ["marker 1 0x77", "marker 2 0x77", "marker 2 0x77"]


@pytest.mark.torch
@pytest.mark.usefixtures("torch_works")
def test_peaks_survive_the_program_s_own_resets(tmp_path: Path, library: Path) -> None:
    program = textwrap.dedent(ON_A_DEVICE) + textwrap.dedent("""
        hook = torch._C._cuda_resetPeakMemoryStats
        cell = hook.__closure__[[*hook.__code__.co_freevars].index("original")]
        cell.cell_contents = lambda device: peaks.update(allocated=0, reserved=0)
        peaks.update(allocated=700, reserved=900)
        torch.cuda.reset_peak_memory_stats(0)
        assert peaks["allocated"] == 0, "the program's reset must work"
        peaks.update(allocated=500, reserved=1000)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        peaks.update(allocated=800, reserved=1000)
    """)
    child, calls = run_program(program, tmp_path, library)
    assert child.returncode == 0, child.stderr
    assert [call for call in calls if call.startswith("memory")] == ["memory 700 1000", "memory 800 1000"]


@pytest.mark.torch
@pytest.mark.usefixtures("torch_works")
def test_a_refusal_of_the_engine_is_one_line(tmp_path: Path, library: Path) -> None:
    program = """
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", rank=3, world_size=6, store=FakeStore())
        dist.new_group([0, 1])
    """
    child, _ = run_program(program, tmp_path, library, FAKE_REFUSES="1")
    assert child.stderr.count("prism: the engine did not take process group '0' of 6 ranks\n") == 1
    assert child.stderr.count("prism:") == 1


@pytest.mark.torch
@pytest.mark.usefixtures("torch_works")
def test_a_program_that_never_uses_the_device_is_left_alone(tmp_path: Path, library: Path) -> None:
    program = """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        print("done")
    """
    child, calls = run_program(program, tmp_path, library)
    assert (child.stdout, calls) == ("done\n", [])


@pytest.mark.parametrize(
    "module", ["torch.distributed.distributed_c10d", "torch.optim.optimizer", "torch.nn.modules.module"]
)
def test_a_pytorch_without_the_hooked_names_gets_one_line(tmp_path: Path, library: Path, module: str) -> None:
    folder = tmp_path / "other"
    package = folder
    for part in module.split(".")[:-1]:
        package = package / part
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (package / f"{module.split('.')[-1]}.py").write_text("loaded = True")
    path = os.pathsep.join([str(environment.BOOTSTRAP_FOLDER), str(folder)])
    child, _ = run_program(f"import {module}; print('went on')", tmp_path, library, PYTHONPATH=path)
    assert child.stdout == "went on\n"
    assert len(child.stderr.splitlines()) == 1
    assert child.stderr.startswith("prism: this PyTorch has no ")


@pytest.mark.parametrize(("chosen", "answered"), [("", "2.30.7"), ("2.27.7", "2.27.7")])
def test_nccl_answers_with_the_version_torch_was_built_for(
    monkeypatch: pytest.MonkeyPatch, chosen: str, answered: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch._C", SimpleNamespace(_nccl_version=lambda: 2 << 32 | 30 << 16 | 7))
    monkeypatch.setenv(environment.NCCL_VERSION, chosen)
    tell_nccl_version()
    assert os.environ[environment.NCCL_VERSION] == answered


def test_a_torch_without_nccl_says_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._C", SimpleNamespace())
    monkeypatch.delenv(environment.NCCL_VERSION, raising=False)
    tell_nccl_version()
    assert environment.NCCL_VERSION not in os.environ
