"""Traces that other tools recorded, as execution graphs, and what else can be learned from their files."""

from prism_core.imports.chakra import import_chakra
from prism_core.imports.kineto import import_kineto
from prism_core.imports.network import calibrate_comm
from prism_core.imports.simai import import_simai

__all__ = ["calibrate_comm", "import_chakra", "import_kineto", "import_simai"]
