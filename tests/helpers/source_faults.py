"""A fault planted in a copy of the tree, and the tests that must notice it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TESTS_FAILED = 1  # pytest's exit code; errors of other kinds have others


PARTS = (
    *("kvplane", "control_plane", "data_plane", "engine", "demo"),
    *("examples", "models", "scripts", "tests", "pyproject.toml"),
)


class Fault(NamedTuple):
    """``old`` is in ``file`` once; ``tests`` must notice that ``new`` takes its place. ``only``: an
    expression for -k.
    """

    file: str
    old: str
    new: str
    tests: str
    only: str = ""


def assert_noticed(fault: Fault, folder: Path) -> None:
    """Copy the tree to ``folder``, plant the fault, and run its tests there."""
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    path = folder / fault.file
    sound = path.read_text()
    assert sound.count(fault.old) == 1
    path.write_text(sound.replace(fault.old, fault.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", fault.tests]
    done = subprocess.run(
        [*command, "-k", fault.only] if fault.only else command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == TESTS_FAILED, done.stdout + done.stderr
