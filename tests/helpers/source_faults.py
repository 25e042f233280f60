"""A fault planted in a copy of the tree, and the tests that must notice it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from warm_pytest import TESTS_FAILED, run_pytest

ROOT = Path(__file__).parents[2]
PARTS = (
    *("kvplane", "control_plane", "data_plane", "engine"),
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
    file = folder / fault.file
    sound = file.read_text()
    assert sound.count(fault.old) == 1
    file.write_text(sound.replace(fault.old, fault.new))
    only = ["-k", fault.only] if fault.only else []
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = run_pytest(fault.tests, *only, cwd=folder, env={"PYTHONPATH": path})
    assert done.returncode == TESTS_FAILED, done.stdout
