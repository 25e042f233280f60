"""Programs and tests for a GPU pass on a simulated one.

The simulation changes torch, so they run in processes of their own: all tests in one. Tests whose
work must take time, such as those of a stream that runs late, are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.gpu_programs import PYTEST, run_on_simulated_gpu

TESTS = (
    *(f"tests/gpu_sim/on_gpu_{name}.py" for name in ("refusals", "plane_cache", "engine", "llm")),
    *(f"tests/kernels/on_gpu_{name}.py" for name in ("steps", "swaps", "data_plane")),
    "-k",
)
TAKES_TIME = "not run_ahead and not go_on_beside"
# On push one seed of each walk, and half of the ways to generate: the emulator is slow.
ONCE = "not -1] and not -2] and not [1- and not [2- and not sampling and not assisted"
# Nor other processes, and one way each of the engine's.
FEW = "not same_gpu and not only_gpu and not graphless and not one_by_one"
ON_PUSH = f"{TAKES_TIME} and {ONCE} and {FEW} and not conversation"
KERNELS = ("on_gpu", "test_cuda_plans", "test_cuda_splits", "test_oracle_blocks")
NIGHTLY = {
    "all tests for a GPU": (*PYTEST, *TESTS, TAKES_TIME),
    "every kernel": ("tests.kernels.on_gpu_smoke", "--tiny", "check", "race"),
    "every kernel's time": ("benchmarks.gpu.measure", "--tiny"),
    "a model": ("tests.kernels.on_gpu_model",),
    "captured steps of a model": ("benchmarks.gpu.model_steps", "--tiny", "--batches", "1,3"),
    "states of models": (*PYTEST, "tests/gpu_sim/on_gpu_model_states.py"),
    "the kernels' tests": (*PYTEST, *(f"tests/kernels/{name}.py" for name in KERNELS)),
}


def check(words: tuple[str, ...], out: Path) -> None:
    done = run_on_simulated_gpu(*words, out=out)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.nightly  # three minutes; kernels are emulated on push too
@pytest.mark.timeout(900)
def test_tests_for_a_gpu_pass_on_a_simulated_one(tmp_path: Path) -> None:
    check((*PYTEST, *TESTS, ON_PUSH), tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NIGHTLY)
def test_it_passes_there_at_night(name: str, tmp_path: Path) -> None:
    check(NIGHTLY[name], tmp_path)
