"""Torch's threads. Without torch, so that it can be called before torch is imported."""

from __future__ import annotations

import os
from typing import Final

# Turns of GNU OpenMP's waiting loop, some 50 µs, as long as the threads of our own kernels wait.
# By default torch's threads wait for about a millisecond: beside them our kernels' threads find no
# core, and on a busy machine a step takes many times as long. Without any, each of a model's many
# small operations would wake them again.
_SPIN: Final = "5000"
_VARIABLES: Final = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def tune_torch() -> None:
    """Choose how long torch's threads wait for work before they sleep, unless the environment does.
    Works before torch is imported.
    """
    if not any(name in os.environ for name in _VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = _SPIN


def waiting() -> str:
    """How torch's threads wait, for the log: ``NAME=value`` of what the environment says."""
    said = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    return " ".join(said) or "GOMP_SPINCOUNT=default"
