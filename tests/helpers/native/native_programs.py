"""Builds the C++ programs of tests/cpp, which test csrc/blocks, with sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.programs import called

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "csrc" / "blocks"
PROGRAMS = ROOT / "tests" / "cpp"


def cmake(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the cmake that is installed beside this interpreter, or else the system's."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return called("cmake", *arguments, env={"PATH": path})


def built(name: str, folder: Path, sources: Path = SOURCES) -> Path:
    """Build the program ``name``, with the headers in ``sources`` and the policies that it tests;
    the other programs test headers only.
    """
    program = folder / name
    flags = ("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-D_GLIBCXX_ASSERTIONS")
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    used = sorted((sources / "eviction").rglob("*.cpp")) if name == "test_eviction" else []
    used.append(PROGRAMS / f"{name}.cpp")
    command = [os.environ.get("CXX", "g++"), *flags, *sanitizers, "-I", sources]
    subprocess.run([*command, *used, "-o", program], check=True)
    return program
