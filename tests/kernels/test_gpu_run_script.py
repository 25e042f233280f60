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
# In place of a machine with a GPU: an interpreter whose tests fail, a sanitizer that finds a race,
# a profiler that may not read counters.
_PYTHON = """#!/bin/sh
echo "python $*" >>"$CALLS"
case "$*" in
  *"-m pytest"*) seq 200; seq 50 | sed "s/^/FAILED test_x - wrong /"; echo "3 failed"; exit 1 ;;
  *--survey*) seq 90 | sed "s/^/survey: /" ;;
  *"profile metrics"*) echo "dram,issue" ;;
  *"profile kernel"*) echo "attend_short" ;;
  *"profile say"*) echo "profile: attend_short: dram % 80" ;;
  *gpu.step*) seq 90; echo "a captured step: the same bits as by layers" ;;
  *gpu.measure*) seq 90 | sed "s/^/estimate: by /"
    seq 400; seq 90 | sed "s/^/WRONG /"; seq 90 | sed "s/^/MISSED  /"
    seq 6 | sed "s/^/missed: /"; echo "met: copies (1 of 1 cases)"; echo "wrong results: 90" ;;
esac
"""
_SANITIZER = """#!/bin/sh
echo "sanitizer $*" >>"$CALLS"
case "$*" in
  *racecheck*) seq 9 | sed "s/^.*/========= Error: Race reported in kvplane::cuda/"; exit 86 ;;
esac
"""
_NCU = """#!/bin/sh
echo "ncu $*" >>"$CALLS"
case "$*" in *speculative*) echo "no permission"; exit 1 ;; esac
"""
PARTS = ("steps", "profile", "conform", "measure")


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


@pytest.fixture
def pretended(tmp_path: Path) -> dict[str, str]:
    """The environment of such a machine."""
    python = pretend(tmp_path / "bin" / "python", _PYTHON)
    pretend(tmp_path / "bin" / "compute-sanitizer", _SANITIZER)
    pretend(tmp_path / "bin" / "ncu", _NCU)
    path = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    return {"PYTHON": str(python), "PATH": path, "CALLS": str(tmp_path / "calls")}


def part_of(call: str) -> str:
    """The part of the run that makes a call, or none."""
    if any(word in call for word in ("test_cuda_steps", "gpu.step", "sanitizer", "--tiny")):
        return "steps"
    if "--survey" in call or call.startswith("ncu") or "gpu.profile" in call:
        return "profile"
    if "-m pytest" in call:
        return "conform"
    return "measure" if "--seconds" in call else ""


def test_a_part_that_fails_does_not_stop_the_others_and_the_run_fails(
    tmp_path: Path, pretended: dict[str, str]
) -> None:
    done = run_script(tmp_path, **pretended)
    assert done.returncode == 1
    said = done.stderr
    assert "memcheck found nothing" in said and "racecheck found errors" in said
    assert "ncu could not profile speculative" in said and "dram % 80" in said
    assert "FAILED: steps; conform; see" in said
    called = (tmp_path / "calls").read_text().splitlines()
    assert [*dict.fromkeys(filter(None, map(part_of, called)))] == [*PARTS]
    cases = next(call for call in called if part_of(call) == "conform")
    assert "tests/kernels/test_cuda_attention.py" in cases and "on_gpu_swaps.py" in cases
    assert "test_cuda_build.py" not in cases and "-v --maxfail" in cases
    assert any("--seconds 280" in call for call in called)
    for tool in ("memcheck", "racecheck"):
        call = next(call for call in called if f"--tool {tool}" in call)
        assert "--kernel-name kns=kvplane" in call and call.endswith("--tiny")


def test_what_is_printed_fits_on_a_screen_and_the_rest_is_kept(
    tmp_path: Path, pretended: dict[str, str]
) -> None:
    done = run_script(tmp_path, **pretended)
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) <= 60
    assert "FAILED test_x - wrong 1" in lines and "3 failed" in lines
    assert "survey: 90" in lines and "MISSED  1" in lines
    assert "estimate: by 1" in lines and "estimate: by 2" not in lines
    assert "met: copies (1 of 1 cases)" in lines
    assert "a captured step: the same bits as by layers" in lines
    for log in ("steps", "step", "survey", "conformance", "measure", "estimates"):
        assert len((tmp_path / "out" / f"{log}.log").read_text().splitlines()) >= 90


@pytest.mark.parametrize("part", PARTS)
def test_one_part_runs_alone_and_without_building(
    part: str, tmp_path: Path, pretended: dict[str, str]
) -> None:
    run_script(tmp_path, "--no-build", "--only", part, **pretended)
    called = (tmp_path / "calls").read_text().splitlines()
    assert {*filter(None, map(part_of, called))} == {part}
    assert not any("pip install" in call for call in called)


def test_a_part_is_interrupted_when_its_time_is_over(
    tmp_path: Path, pretended: dict[str, str]
) -> None:
    waits = """#!/bin/sh
case "$*" in *"-m pytest"*) exec "$REAL" -c "
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print('1 passed so far')
" ;; esac
"""
    pretend(Path(pretended["PYTHON"]), waits)
    script = SCRIPT.read_text().replace("CONFORM_S=200", "CONFORM_S=1")
    copy = tmp_path / "copy" / "benchmarks" / "gpu" / "run.sh"
    copy.parent.mkdir(parents=True)
    pretend(copy, script)
    env = os.environ | pretended | {"REAL": sys.executable, "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        [str(copy), "--no-build", "--only", "conform"],
        env=env | {"BUILD": str(tmp_path / "build")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "1 passed so far" in done.stderr


def test_a_quick_run_is_without_profile_and_sanitizers(
    tmp_path: Path, pretended: dict[str, str]
) -> None:
    pretend(Path(pretended["PYTHON"]), _PYTHON.replace("exit 1", "exit 0"))
    done = run_script(tmp_path, "--quick", **pretended)
    assert done.returncode == 0, done.stderr
    called = (tmp_path / "calls").read_text()
    assert "all passed" in done.stderr and "sanitizer" not in called and "ncu" not in called
    assert "--quick" in called


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    named = list(preflight.missing_for_build())
    assert "nvcc on the PATH" in named and "g++ on the PATH" in named


def test_packages_that_are_missing_or_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "5.29.1")
    assert "the package protobuf>=6.31: here is 5.29.1" in preflight.missing_for_run()
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    assert "the package torch" in preflight.missing_for_run()
    assert "the package pybind11>=2.13" in preflight.missing_for_build()


def test_versions_are_compared_by_their_numbers() -> None:
    assert preflight.numbers("2.11.0+cu130") == (2, 11, 0) > preflight.numbers("2.9")
    assert preflight.numbers("") == ()


def test_the_run_imports_nothing_that_is_not_asked_for() -> None:
    folders = (
        ROOT,
        ROOT / "tests" / "kernels",
    )
    cases = [*folders[1].glob("test_cuda_*.py"), *folders[1].glob("on_gpu*.py")]
    names = [path.stem for path in cases if path.stem != "test_cuda_build"]
    assert {"on_gpu", "on_gpu_swaps", "test_cuda_attention"} <= set(names)
    measurements = ("benchmarks.gpu.measure", "benchmarks.gpu.step", "benchmarks.gpu.table")
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
