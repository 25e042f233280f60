"""What notices faults that need a build, or a simulated device, of a tree that has them.

Each is called with a tree, and says whether it fails there and what it printed. A build that fails
is no fault that was noticed: it raises AssertionError.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.helpers.gpu_programs import PYTEST, run_on_simulated_gpu
from tests.helpers.native.native_programs import cmake
from tests.helpers.programs import printed
from tests.helpers.warm_pytest import TESTS_FAILED, run_pytest
from tests.kernels.emulated_build import build, kernel_sources

Machine = Callable[[Path], tuple[bool, str]]
"""Takes a tree; returns whether it fails there, as it must with a fault, and what it printed."""
ROOT: Final = Path(__file__).parents[2]
CHECK: Final = Path(__file__).parent / "emulator" / "attention_check.cpp"
SEEDS: Final = range(4)
ENVIRONMENT: Final = {
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=99",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
# Both at once: UBSan alone does not report what AddressSanitizer stops at.
SANITIZED: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


@dataclass(frozen=True)
class Emulated:
    """attention_check.cpp with the tree's CUDA kernels, on the emulator, with several seeds."""

    exit_codes: tuple[int, ...] = (1,)
    says: str = ""
    flags: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()

    def __call__(self, tree: Path) -> tuple[bool, str]:
        sources = (*kernel_sources(tree / "csrc"), CHECK)
        program = build(tree / "csrc", sources, flags=self.flags, watched=self.watched)
        results = [
            subprocess.run(
                [str(program), str(seed)],
                capture_output=True, text=True, check=False, timeout=300, env=ENVIRONMENT,
            )
            for seed in SEEDS
        ]  # fmt: skip
        said = "\n".join(result.stdout + result.stderr for result in results)
        fails = any(result.returncode in self.exit_codes for result in results)
        return fails and self.says in said, said


PLAIN: Final = Emulated()
ASAN: Final = Emulated((1, 99), "AddressSanitizer", SANITIZED)
UBSAN: Final = Emulated((1,), "misaligned", SANITIZED)
TSAN: Final = Emulated((66,), "data race", ("-DKVPLANE_WATCH_RACES",), ("-fsanitize=thread",))


@dataclass(frozen=True)
class ThreadPoolCallers:
    """Many callers of the CPU kernels' thread pool on few CPUs, under ThreadSanitizer.

    A busy machine may not come to what a fault needs in one run.
    """

    num_runs: int = 6

    def __call__(self, tree: Path) -> tuple[bool, str]:
        csrc, callers = tree / "csrc", ROOT / "tests" / "kernels" / "thread_pool_callers.cpp"
        sources = (callers, csrc / "cpu" / "thread_pool.cpp")
        program = build(csrc, sources, flags=("-fsanitize=thread",), link_flags=("-pthread",))
        for _ in range(self.num_runs):
            done = subprocess.run([str(program), "2", "16"], capture_output=True, timeout=60)
            if done.returncode:
                return True, done.stderr.decode()
        return False, ""


@dataclass(frozen=True)
class SimulatedGpu:
    """Tests of the tree on a simulated GPU."""

    tests: tuple[str, ...]
    only: str

    def __call__(self, tree: Path) -> tuple[bool, str]:
        words = (*PYTEST, "-x", *self.tests, "-k", self.only)
        with tempfile.TemporaryDirectory() as out:
            done = run_on_simulated_gpu(*words, out=Path(out), root=tree)
        return done.returncode == TESTS_FAILED, done.stdout + done.stderr


@dataclass(frozen=True)
class CpuModule:
    """Tests with the tree's module ``kvplane_kernels``, which is built without CUDA."""

    tests: tuple[str, ...]
    only: str

    def __call__(self, tree: Path) -> tuple[bool, str]:
        site = tree / "site-kernels"
        shutil.rmtree(site, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        command += ["--no-build-isolation", "--target", str(site)]
        command += [f"--config-settings=build-dir={tree / 'build-kernels'}", str(tree / "csrc")]
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        printed(*command, env={"PATH": path, "KVPLANE_CUDA": "OFF"})
        return _tests_fail(site, *self.tests, "-k", self.only)


@dataclass(frozen=True)
class NativeCore:
    """Tests with the tree's module ``kvplane_blocks``; only what changed is built."""

    tests: tuple[str, ...]

    def __call__(self, tree: Path) -> tuple[bool, str]:
        sources, built = tree / "csrc" / "blocks", _core_build(tree)
        made = cmake("--build", str(built))
        assert made.returncode == 0, made.stdout + made.stderr
        package = tree / "site-blocks" / "kvplane_blocks"
        shutil.rmtree(package, ignore_errors=True)
        package.mkdir(parents=True)
        files = [*sources.glob("kvplane_blocks/*.py"), *built.glob("_native*.so")]
        assert len(files) > 1
        for file in files:
            shutil.copy(file, package)
        return _tests_fail(package.parent, *self.tests)


@functools.cache
def _core_build(tree: Path) -> Path:
    """Configure a build of the tree's csrc/blocks, compiled soon rather than well."""
    sources, built = tree / "csrc" / "blocks", tree / "build-blocks"
    lists = sources / "CMakeLists.txt"
    lists.write_text(lists.read_text().replace("-O3", "-O0"))
    folder = printed(sys.executable, "-m", "pybind11", "--cmakedir").strip()
    done = cmake(
        *("-S", str(sources), "-B", str(built), "-G", "Ninja"),
        *("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={folder}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def _tests_fail(site: Path, *tests: str) -> tuple[bool, str]:
    """Run this tree's tests with a module of the folder ``site``. A crash is a failure, too."""
    path = os.pathsep.join((str(site), str(ROOT)))
    done = run_pytest("-m", "not nightly", *tests, cwd=ROOT, env={"PYTHONPATH": path})
    return done.returncode < 0 or done.returncode == TESTS_FAILED, done.stdout


BLOCKS: Final = (
    *("announcing", "rebuilding", "forgetting", "touched", "native_admit"),
    *("native_growth", "native_tokens", "native_tiers", "native_aborts", "native_input"),
    "native_walk",
)
# Their names in tables of faults: first those of one kind, then those that are given tests.
MACHINES: Final[dict[str, Machine]] = {
    "PLAIN": PLAIN,
    "ASAN": ASAN,
    "UBSAN": UBSAN,
    "TSAN": TSAN,
    "ThreadPoolCallers": ThreadPoolCallers(),
    "CORE": NativeCore(tuple(f"tests/unit/blocks/test_{name}.py" for name in BLOCKS)),
}
MACHINES_OF_TESTS: Final[dict[str, Callable[[tuple[str, ...], str], Machine]]] = {
    "SimulatedGpu": SimulatedGpu,
    "CpuModule": CpuModule,
    "NativeCore": lambda tests, _: NativeCore(tests),
}
