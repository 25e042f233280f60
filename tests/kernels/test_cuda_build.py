"""The package says whether it holds CUDA kernels, and imports on a machine without a driver.

A build with KVPLANE_CUDA=AUTO is tried nightly: with the module where there is nvcc, else without.
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

ROOT = Path(__file__).parents[2]
_SAY = """
import kvplane_kernels
print(kvplane_kernels.has_cuda_build(), kvplane_kernels.cuda_device_count() >= 0)
"""


def test_the_installed_package_says_which_build_it_is() -> None:
    has_module = any(Path(kvplane_kernels.__file__).parent.glob("_cuda*.so"))
    assert kvplane_kernels.has_cuda_build() == has_module
    assert kvplane_kernels.cuda_device_count() >= 0
    assert has_module or kvplane_kernels.cuda_device_count() == 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_build_has_cuda_where_there_is_nvcc_and_imports_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    command += ["-w", str(tmp_path), f"--config-settings=build-dir={tmp_path / 'build'}"]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = os.environ | {"KVPLANE_CUDA": "AUTO", "PATH": path}
    built = subprocess.run(
        [*command, str(ROOT / "csrc")], env=env, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout[-4000:]
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    has_nvcc = shutil.which("nvcc") is not None
    if has_nvcc:
        spills = re.findall(r"(\d+) bytes spill stores", built.stdout + built.stderr)
        assert len(spills) > 60 and set(spills) == {"0"}
        module = next((tmp_path / "site" / "kvplane_kernels").glob("_cuda*.so"))
        libraries = subprocess.run(["ldd", str(module)], capture_output=True, text=True, check=True)
        assert "libcuda" not in libraries.stdout
    said = subprocess.run(
        [sys.executable, "-c", _SAY],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == [str(has_nvcc), "True"]
