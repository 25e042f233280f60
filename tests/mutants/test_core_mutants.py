"""Each planted fault of the core is caught by the random walk, or the walk proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvplane.errors import KvplaneError
from tests.helpers.core.core_machine import CoreMachine
from tests.helpers.patched_faults import load

Fault = Callable[[pytest.MonkeyPatch], None]


FAULTS = load("mutants/core/faults.py").FAULTS


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_the_walk_catches(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failing example is not shrunk."""
    fault(monkeypatch)
    walk = settings(
        max_examples=3000,  # of which the first that shows the fault is the last
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KeyError, IndexError, KvplaneError, pytest.fail.Exception)):
        run_state_machine_as_test(CoreMachine, settings=walk)
