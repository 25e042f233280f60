"""Faults planted in how a tile of 8-bit numbers is searched for NaN are found by their bits.

Each is a build of the CPU's module.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.source_faults import ROOT, copy_csrc, plant
from tests.helpers.warm_pytest import TESTS_FAILED, run_pytest

FILE = Path("cpu", "row_ops", "row_ops_stored.h")
TESTS = ("tests/kernels/test_fp8_attention.py", "-k", "test_a_nan_in_a_tile")

# Name: the text in FILE, and what takes its place.
MUTANTS = {
    "codes_of_an_odd_last_unit_not_searched": ("codes.add(last);", ""),
    "codes_of_two_units_not_searched": (
        "codes.add(load_as<ByteVector>(rows[t] + u * kUnitBytes));",
        "",
    ),
}


def installed(source: Path, site: Path) -> None:
    """Build the kernels of a folder, without CUDA, into ``site``."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(site)]
    command += [f"--config-settings=build-dir={source / 'build'}", str(source)]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    subprocess.run(command, env=os.environ | {"PATH": path, "KVPLANE_CUDA": "OFF"}, check=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["sound", *MUTANTS])
def test_a_planted_fault_is_found_and_sound_kernels_pass(name: str, tmp_path: Path) -> None:
    source, site = copy_csrc(tmp_path), tmp_path / "site"
    if name in MUTANTS:
        plant(source / FILE, *MUTANTS[name])
    installed(source, site)
    done = run_pytest(*TESTS, cwd=ROOT, env={"PYTHONPATH": str(site)})
    assert done.returncode == (TESTS_FAILED if name in MUTANTS else 0), done.stdout
    assert (" failed" in done.stdout) == (name in MUTANTS), done.stdout
