"""Which instruction set is used. ``test_oracle_bits.py`` says where the choice changes a bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvplane_kernels as native
import pytest

NAMES = ("avx512bf16", "avx512", "avx2", "baseline")
NAMES_OF_INTEL = ("avx512", "avx512bf16", "avx2", "baseline")
PRINT_ISA = "import kvplane_kernels; print(kvplane_kernels.cpu_isa())"


def isa_of_a_process(wanted: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"KVPLANE_KERNELS_ISA": wanted}
    command = [sys.executable, "-c", PRINT_ISA]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def isa_restored() -> Iterator[None]:
    before = native.cpu_isa()
    yield
    native.use_cpu_isa(before)


def test_the_best_set_of_the_machine_comes_first() -> None:
    sets = native.cpu_isas()
    names = NAMES_OF_INTEL if "GenuineIntel" in Path("/proc/cpuinfo").read_text() else NAMES
    assert sets == [name for name in names if name in sets]
    assert sets[-1] == "baseline"
    assert isa_of_a_process("").stdout.strip() == sets[0]


def test_the_environment_picks_a_set() -> None:
    for isa in native.cpu_isas():
        assert isa_of_a_process(isa).stdout.strip() == isa


def test_a_set_that_the_machine_does_not_have_is_refused() -> None:
    result = isa_of_a_process("sse9")
    assert result.returncode == 1
    assert "KVPLANE_KERNELS_ISA must be one of" in result.stderr.splitlines()[-1]
    before = native.cpu_isa()
    with pytest.raises(ValueError, match=r"isa must be one of .*baseline, is sse9"):
        native.use_cpu_isa("sse9")
    assert native.cpu_isa() == before
