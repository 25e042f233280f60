"""The package holds CUDA kernels where nvcc was found, says so, and imports without a driver.

Builds of either kind are tried nightly.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import kvplane_kernels
import pytest
from emulated_build import emulated_module
from pybind11 import get_cmake_dir

from tests.helpers.programs import called, printed

ROOT = Path(__file__).parents[2]
_SAY = """
import kvplane_kernels
print(kvplane_kernels.has_cuda_build(), kvplane_kernels.cuda_device_count() >= 0)
"""


# Says what it is, and does not know the architectures that csrc/cuda/CMakeLists.txt names.
OLD_NVCC = """#!/bin/sh
case "$*" in
  *--version*) echo "Cuda compilation tools, release 11.5, V11.5.119" ;;
  *90*) echo "nvcc fatal: Unsupported gpu architecture 'compute_90'" >&2; exit 1 ;;
  *) exec {nvcc} "$@" ;;
esac
"""
NVCC = shutil.which("nvcc")


def has_new_nvcc() -> bool:
    """Whether there is an nvcc that csrc/CMakeLists.txt takes."""
    if NVCC is None:
        return False
    found = re.search(r"release (\d+)\.(\d+)", printed(NVCC, "--version"))
    return found is not None and (int(found[1]), int(found[2])) >= (12, 1)


HAS_NVCC = has_new_nvcc()


def test_the_installed_package_has_cuda_where_nvcc_was_found_and_says_so() -> None:
    emulated_module()  # whose types have the same names
    has_module = any(Path(kvplane_kernels.__file__).parent.glob("_cuda*.so"))
    assert kvplane_kernels.has_cuda_build() == has_module
    assert HAS_NVCC or not has_module
    if os.environ.get("KVPLANE_CUDA") in ("AUTO", "ON"):  # else a GPU decides
        assert has_module == HAS_NVCC
    assert kvplane_kernels.cuda_device_count() >= 0
    assert has_module or kvplane_kernels.cuda_device_count() == 0


@pytest.mark.parametrize(
    ("wanted", "fails"), (("ON", True), pytest.param("AUTO", False, marks=pytest.mark.nightly))
)
def test_an_nvcc_that_is_too_old_is_left_out_or_refused_by_name(
    tmp_path: Path, wanted: str, fails: bool
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(OLD_NVCC.format(nvcc=NVCC or "false"))
    nvcc.chmod(0o755)
    path = os.pathsep.join((str(nvcc.parent), str(Path(sys.executable).parent), os.environ["PATH"]))
    command = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(tmp_path / "build")]
    command += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={get_cmake_dir()}"]
    done = called(*command, env={"PATH": path, "KVPLANE_CUDA": wanted, "CUDACXX": None})
    said = done.stdout + done.stderr
    assert "kvplane: CUDA 11.5 is older than 12.1" in said, said
    assert (done.returncode != 0) == fails, said


def built(folder: Path, **settings: str) -> tuple[Path, str]:
    """Where a build of csrc was unpacked, and its log."""
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    command += ["-w", str(folder), f"--config-settings=build-dir={folder / 'build'}"]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {"PATH": path, "KVPLANE_CUDA": None, "CUDAARCHS": None, **settings}
    done = called(*command, ROOT / "csrc", env=env)
    assert done.returncode == 0, done.stdout[-4000:]
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site", done.stdout + done.stderr


def what_it_says(site: Path) -> list[str]:
    """Of the package in ``site``: whether it has CUDA kernels, and that it counts devices."""
    return printed(sys.executable, "-c", _SAY, cwd=site, env={"PYTHONPATH": str(site)}).split()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_build_has_cuda_where_there_is_nvcc_and_spills_no_register(tmp_path: Path) -> None:
    site, log = built(tmp_path)
    assert what_it_says(site) == [str(HAS_NVCC), "True"]
    if HAS_NVCC:
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
        compiled = re.findall(r"Compiling entry function '\w+' for '(sm_\d+)'", log)
        assert {*compiled} == {"sm_80", "sm_90"} and len(spills) == len(compiled) > 250
        assert {*spills} == {("0", "0")}
        module = next((site / "kvplane_kernels").glob("_cuda*.so"))
        libraries = subprocess.run(["ldd", str(module)], capture_output=True, text=True, check=True)
        assert "libcuda" not in libraries.stdout


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_build_can_leave_cuda_out(tmp_path: Path) -> None:
    site, _ = built(tmp_path, KVPLANE_CUDA="OFF")
    assert what_it_says(site) == ["False", "True"]
