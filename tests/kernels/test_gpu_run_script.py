"""benchmarks/gpu/run.sh names what is missing before it builds, and needs nothing else.

That it builds is seen nightly, by --build-only, where there is nvcc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.gpu import preflight

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "run.sh"
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
# In place of a machine with a GPU: an interpreter whose tests fail, a sanitizer that finds a race.
_PYTHON = """#!/bin/sh
echo "python $*" >>"$CALLS"
case "$*" in *"-m pytest"*) echo "3 failed"; exit 1 ;; *gpu.measure*) echo "measured" ;; esac
"""
_SANITIZER = """#!/bin/sh
echo "sanitizer $*" >>"$CALLS"
case "$*" in
  *racecheck*) echo "========= Error: Race reported in kvplane::cuda"; exit 86 ;;
  *synccheck*) echo "========= Error: Barrier error in at::native"; exit 86 ;;
  *initcheck*) echo "Device not supported"; exit 1 ;;
esac
"""


def run_script(tmp_path: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "PYTHON": sys.executable,
        "BUILD": str(tmp_path / "build"),
        "OUT": str(tmp_path / "out"),
        "CUDA_VISIBLE_DEVICES": "",  # A GPU that is there must not be seen.
    }
    return subprocess.run(
        [str(SCRIPT), *words], env=env | more, capture_output=True, text=True, check=False
    )


def test_without_a_gpu_the_run_says_so_and_builds_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode == 2, done.stderr
    assert "gpu: missing: a GPU that torch can use" in done.stderr
    assert "building" not in done.stderr
    assert not list((tmp_path / "build" / "site").iterdir()) and not (tmp_path / "out").exists()


def test_an_unknown_word_gets_the_usage_and_nothing_else(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--fast")
    assert done.returncode == 2
    assert "--quick" in done.stdout and "KVPLANE_WHEELS" in done.stdout
    assert not (tmp_path / "build").exists()


def pretend(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_part_that_fails_does_not_stop_the_others_and_the_run_fails(tmp_path: Path) -> None:
    python = pretend(tmp_path / "bin" / "python", _PYTHON)
    pretend(tmp_path / "bin" / "compute-sanitizer", _SANITIZER)
    path = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    calls = tmp_path / "calls"
    done = run_script(tmp_path, PYTHON=str(python), PATH=path, CALLS=str(calls))
    assert done.returncode == 1
    assert done.stdout == "measured\n"
    said = done.stderr
    assert "3 failed" in said
    assert "memcheck found nothing" in said and "racecheck found errors" in said
    assert "synccheck reported nothing about our kernels" in said and "cannot use this GPU" in said
    assert "FAILED: conformance cases; compute-sanitizer;" in said
    called = calls.read_text()
    assert "tests/kernels/test_cuda_attention.py" in called
    assert "test_cuda_build.py" not in called and "tests/kernels/on_gpu.py" in called
    assert "--seconds 280" in called and "CMAKE_CUDA_ARCHITECTURES=native" in called
    for tool, is_limited in (("memcheck", True), ("initcheck", False)):
        line = next(line for line in called.splitlines() if f"--tool {tool}" in line)
        assert ("--kernel-name kns=kvplane" in line) == is_limited and line.endswith("--tiny")


def test_a_quick_run_is_without_sanitizers(tmp_path: Path) -> None:
    python = pretend(tmp_path / "bin" / "python", _PYTHON.replace("exit 1", "exit 0"))
    done = run_script(tmp_path, "--quick", PYTHON=str(python), CALLS=str(tmp_path / "calls"))
    assert done.returncode == 0, done.stderr
    assert "all passed" in done.stderr and "sanitizer" not in done.stderr
    assert "--quick" in (tmp_path / "calls").read_text()


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    named = list(preflight.missing_for_build())
    assert "nvcc on the PATH" in named and "g++ on the PATH" in named


def test_packages_that_are_missing_or_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "7.4.1")
    assert "the package protobuf>=7.35.1: here is 7.4.1" in preflight.missing_for_run()
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    assert "the package torch" in preflight.missing_for_run()
    assert "the package pybind11>=2.13" in preflight.missing_for_build()


def test_versions_are_compared_by_their_numbers() -> None:
    assert preflight.numbers("2.11.0+cu130") == (2, 11, 0) > preflight.numbers("2.9")
    assert preflight.numbers("") == ()


def test_the_run_imports_nothing_that_is_not_asked_for() -> None:
    folders = (ROOT, ROOT / "tests" / "kernels", ROOT / "tests" / "helpers")
    cases = [*folders[1].glob("test_cuda_*.py"), *folders[1].glob("on_gpu*.py")]
    names = [path.stem for path in cases if path.stem != "test_cuda_build"]
    assert {"on_gpu", "on_gpu_swaps", "test_cuda_attention"} <= set(names)
    measurements = ("benchmarks.gpu.measure", "benchmarks.gpu.table")
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, str(ROOT), *measurements, *names],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "google.protobuf" in preflight.RUN_PACKAGES
    assert set(done.stdout.split()) <= {"google", "kvplane_kernels"}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_module_builds_with_no_index_where_there_is_nvcc(tmp_path: Path) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = run_script(tmp_path, "--build-only", PATH=path, KVPLANE_ARCH="90-real")
    if shutil.which("nvcc") is None:
        assert done.returncode == 2 and "missing: nvcc" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "gpu: built" in done.stderr and "GPUs: 0" in done.stderr
    assert list((tmp_path / "build" / "site" / "kvplane_kernels").glob("_cuda*.so"))
