"""Traces that other tools recorded, as execution graphs."""

from prism_core.imports.kineto import import_kineto

__all__ = ["import_kineto"]
