"""The service of bytes: pools, resident block tables, and the kernels that plans run on them.

``Executor`` is the data plane in the caller's process.
"""

from __future__ import annotations

from data_plane.executor import Executor, ExecutorReport, StartedPlan
from data_plane.shard import Shard

__all__ = ["Executor", "ExecutorReport", "Shard", "StartedPlan"]
