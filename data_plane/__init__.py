"""The memory service: pools, block tables, and the kernels that plans run on them.

``Executor`` is the data plane in the caller's process; ``EmbeddedDataPlane`` also keeps it
registered and serves it to others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_plane.execution.executor import Executor
    from data_plane.execution.fixed_step import FixedStep
    from data_plane.execution.plan_runner import StartedPlan
    from data_plane.plans.batches.fixed_rows import StepBounds
    from data_plane.server.config import DataPlaneSettings
    from data_plane.server.embedded import EmbeddedDataPlane

__all__ = [
    "DataPlaneSettings",
    "EmbeddedDataPlane",
    "Executor",
    "FixedStep",
    "StartedPlan",
    "StepBounds",
]

# Imported when first used, so that the executor alone does not import gRPC, and the program can
# report a package that is not installed.
_HOMES = {
    "Executor": "data_plane.execution.executor",
    "FixedStep": "data_plane.execution.fixed_step",
    "StepBounds": "data_plane.plans.batches.fixed_rows",
    "StartedPlan": "data_plane.execution.plan_runner",
    "DataPlaneSettings": "data_plane.server.config",
    "EmbeddedDataPlane": "data_plane.server.embedded",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'data_plane' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
