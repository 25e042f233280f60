"""Plants a fault in a copy of the tree, where what should notice it must fail."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.helpers.warm_pytest import TESTS_FAILED, run_pytest
from tests.mutants.fault import Fault

ROOT: Final = Path(__file__).parents[2]
PARTS: Final = (
    *("kvplane", "control_plane", "data_plane", "engine", "integrations", "csrc"),
    *("benchmarks", "deploy", "examples", "models", "scripts", "tests"),
    *("conftest.py", "pyproject.toml"),
)
INSIDE_KVPLANE: Final = ("engine", "integrations")  # see setup.py


def copy_tree(folder: Path) -> Path:
    """Copy the tree to ``folder``, which must not be there yet, and return it.

    What is compiled of csrc is kept in one build folder, so that only a fault's part is compiled.
    """
    ignored = shutil.ignore_patterns("build", "*.so")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        else:
            shutil.copy(ROOT / part, folder / part)
    for part in INSIDE_KVPLANE:
        (folder / "kvplane" / part).symlink_to(folder / part)
    (ROOT / "build").mkdir(exist_ok=True)
    (folder / "build").symlink_to(ROOT / "build")
    return folder


def texts_with(fault: Fault, tree: Path) -> dict[Path, str]:
    """Return the texts of the fault's files in the tree with the fault in them."""
    texts: dict[Path, str] = {}
    for file, old, new in fault.places:
        path = tree / file
        text = texts.get(path) or path.read_text()
        assert text.count(old) == 1, f"{fault.name}: {file} has it {text.count(old)} times"
        texts[path] = text.replace(old, new)
    return texts


@contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[None]:
    """Have the fault in the tree for a while."""
    texts = texts_with(fault, tree)
    sound = {path: path.read_text() for path in texts}
    try:
        _write(texts)
        yield
    finally:
        _write(sound)
        shutil.rmtree(tree / ".hypothesis", ignore_errors=True)


def _write(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        path.write_text(text)
        # Two writes in a second may look like one.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def assert_noticed(fault: Fault, tree: Path) -> None:
    """Assert that what should notice the fault fails on the tree with it."""
    with planted(fault, tree):
        if callable(fault.killed_by):
            fails, said = fault.killed_by(tree)
        else:
            only = ["-k", fault.only] if fault.only else []
            path = f"{tree}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            done = run_pytest(
                *fault.killed_by.split(" + "),
                *only,
                f"--timeout={fault.timeout_s}",
                cwd=tree,
                env={"PYTHONPATH": path},
            )
            # A crash is a failure, too.
            fails, said = done.returncode < 0 or done.returncode == TESTS_FAILED, done.stdout
        assert fails, said
