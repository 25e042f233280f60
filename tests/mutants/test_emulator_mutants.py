"""Faults planted in the CUDA kernels are found by the emulator, and sound kernels pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.source_faults import ROOT, copy_csrc, plant

HERE = Path(__file__).parent / "emulator"
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "kernels")]

from emulated_build import build, kernel_sources  # noqa: E402
from emulator_mutants import ASAN, MUTANTS, PLAIN, TSAN, UBSAN  # noqa: E402

SEEDS = range(4)
SANITIZER_FOUND_IT = {ASAN: (1, 99), UBSAN: (1,), TSAN: (66,)}
FOUND = {PLAIN: "", ASAN: "AddressSanitizer", UBSAN: "misaligned", TSAN: "data race"}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=99",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
BUILDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    PLAIN: ((), ()),
    # Both at once: UBSan alone does not report what AddressSanitizer stops at.
    ASAN: (("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"), ()),
    UBSAN: (("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"), ()),
    TSAN: (("-DKVPLANE_WATCH_RACES",), ("-fsanitize=thread",)),
}


def program(kind: str, csrc: Path) -> Path:
    """attention_check.cpp with the kernels of ``csrc``."""
    flags, watched = BUILDS[kind]
    return build(
        csrc, (*kernel_sources(csrc), HERE / "attention_check.cpp"), flags=flags, watched=watched
    )


def check(path: Path, seed: int) -> subprocess.CompletedProcess[str]:
    command = [str(path), str(seed)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=ENVIRONMENT
    )


@pytest.mark.timeout(300)
def test_sound_kernels_pass() -> None:
    path = program(PLAIN, ROOT / "csrc")
    for seed in SEEDS:
        result = check(path, seed)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", (ASAN, TSAN))
def test_the_sanitizers_have_nothing_to_say_of_sound_kernels(kind: str) -> None:
    path = program(kind, ROOT / "csrc")
    for seed in SEEDS:
        result = check(path, seed)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    mutant, csrc = MUTANTS[name], copy_csrc(tmp_path)
    plant(csrc / "cuda" / mutant.file, mutant.old, mutant.new)
    path = program(mutant.found_by, csrc)
    results = [check(path, seed) for seed in SEEDS]
    said = "\n".join(result.stdout + result.stderr for result in results)
    wanted = SANITIZER_FOUND_IT.get(mutant.found_by, (1,))
    assert any(result.returncode in wanted for result in results), said
    assert FOUND[mutant.found_by] in said
