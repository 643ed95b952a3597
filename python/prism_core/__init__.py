"""Run any rank of a large training job on a few GPUs, or on none: collect its graph, replay it, emulate ranks in it."""

from prism_core import collectives, synthetic
from prism_core._native import Graph
from prism_core.collect import collect_program as collect
from prism_core.collect import tool_version
from prism_core.diagnose import diagnose
from prism_core.emulate import emulate_program as emulate
from prism_core.errors import (
    ConfigError,
    DeadlockError,
    DeviceMemoryError,
    GraphFormatError,
    MismatchError,
    PrismError,
    RankFailedError,
    RoleError,
    SessionError,
    ShimError,
    TorchMissingError,
    UnknownValueError,
)
from prism_core.export import export
from prism_core.page import write_report
from prism_core.replay import ReplayResult, inspect, replay
from prism_core.sweep import sweep

__version__ = tool_version()

__all__ = [
    "ConfigError",
    "DeadlockError",
    "DeviceMemoryError",
    "Graph",
    "GraphFormatError",
    "MismatchError",
    "PrismError",
    "RankFailedError",
    "ReplayResult",
    "RoleError",
    "SessionError",
    "ShimError",
    "TorchMissingError",
    "UnknownValueError",
    "__version__",
    "collect",
    "collectives",
    "diagnose",
    "emulate",
    "export",
    "inspect",
    "replay",
    "sweep",
    "synthetic",
    "write_report",
]
