"""The emulator runs sound kernels right, and lets no faulty one pass, whatever the seed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from emulated_build import EMULATOR, ROOT, build

SEEDS = range(4)
WATCH_RACES = ("-DKVPLANE_WATCH_RACES",)
RACE_FOUND = 66  # ThreadSanitizer's exit code

SOUND = ("exchange", "copies", "sums", "products")
# Case: what the emulator says of it.
FAULTY = {
    "missing_barrier": "wrong answer",
    "write_after_read": "wrong answer",
    "early_read_of_a_copy": "wrong answer",
    "copy_not_waited_for": "wrong answer",
    "copies_of_others_not_waited_for": "wrong answer",
    "wrong_lane": "wrong answer",
    "divergent_shuffle": "divergence: thread",
    "mask_without_the_caller": "mask",
    "shuffle_with_a_lane_that_is_gone": "divergence: thread",
    "barrier_in_a_branch": "in __syncthreads at emulator_cases.cpp",
    "two_barriers": "is in the one at emulator_cases.cpp",
    "barrier_against_warp_barrier": "divergence: thread",
    "unwritten_shared_memory": "wrong answer",
    "odd_copies": "not aligned at emulator_cases.cpp",
}


def program(flags: tuple[str, ...] = (), watched: tuple[str, ...] = ()) -> Path:
    cases = Path(__file__).parent / "emulator_cases.cpp"
    sources = (cases, EMULATOR / "emulator.cpp", EMULATOR / "fiber.cpp")
    return build(ROOT / "csrc", sources, flags=flags, watched=watched)


def run_case(path: Path, case: str, seed: int) -> subprocess.CompletedProcess[str]:
    command = [str(path), case, str(seed)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("case", SOUND)
def test_a_sound_kernel_gives_the_right_answer(case: str) -> None:
    path = program()
    for seed in SEEDS:
        result = run_case(path, case, seed)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("case", FAULTY)
def test_a_faulty_kernel_fails(case: str) -> None:
    path = program()
    for seed in SEEDS:
        result = run_case(path, case, seed)
        assert result.returncode == 1, f"seed {seed}: {result.returncode} {result.stderr}"
        assert FAULTY[case] in result.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("case", SOUND)
def test_no_race_is_seen_in_a_sound_kernel(case: str) -> None:
    path = program(WATCH_RACES, ("-fsanitize=thread",))
    result = run_case(path, case, 0)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("case", ("missing_barrier", "write_after_read", "shuffle_as_barrier"))
def test_a_race_is_seen_whatever_the_answer(case: str) -> None:
    path = program(WATCH_RACES, ("-fsanitize=thread",))
    result = run_case(path, case, 0)
    assert result.returncode in (1, RACE_FOUND) and "data race" in result.stderr, result.stdout
