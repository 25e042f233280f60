"""Each planted fault of the router's core is caught by the test that says so."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"router_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
FAULTS = _load(HERE / "router" / "faults.py")
TESTS = HERE.parent / "unit" / "router"


@pytest.mark.parametrize("fault", FAULTS.CAUGHT_BY, ids=lambda fault: fault.__name__)
def test_a_test_catches(fault: FAULTS.Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    file, name = FAULTS.CAUGHT_BY[fault]
    test = getattr(_load(TESTS / f"{file}.py"), name)
    test()
    fault(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        test()
