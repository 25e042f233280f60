"""Each planted fault of the planes is caught by the walk over both, or the walk proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvplane.errors import KvplaneError
from tests.helpers.patched_faults import load
from tests.helpers.planes.planes_machine import PlanesMachine

Fault = Callable[[pytest.MonkeyPatch], None]


FAULTS = load("mutants/planes/faults.py").FAULTS


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_the_walk_catches(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failing example is not shrunk."""
    fault(monkeypatch)
    walk = settings(
        max_examples=4000,  # of which the first that shows the fault is the last
        stateful_step_count=80,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KvplaneError, KeyError, IndexError)):
        run_state_machine_as_test(PlanesMachine, settings=walk)
