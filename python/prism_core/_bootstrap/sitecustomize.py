"""Loaded by every Python of a training program that `prism` started; installs the PyTorch hook in it.

The launcher puts this folder first on PYTHONPATH. The interpreter imports one `sitecustomize` only, so the one it would
have found without us is run as well.
"""

# ruff: noqa: PTH100, PTH118, PTH120 - pathlib would be imported into every child just for this

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _other_sitecustomize() -> ModuleSpec | None:
    path = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    return PathFinder.find_spec("sitecustomize", path)


def _run_other_sitecustomize() -> None:
    spec = _other_sitecustomize()
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _install_hook() -> None:
    """Runs the hook from its file: the program's interpreter need not have `prism_core` installed."""
    from importlib.util import module_from_spec, spec_from_file_location

    location = os.path.join(os.path.dirname(_HERE), "torch", "hook.py")
    spec = spec_from_file_location("_prism_torch_hook", location)
    if spec is None or spec.loader is None:
        sys.stderr.write(f"prism: the PyTorch hook is missing: {location}\n")
        return
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.install()


if os.environ.get("PRISM_SESSION"):
    _install_hook()
_run_other_sitecustomize()
