"""Lists what a run on a GPU needs and this machine lacks. Imports nothing of the project.

    python -m benchmarks.gpu.preflight [--build-only]

Prints a line for each thing that is missing, and exits with 2 if there is one. With --build-only
only what is needed to compile is checked.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec

BUILD_PROGRAMS = ("nvcc", "g++")
BUILD_PACKAGES = {
    "pip": "",
    "scikit_build_core": "0.11",
    "pybind11": "2.13",
}
# The tests and measurements import these, torch, and nothing else from outside.
RUN_PACKAGES = {"pytest": "", "google.protobuf": "6.31"}
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
_DISTRIBUTIONS = {
    "scikit_build_core": "scikit-build-core",
    "google.protobuf": "protobuf",
}


def missing_for_build() -> Iterator[str]:
    """Return what is missing to compile the kernels."""
    if sys.version_info < OLDEST_PYTHON:
        yield f"Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer (set PYTHON to one)"
    for program in BUILD_PROGRAMS:
        if shutil.which(program) is None:
            yield f"{program} on the PATH"
    # As programs on the PATH, or as packages.
    for name in ("cmake", "ninja"):
        if shutil.which(name) is None and not _has(name):
            yield f"{name}, as a program or a package"
    yield from _missing_packages(BUILD_PACKAGES)


def missing_for_run() -> Iterator[str]:
    """Return what else is missing to run them."""
    yield from _missing_packages(RUN_PACKAGES)
    if not _has("torch"):
        yield "the package torch"
        return
    import torch

    if numbers(torch.__version__) < OLDEST_TORCH:
        yield f"torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer: here is {torch.__version__}"
    if not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA"
        yield f"a GPU that torch can use (torch {torch.__version__} is built for {built})"


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    found = re.match(r"[0-9.]*", version)
    return tuple(int(part) for part in (found[0] if found else "").split(".") if part)


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _missing_packages(wanted: dict[str, str]) -> Iterator[str]:
    for module, oldest in wanted.items():
        distribution = _DISTRIBUTIONS.get(module, module)
        needed = f"the package {distribution}{'>=' if oldest else ''}{oldest}"
        if not _has(module):
            yield needed
            continue
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue  # Importable but not a distribution, so its version is unknown.
        if oldest and numbers(version) < numbers(oldest):
            yield f"{needed}: here is {version}"


def main(words: Sequence[str]) -> int:
    missing = list(missing_for_build())
    if "--build-only" not in words:
        missing += missing_for_run()
    for what in missing:
        print(f"gpu: missing: {what}")
    if any("package" in what for what in missing):
        print("gpu: set KVPLANE_WHEELS to a folder of wheels to install packages from")
    return 2 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
