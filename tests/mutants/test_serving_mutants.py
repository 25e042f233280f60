"""Each planted fault of the engine's thread is caught by the test that says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.helpers.engine_harness import LLAMA, save_model
from tests.helpers.patched_faults import load

TIMEOUT_S = 3.0  # of tests that take a fraction of it; some faults show as waiting for ever


FAULTS = load("mutants/serving/faults.py")
TESTS = load("unit/engine/test_engine_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(LLAMA, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("fault", FAULTS.CAUGHT_BY, ids=lambda fault: fault.__name__)
async def test_a_test_catches(
    fault: FAULTS.Fault, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    test = getattr(TESTS, FAULTS.CAUGHT_BY[fault])
    with pytest.raises((Exception, pytest.fail.Exception)):
        async with asyncio.timeout(TIMEOUT_S):
            await test(TESTS.Served(folder))
