"""Programs for a GPU, run in processes of their own on the simulated one of tests/gpu_sim."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final
from unittest import SkipTest

import torch

from tests.helpers.programs import called

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = (
    "tests/gpu_sim",
    ".",
    "tests/kernels",
)
# The project's settings of pytest need plugins that the child does not load.
PYTEST: Final = (
    *("pytest", "-q", "-c", os.devnull, "--rootdir", "."),
    *("-p", "no:cacheprovider", "-W", "ignore"),
)


def run_on_simulated_gpu(
    *words: str, out: Path, root: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m words`` in the tree ``root``; ``out`` is the folder for what it saves."""
    if torch.version.cuda is not None:
        raise SkipTest("the simulated GPU is for torch's CPU build")
    env = {
        "KVPLANE_SIMULATED_GPU": "1",
        "KVPLANE_DEVICE_BACKEND": "cuda",
        "PYTHONPATH": os.pathsep.join(str(root / folder) for folder in FOLDERS),
        "OUT": str(out),
    }
    done = called(sys.executable, "-m", *words, cwd=root, env=env)
    assert "Error in sitecustomize" not in done.stderr, done.stderr[-4000:]  # it ran without it
    return done
