"""Builds the C++ test programs of csrc/blocks with sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "csrc" / "blocks"
SANITIZERS = "address,undefined"


def cmake(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the cmake that is installed beside this interpreter, or else the system's."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(
        ["cmake", *arguments],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def built_programs(build: Path) -> dict[str, Path]:
    """The test programs, by name."""
    configured = cmake(
        *("-S", str(SOURCES), "-B", str(build), "-G", "Ninja"),
        *("-DKVPLANE_BLOCKS_TESTS=ON", "-DKVPLANE_WERROR=ON", f"-DKVPLANE_SANITIZE={SANITIZERS}"),
    )
    assert configured.returncode == 0, configured.stdout + configured.stderr
    made = cmake("--build", str(build))
    assert made.returncode == 0, made.stdout + made.stderr
    return {path.stem: build / path.stem for path in (SOURCES / "tests").glob("test_*.cpp")}


def built_alone(sources: Path, name: str, build: Path) -> Path:
    """The test program ``name`` of a copy of csrc/blocks, built alone but for the policies."""
    program = build / name
    flags = ("-std=c++17", "-O1", "-g", "-D_GLIBCXX_ASSERTIONS", f"-fsanitize={SANITIZERS}")
    used = sorted((sources / "eviction").rglob("*.cpp")) if name == "test_eviction" else []
    used.append(sources / "tests" / f"{name}.cpp")
    command = [os.environ.get("CXX", "g++"), *flags, "-I", sources, *used, "-o", program]
    subprocess.run(command, check=True)
    return program
