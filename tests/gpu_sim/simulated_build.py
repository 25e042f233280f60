"""Compiles the simulated GPU against the installed torch, in ten seconds to a minute.

The library is kept in build/gpu_sim, under the digest of its source, torch's version and the flags.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
KEPT: Final = ROOT / "build" / "gpu_sim"
FLAGS: Final = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-shared", "-w")


def torch_folder() -> Path:
    """The folder of the installed torch, found without importing it."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is not installed"
    return Path(spec.origin).parent


def library() -> Path:
    """Returns the path of the library, which is compiled if it is missing."""
    source, torch = HERE / "simulated_gpu.cpp", torch_folder()
    parts = (source.read_text(), (torch / "version.py").read_text(), repr(FLAGS))
    digest = hashlib.sha256("".join(parts).encode()).hexdigest()[:16]
    path = KEPT / f"simulated_gpu-{digest}.so"
    KEPT.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            include = torch / "include"
            scratch = path.with_suffix(f".{os.getpid()}")
            command = [os.environ.get("CXX", "g++"), *FLAGS, f"-I{include}"]
            command += [f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}", str(source)]
            command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(scratch)]
            subprocess.run(command, check=True)
            scratch.rename(path)
    return path
