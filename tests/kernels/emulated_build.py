"""Compiles the CUDA sources for the emulator with the C++ compiler, once for each state of them.

What is built lies under build/emulated/<digest of the sources and flags>/.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import machinery, util
from pathlib import Path
from types import ModuleType

import pybind11

ROOT = Path(__file__).parents[2]
MODULE = "kvplane_emulated"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-DKVPLANE_EMULATED")
KEPT_BUILDS = 4


@functools.cache
def emulated_module() -> ModuleType:
    """The operations of csrc/cuda_bindings.cpp, on the emulator."""
    includes = (sysconfig.get_paths()["include"], pybind11.get_include())
    flags = (*FLAGS, f"-DKVPLANE_MODULE={MODULE}", *(f"-I{path}" for path in includes))
    csrc = ROOT / "csrc"
    sources = (*kernel_sources(csrc), csrc / "cuda_bindings.cpp")
    suffix = machinery.EXTENSION_SUFFIXES[0]
    path = build(csrc, sources, f"{MODULE}{suffix}", flags, ("-shared",))
    spec = util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel_sources(csrc: Path) -> tuple[Path, ...]:
    """The kernels, the emulator's scheduler and its stacks."""
    emulator = csrc / "emulator"
    kernels = sorted((csrc / "cuda").glob("*.cu"))
    return (*kernels, emulator / "emulator.cpp", emulator / "fiber.cpp")


def build(
    csrc: Path,
    sources: Sequence[Path],
    name: str,
    flags: Sequence[str],
    link_flags: Sequence[str],
    watched: Sequence[str] = (),
    keep: Path = ROOT / "build" / "emulated",
) -> Path:
    """Compiles ``sources`` and links them; returns the file.

    watched: flags for all but the emulator's own files, which ThreadSanitizer must not see.
    """
    digest = hashlib.sha256(repr((COMPILER, flags, link_flags, watched, name)).encode())
    folders = ("cuda", "emulator", "include")
    headers = {path for part in folders for path in (csrc / part).rglob("*.*h")}
    for path in sorted({*sources, *headers, *csrc.glob("*.h")}):
        digest.update(path.name.encode() + path.read_bytes())
    folder = keep / digest.hexdigest()[:16]
    target = folder / name
    if target.exists():
        return target
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    scratch.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{csrc / part}" for part in (".", "cuda", "emulator", "include")]

    def compile_one(source: Path) -> str:
        to = scratch / f"{source.stem}.o"
        extra = () if source.parent == csrc / "emulator" else tuple(watched)
        language = ("-x", "c++", str(source))
        run(COMPILER, *flags, *extra, *includes, "-c", *language, "-o", str(to))
        return str(to)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    run(COMPILER, *flags, *watched, *link_flags, *objects, "-o", str(scratch / name))
    for each in objects:
        Path(each).unlink()
    if not target.exists():
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    forget_old_builds(keep)
    return target


def run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"


def forget_old_builds(keep: Path) -> None:
    builds = sorted(keep.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in builds[KEPT_BUILDS:]:
        shutil.rmtree(old, ignore_errors=True)
