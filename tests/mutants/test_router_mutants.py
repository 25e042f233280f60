"""Each planted fault of the router is caught by the test that says so."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers.patched_faults import load

FAULTS = load("mutants/router/faults.py")
ON_THE_WIRE = "../integrations/router/tests/test_router_proxy.py"
OF = {"test_replica_picker": "ray"}
TIMEOUT_S = 3.0  # of tests that take a fraction of it; some faults show as waiting for ever


@pytest.mark.parametrize("fault", FAULTS.CAUGHT_BY, ids=lambda fault: fault.__name__)
def test_a_test_catches(fault: FAULTS.Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    file, name = FAULTS.CAUGHT_BY[fault]
    test = getattr(load(f"../integrations/{OF.get(file, 'router')}/tests/{file}.py"), name)
    test()
    fault(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        test()


@pytest.mark.parametrize("fault", FAULTS.CAUGHT_ON_THE_WIRE_BY, ids=lambda fault: fault.__name__)
async def test_a_test_on_the_wire_catches(
    fault: FAULTS.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, scripts = FAULTS.CAUGHT_ON_THE_WIRE_BY[fault]
    tests = load(ON_THE_WIRE)
    fault(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        async with asyncio.timeout(TIMEOUT_S):
            await getattr(tests, name)(*(getattr(tests, script) for script in scripts))
