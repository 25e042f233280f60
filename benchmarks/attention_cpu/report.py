"""The machine that was measured, and the figures as JSON."""

from __future__ import annotations

import os
import platform

import torch

from benchmarks.common.calls import Calls
from benchmarks.common.cpu import cpu_name
from benchmarks.common.memory import EVICTING_CACHES, last_level_cache_bytes
from data_plane.kernels.backends.cpu import cpu_isa


def machine(num_threads: int, num_passes: int) -> dict[str, object]:
    """Return the machine and the settings of this run."""
    return {
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": num_threads,
        "runs": num_passes,
        "cache_bytes": last_level_cache_bytes(),
        "evicting_bytes": EVICTING_CACHES * last_level_cache_bytes(),
        "isa": cpu_isa(),
        "load_average": round(os.getloadavg()[0], 2),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def as_json(rows: list[Calls], described: dict[str, object]) -> dict[str, object]:
    """Return the tables' figures, for programs. ``p99``: the rate that 99 of 100 calls reach."""
    return {
        "machine": described,
        "rows": [
            {
                "name": row.name,
                "unit": row.unit,
                "p50": round(row.rate().middle, 2),
                "p50_lowest": round(row.rate().lowest, 2),
                "p50_highest": round(row.rate().highest, 2),
                "p99": round(row.quantile(0.01), 2),
                "best": round(row.quantile(1.0), 2),
                "per_cpu_s": round(row.best_rate_of_core().middle, 2),
                "num_samples": row.num_samples,
            }
            for row in rows
        ],
    }
