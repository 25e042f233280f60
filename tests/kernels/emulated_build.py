"""Compiles the CUDA sources for the emulator with the C++ compiler.

The results are in build/emulated/, named by the digest of the sources, what they include and the
flags, so that each is compiled once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import machinery, util
from pathlib import Path
from types import ModuleType

import pybind11

ROOT = Path(__file__).parents[2]
EMULATOR = ROOT / "tests" / "emulator"
KEPT = ROOT / "build" / "emulated"
MODULE = "kvplane_emulated"  # as csrc/cuda_bindings.cpp calls it
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-DKVPLANE_EMULATED")
NUM_KEPT_FILES = 400  # objects, programs, and a lock of each
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


@functools.cache
def emulated_module() -> ModuleType:
    """The operations of csrc/cuda_bindings.cpp, on the emulator."""
    csrc = ROOT / "csrc"
    sources = (*kernel_sources(csrc), csrc / "cuda_bindings.cpp")
    path = build(csrc, sources, link_flags=("-shared",), suffix=machinery.EXTENSION_SUFFIXES[0])
    spec = util.spec_from_file_location(MODULE, path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel_sources(csrc: Path) -> tuple[Path, ...]:
    """The kernels, the emulator's scheduler and its stacks."""
    kernels = sorted((csrc / "cuda").rglob("*.cu"))
    return (*kernels, EMULATOR / "emulator.cpp", EMULATOR / "fiber.cpp")


def build(
    csrc: Path,
    sources: Sequence[Path],
    *,
    flags: Sequence[str] = (),
    watched: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    suffix: str = "",
    folders: Sequence[Path] = (),
) -> Path:
    """Compiles ``sources`` and links them; returns the file.

    csrc: the folder of the sources' headers. folders: more of them. flags: in addition to FLAGS.
    watched: flags for all but the emulator's own files, which ThreadSanitizer must not see.
    """
    KEPT.mkdir(parents=True, exist_ok=True)
    folders = [*folders, csrc, EMULATOR, csrc / "include"]
    includes = [f"-I{path}" for path in folders]
    includes += [f"-I{sysconfig.get_paths()['include']}", f"-I{pybind11.get_include()}"]

    def compiled(source: Path) -> Path:
        own = () if source.parent == EMULATOR else watched
        # Optimizing the bindings would take an eighth of all, and no test has to wait for them.
        own = (*own, "-O0") if source.name == "cuda_bindings.cpp" else own
        options = (*FLAGS, *flags, *own)
        digest = hashlib.sha256(repr((COMPILER, options, sys.version_info[:2])).encode())
        for path in included(source, folders):
            digest.update(path.name.encode() + path.read_bytes())
        return made(
            KEPT / f"{source.stem}-{digest.hexdigest()[:16]}.o",
            (COMPILER, *options, *includes, "-c", "-x", "c++", str(source)),
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(path) for path in pool.map(compiled, sources)]
    link = (COMPILER, *FLAGS, *flags, *watched, *link_flags, *objects)
    digest = hashlib.sha256(repr(link).encode()).hexdigest()
    path = made(KEPT / f"linked-{digest[:16]}{suffix}", link)
    forget_old_files()
    return path


def included(source: Path, folders: Sequence[Path]) -> list[Path]:
    """The file and all files of csrc that it includes, in order."""
    found = {source: None}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        for name in _INCLUDE.findall(path.read_text()):
            header = next(
                (place / name for place in (path.parent, *folders) if (place / name).exists()), None
            )
            if header is not None and header.resolve() not in found:
                found[header.resolve()] = None
                waiting.append(header.resolve())
    return sorted(found)


def made(path: Path, command: Sequence[str]) -> Path:
    """The file; if there is none, the command makes it with -o. Processes that want the same file
    wait for the first of them.
    """
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            path.touch()
            return path
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        result = subprocess.run(
            [*command, "-o", str(scratch)], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr}"
        scratch.rename(path)
    return path


def forget_old_files() -> None:
    times = []
    for path in KEPT.iterdir():
        with suppress(FileNotFoundError):  # another process forgets, too
            times.append((path.stat().st_mtime, path))
    for _, old in sorted(times, reverse=True)[NUM_KEPT_FILES:]:
        old.unlink(missing_ok=True)
