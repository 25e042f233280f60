"""Faults planted by patches in this process, and the tests that must notice them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from kvplane.errors import KvplaneError

TESTS = Path(__file__).parents[1]
Run = Callable[[Path, pytest.MonkeyPatch], None]
"""A test with an empty folder, and patches that end with it."""
NOTICES = (AssertionError, KvplaneError, TimeoutError, KeyError, IndexError, pytest.fail.Exception)
_SOUND: set[Run] = set()


def load(path: str) -> ModuleType:
    """Load the module of a file under ``tests/``, separate from the one that pytest collects, so
    that patches stay here.
    """
    file = TESTS / path
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(f"patched_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    sys.path.insert(0, str(file.parent))  # of what it imports beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


def alone(test: Callable[[], None]) -> Run:
    """Wrap a test that needs no folder and no patches."""
    return lambda folder, patch: test()


def assert_noticed(
    fault: Callable[[pytest.MonkeyPatch], None],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
) -> None:
    """Assert that ``run`` passes, and fails once ``fault`` is planted."""
    sound, faulty = folder / "sound", folder / "faulty"
    sound.mkdir()
    faulty.mkdir()
    if run not in _SOUND:  # for many faults one is enough
        with monkeypatch.context() as patch:
            run(sound, patch)
        _SOUND.add(run)
    fault(monkeypatch)
    with monkeypatch.context() as patch, pytest.raises(NOTICES):
        run(faulty, patch)
