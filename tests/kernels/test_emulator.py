"""The emulator says what is wrong with a kernel that misuses barriers, shuffles or copies, whatever
the seed. What a wrong answer or a race shows is planted in the real kernels:
``tests/mutants/faults/emulator.txt``.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from emulated_build import EMULATOR, ROOT, build

SEEDS = range(4)
# Case: what the emulator says of it, if anything.
CASES = {
    "sums": "",
    "mask_without_the_caller": "mask",
    "shuffle_with_a_lane_that_is_gone": "divergence: thread",
    "barrier_in_a_branch": "in __syncthreads at emulator_cases.cpp",
    "two_barriers": "is in the one at emulator_cases.cpp",
    "barrier_against_warp_barrier": "divergence: thread",
    "unwritten_shared_memory": "wrong answer",
    "odd_copies": "not aligned at emulator_cases.cpp",
}


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_is_judged(case: str) -> None:
    cases = Path(__file__).parent / "emulator_cases.cpp"
    sources = (cases, EMULATOR / "emulator.cpp", EMULATOR / "fiber.cpp")
    program = build(ROOT / "csrc", sources)
    for seed in SEEDS:
        command = [str(program), case, str(seed)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert result.returncode == bool(CASES[case]), f"seed {seed}: {result.stderr}"
        assert CASES[case] in result.stdout
