"""What the installed PyTorch asks of NVIDIA's libraries, symbol by symbol, against what the preloaded libraries export.

`tests/shim/symbols/*.txt` list what one build asks for and no library of ours has: those calls fail by name when they
are made. A torch that asks for anything else fails here, with the names. To add a build: install it and run

    python tests/shim/test_torch_symbols.py > tests/shim/symbols/torch-VERSION.txt
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import nccl_support
import pytest
from prism_core import slim
from prism_core.environment import SHIM_FOLDER, SHIM_NAMES

LISTS = Path(__file__).parent / "symbols"
#: Libraries of which everything is there: a program cannot do without.
COMPLETE = ("libcudart", "libcuda", "libnccl", "libcupti", "libcublasLt", "libnvrtc")


def wanted(package: Path) -> dict[str, set[str]]:
    """Undefined symbols of a torch package by NVIDIA library."""
    symbols: dict[str, set[str]] = defaultdict(set)
    for path in slim.torch_libraries(package):
        if slim.family_of(path.name):
            continue  # a stand-in
        for symbol in slim.read_elf(path).undefined:
            if symbol.library:
                family = slim.family_of(symbol.library)
            else:
                family = next((known for known in slim.FAMILIES if re.match(known.symbols, symbol.name)), None)
            if family is not None:
                symbols[family.stem].add(symbol.name)
    return symbols


def exported() -> set[str]:
    """What the preloaded libraries define."""
    return {name for shim in SHIM_NAMES for name in nccl_support.symbols(SHIM_FOLDER / shim, defined=True)}


def missing(package: Path) -> dict[str, list[str]]:
    """What is asked for and nobody has, by library."""
    ours = exported()
    return {library: sorted(names - ours) for library, names in sorted(wanted(package).items()) if names - ours}


@pytest.fixture(scope="module")
def torch_package() -> tuple[str, Path]:
    try:
        found = slim.installed_torch()
    except slim.SlimError as error:
        pytest.skip(str(error))
    if found is None:
        pytest.skip("torch is not installed")
    if not all((SHIM_FOLDER / name).is_file() for name in SHIM_NAMES):
        pytest.skip("the libraries are not built")
    return found


def read_list(path: Path) -> dict[str, list[str]]:
    """Names by library."""
    names: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            library, name = line.split("\t")
            names[library].append(name)
    return dict(names)


@pytest.mark.torch
def test_the_installed_torch_asks_for_nothing_new(torch_package: tuple[str, Path]) -> None:
    _, package = torch_package
    known: dict[str, set[str]] = defaultdict(set)
    for path in LISTS.glob("torch-*.txt"):
        for library, names in read_list(path).items():
            known[library].update(names)
    new = {
        library: sorted(set(names) - known[library])
        for library, names in missing(package).items()
        if set(names) - known[library]
    }
    assert not new, f"serve or refuse these by name: {new}"


@pytest.mark.torch
def test_the_libraries_a_program_cannot_do_without_are_complete(torch_package: tuple[str, Path]) -> None:
    _, package = torch_package
    asked = wanted(package)
    assert len(asked["libcudart"]) > 90 and len(asked["libnccl"]) > 40, "the lists are read"
    lacking = {library: names for library, names in missing(package).items() if library in COMPLETE}
    assert not lacking, lacking


def test_a_new_symbol_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "wanted", lambda package: {"libcudart": {"cudaMalloc", "cudaNewInTorch"}})
    monkeypatch.setitem(globals(), "exported", lambda: {"cudaMalloc"})
    assert missing(tmp_path) == {"libcudart": ["cudaNewInTorch"]}


@pytest.mark.parametrize("path", sorted(LISTS.glob("torch-*.txt")), ids=lambda path: path.stem)
def test_the_lists_name_no_library_that_is_complete(path: Path) -> None:
    names = read_list(path)
    assert names and not set(names) & set(COMPLETE)


def main() -> int:
    """Prints the list of the installed torch, or of the package at the path given."""
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else slim.installed_torch()[1]  # type: ignore[index]
    print(f"# Asked for by {package.name} {metadata.version('torch') if len(sys.argv) == 1 else ''} and not exported.")
    for library, names in missing(package).items():
        for name in names:
            print(f"{library}\t{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
