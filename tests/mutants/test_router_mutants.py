"""Each planted fault of the router is caught by the test that says so."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"router_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
FAULTS = _load(HERE / "router" / "faults.py")
TESTS = HERE.parent / "unit" / "router"
ON_THE_WIRE = HERE.parent / "rpc" / "test_router_proxy.py"
GATEWAY = HERE.parent / "rpc" / "test_endpoint_picker.py"
TIMEOUT_S = 3.0  # of tests that take a fraction of it; some faults show as waiting for ever


@pytest.mark.parametrize("fault", FAULTS.CAUGHT_BY, ids=lambda fault: fault.__name__)
def test_a_test_catches(fault: FAULTS.Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    file, name = FAULTS.CAUGHT_BY[fault]
    test = getattr(_load(TESTS / f"{file}.py"), name)
    test()
    fault(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        test()


@pytest.mark.parametrize("fault", FAULTS.CAUGHT_ON_THE_WIRE_BY, ids=lambda fault: fault.__name__)
async def test_a_test_on_the_wire_catches(
    fault: FAULTS.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, scripts = FAULTS.CAUGHT_ON_THE_WIRE_BY[fault]
    tests = _load(ON_THE_WIRE)
    fault(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        async with asyncio.timeout(TIMEOUT_S):
            await getattr(tests, name)(*(getattr(tests, script) for script in scripts))


@pytest.mark.parametrize("fault", FAULTS.CAUGHT_BY_A_GATEWAY, ids=lambda fault: fault.__name__)
async def test_a_gateway_s_test_catches(
    fault: FAULTS.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, values = FAULTS.CAUGHT_BY_A_GATEWAY[fault]
    tests = _load(GATEWAY)
    fault(monkeypatch)
    gateway = tests.Gateway()
    await gateway.start()
    with pytest.raises((Exception, pytest.fail.Exception)):
        async with asyncio.timeout(TIMEOUT_S):
            await getattr(tests, name)(gateway, *values)
    await gateway.stop()
