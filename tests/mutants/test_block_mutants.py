"""The native core's tests fail when a fault is planted in the core. Each is a build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.native.native_programs import SOURCES, cmake
from tests.helpers.patched_faults import load
from tests.helpers.warm_pytest import TESTS_FAILED, run_pytest

ROOT = Path(__file__).parents[2]
TESTS = [f"tests/unit/blocks/test_native_{name}.py" for name in (
    "admit", "families", "growth", "tokens", "tiers", "aborts", "input", "plain", "walk",
)]  # fmt: skip
TESTS[:0] = [
    "tests/unit/blocks/test_forgetting.py",
    "tests/unit/blocks/test_touched.py",
]
TESTS[:0] = ["tests/unit/blocks/test_announcing.py", "tests/unit/blocks/test_rebuilding.py"]
pytestmark = pytest.mark.timeout(600)
GROUP_TESTS = {
    "both planes": "tests/unit/planning/test_groups_walk.py",
    "core": "tests/unit/blocks/test_native_walk.py::test_walks_of_several_groups",
}


MUTANTS = load("mutants/blocks/block_mutants.py")


class Build:
    """A copy of csrc/blocks, of which only what changes is compiled."""

    def __init__(self, folder: Path) -> None:
        self.sources, self.build = folder / "blocks", folder / "build"
        shutil.copytree(SOURCES, self.sources, ignore=shutil.ignore_patterns("build"))
        lists = self.sources / "CMakeLists.txt"  # compiled soon rather than well
        lists.write_text(lists.read_text().replace("-O3", "-O0"))
        flags = subprocess.run(
            [sys.executable, "-m", "pybind11", "--cmakedir"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        done = cmake(
            *("-S", str(self.sources), "-B", str(self.build), "-G", "Ninja"),
            *("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF"),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={flags.stdout.strip()}",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.make()

    def make(self) -> None:
        made = cmake("--build", str(self.build))
        assert made.returncode == 0, made.stdout + made.stderr

    def module_with(self, name: str, folder: Path) -> Path:
        """A folder with the package kvplane_blocks that has the fault."""
        mutant = (MUTANTS.FAULTS | MUTANTS.GROUPED)[name]
        path = self.sources / mutant.file
        sound = path.read_text()
        assert sound.count(mutant.old) == 1, f"{mutant.file}: {sound.count(mutant.old)} times"
        path.write_text(sound.replace(mutant.old, mutant.new))
        try:
            self.make()
        finally:
            path.write_text(sound)
        package = folder / "kvplane_blocks"
        package.mkdir()
        files = [*self.sources.glob("kvplane_blocks/*.py"), *self.build.glob("_native*.so")]
        assert len(files) > 1
        for file in files:
            shutil.copy(file, package)
        return folder


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return Build(tmp_path_factory.mktemp("mutants"))


def assert_caught(build: Build, name: str, folder: Path, tests: list[str] = TESTS) -> None:
    path = os.pathsep.join((str(build.module_with(name, folder)), str(ROOT)))
    done = run_pytest("-m", "not nightly", *tests, cwd=ROOT, env={"PYTHONPATH": path})
    crashed = done.returncode < 0
    assert crashed or done.returncode == TESTS_FAILED, done.stdout
    assert crashed or "1 failed" in done.stdout


@pytest.mark.parametrize("name", MUTANTS.FAULTS)
def test_a_planted_fault_is_caught(build: Build, name: str, tmp_path: Path) -> None:
    assert_caught(build, name, tmp_path)


@pytest.mark.parametrize(
    ("walk", "name"),
    [("both planes", name) for name in MUTANTS.GROUPED]
    + [("core", name) for name in MUTANTS.GROUPED if "an_abort" not in name],  # too rare in it
)
def test_a_fault_between_layer_groups_is_caught(
    build: Build, walk: str, name: str, tmp_path: Path
) -> None:
    assert_caught(build, name, tmp_path, [GROUP_TESTS[walk]])
