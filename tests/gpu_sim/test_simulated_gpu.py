"""Programs and tests for a GPU pass on a simulated one.

Each runs in a process of its own, because the simulation changes torch. Tests whose work must take
time, such as those of a stream that runs late, are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.gpu_programs import PYTEST, run_on_simulated_gpu

NEED_TIME = "not run_ahead and not go_on_beside"
PROGRAMS = {
    "what a GPU refuses": (*PYTEST, "tests/gpu_sim/on_gpu_refusals.py"),
    "a plane cache": (*PYTEST, "tests/gpu_sim/on_gpu_plane_cache.py"),
    "what finds a prefix": (*PYTEST, "tests/gpu_sim/on_gpu_model_states.py"),
    "captured steps": (*PYTEST, "tests/kernels/on_gpu_steps.py"),
    "swaps": (*PYTEST, "tests/kernels/on_gpu_swaps.py"),
    "the data plane": (*PYTEST, "tests/kernels/on_gpu_data_plane.py", "-k", NEED_TIME),
}
NIGHTLY = {
    "every kernel": ("benchmarks.gpu.smoke", "--tiny", "check", "race"),
    "every kernel's time": ("benchmarks.gpu.measure", "--tiny"),
    "a model": ("benchmarks.gpu.try_model",),
    "captured steps of a model": ("benchmarks.gpu.model_steps", "--tiny", "--batches", "1,3"),
    "a graph": (*PYTEST, "tests/kernels/on_gpu.py"),
    "shared plans": (*PYTEST, "tests/kernels/test_cuda_plans.py"),
    "splits": (*PYTEST, "tests/kernels/test_cuda_splits.py"),
    "far blocks": (*PYTEST, "tests/kernels/test_cuda_huge_pools.py"),
}


def check(words: tuple[str, ...], out: Path) -> None:
    done = run_on_simulated_gpu(*words, out=out)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_passes_on_a_simulated_gpu(name: str, tmp_path: Path) -> None:
    check(PROGRAMS[name], tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NIGHTLY)
def test_it_passes_there_at_night(name: str, tmp_path: Path) -> None:
    check(NIGHTLY[name], tmp_path)
