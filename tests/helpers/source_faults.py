"""A fault planted in a copy of the tree, and the tests that must notice it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from tests.helpers.warm_pytest import TESTS_FAILED, run_pytest

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


def plant(file: Path, old: str, new: str) -> None:
    """Put ``new`` in the place of ``old``, which ``file`` has once."""
    sound = file.read_text()
    assert sound.count(old) == 1, f"{file} has it {sound.count(old)} times"
    file.write_text(sound.replace(old, new))


def copy_csrc(folder: Path) -> Path:
    """Copy csrc to ``folder``; return the copy."""
    ignored = shutil.ignore_patterns("build", "*.so")
    return Path(shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=ignored))


def copy_with(fault: Fault, folder: Path, *, csrc: bool = False) -> None:
    """Copy the tree to ``folder`` and plant the fault there. Parts of csrc without the fault are
    not compiled again.
    """
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, folder / part)
    if csrc:
        copy_csrc(folder)
        (ROOT / "build").mkdir(exist_ok=True)
        (folder / "build").symlink_to(ROOT / "build")
    plant(folder / fault.file, fault.old, fault.new)


def assert_noticed(fault: Fault, folder: Path, *, csrc: bool = False) -> None:
    """Run a fault's tests on such a copy."""
    copy_with(fault, folder, csrc=csrc)
    only = ["-k", fault.only] if fault.only else []
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = run_pytest(fault.tests, *only, cwd=folder, env={"PYTHONPATH": path})
    assert done.returncode == TESTS_FAILED, done.stdout
