"""benchmarks/gpu/build.sh names what is missing, and builds where there is nvcc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# After torch and pytest are imported: what the measurements and the cases bring that is not ours.
_IMPORTS = """
import importlib, sys, pybind11, pytest, torch
known = {*sys.stdlib_module_names, *(name.split(".")[0] for name in sys.modules)}
for name in sys.argv[2:]:
    importlib.import_module(name)
for name, module in list(sys.modules.items()):
    path = getattr(module, "__file__", None) or sys.argv[1]
    is_ours = path.startswith(sys.argv[1]) and "site-packages" not in path
    if name.split(".")[0] not in known and not is_ours:
        print(name.split(".")[0])
"""


@pytest.mark.nightly  # a process that imports all of them
def test_cases_and_measurements_import_nothing_that_is_not_asked_for() -> None:
    folders = (ROOT, ROOT / "tests" / "kernels")
    patterns = ("test_oracle_*.py", "test_cuda_*.py", "on_gpu*.py")
    cases = [path for pattern in patterns for path in folders[1].glob(pattern)]
    names = [path.stem for path in cases if path.stem != "test_cuda_build"]
    assert {"on_gpu", "on_gpu_swaps", "test_oracle_attention"} <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, str(ROOT), "benchmarks.gpu.first", *names],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) <= {"google", "kvplane_kernels"}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_module_builds_with_no_index_where_there_is_nvcc(tmp_path: Path) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = os.environ | {"PYTHON": sys.executable, "BUILD": str(tmp_path), "PATH": path}
    done = subprocess.run(
        [str(ROOT / "benchmarks" / "gpu" / "build.sh")],
        env=env | {"KVPLANE_ARCH": "90-real", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if shutil.which("nvcc") is None:
        assert done.returncode == 2 and "missing: nvcc" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "gpu: built" in done.stderr and "GPUs: 0" in done.stderr
    assert list((tmp_path / "site" / "kvplane_kernels").glob("_cuda*.so"))
