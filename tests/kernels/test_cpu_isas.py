"""The instruction sets: which is used, and that the choice changes no bit but where it must."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvplane_kernels as native
import pytest
import torch
from kernel_cases import FLOATS, Case, assert_same_bits, build, has_bits_of_its_own

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


@pytest.mark.parametrize("head_size", (8, 72, 128))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sets_give_the_same_bits_but_where_they_fuse_products_and_sums(
    dtype: torch.dtype, head_size: int
) -> None:
    case = Case(lens=((1, 600), (20, 70)), dtype=dtype, head_size=head_size, alibi=True)
    batch = build(case)
    native.use_cpu_isa("baseline")
    expected, expected_lse = batch.attend()
    for isa in native.cpu_isas():
        native.use_cpu_isa(isa)
        out, lse = batch.attend()
        if has_bits_of_its_own(isa, dtype, dtype, head_size):
            torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=5e-6)
        else:
            assert_same_bits(out, expected)
            assert_same_bits(lse, expected_lse)


def test_dot_products_in_bf16_are_used_where_the_machine_has_them() -> None:
    batch = build(Case(lens=((5, 600),), head_size=128, dtype=torch.bfloat16))
    answers = []
    for isa in native.cpu_isas():
        native.use_cpu_isa(isa)
        answers.append(batch.attend()[0].view(torch.int16).numpy().tobytes())
    if "avx512bf16" in native.cpu_isas():
        assert answers.count(answers[native.cpu_isas().index("avx512bf16")]) == 1
