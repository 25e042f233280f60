"""Tunes torch's threads. It works before torch is imported, and does not import it."""

from __future__ import annotations

import os
from typing import Final

# Spins of GNU OpenMP's waiting loop, some 50 µs: as long as our own kernels' threads wait.
_SPIN: Final = "5000"
_VARIABLES: Final = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def tune_torch(num_threads: int, *, is_embedded: bool) -> None:
    """Choose how long torch's ``num_threads`` threads (0: one for each CPU) poll for work before
    they sleep, unless the environment does. Works before torch is imported.

    By default they poll for milliseconds, which is right for an engine that runs alone: waking them
    takes longer than a layer's attention (``is_embedded``), and where each thread of torch and each
    of our own kernels can have a CPU. Where a data plane beside the engine needs a CPU, polling
    threads would keep it from working.
    """
    num_cpus = len(os.sched_getaffinity(0))
    num_both = 2 * (num_threads or num_cpus) - 1  # the calling thread works in both
    is_crowded = num_both > num_cpus and not is_embedded
    if is_crowded and not any(name in os.environ for name in _VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = _SPIN


def waiting() -> str:
    """Return how torch's threads wait, for the log: ``NAME=value`` from the environment."""
    said = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    return " ".join(said) or "GOMP_SPINCOUNT=default"
