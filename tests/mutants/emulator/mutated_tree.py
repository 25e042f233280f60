"""A copy of the sources with a fault in one of them, on which tests of the kernels run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
COPIED = ("csrc", "data_plane", "kvplane", "tests/kernels")


@dataclass(frozen=True)
class Fault:
    """In ``source``, which has ``old`` once, ``new`` is in its place."""

    source: str
    old: str
    new: str


def run_on_fault(folder: Path, fault: Fault, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run these files or cases of tests/kernels up to the first failure, in a copy in ``folder``.
    What is built of the sources without the fault is not built again.
    """
    for part in COPIED:
        ignored = shutil.ignore_patterns("build", "*.so", "__pycache__")
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    built = ROOT / "build" / "emulated"
    built.mkdir(parents=True, exist_ok=True)
    (folder / "build").mkdir()
    (folder / "build" / "emulated").symlink_to(built)
    text = (folder / fault.source).read_text()
    assert text.count(fault.old) == 1, f"{fault.source} has it {text.count(fault.old)} times"
    (folder / fault.source).write_text(text.replace(fault.old, fault.new))
    path = os.pathsep.join(str(p) for p in (folder, folder / "tests" / "kernels"))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-c", os.devnull, "--rootdir", "."]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "-W", "ignore", *tests],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_found(folder: Path, fault: Fault, *tests: str) -> None:
    done = run_on_fault(folder, fault, *tests)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
