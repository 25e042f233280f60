"""Each planted fault of the planes is caught by the walk over both, or the walk proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from patched_faults import load
from planes_machine import PlanesMachine

from kvplane.errors import KvplaneError

Fault = Callable[[pytest.MonkeyPatch], None]


FAULTS = load("mutants/planes/faults.py")


@pytest.mark.parametrize("fault", FAULTS.QUICK, ids=lambda f: f.__name__)
def test_the_walk_catches(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    # A fault that chance shows late needs many; the walk ends with the first that shows it.
    assert_caught(fault, monkeypatch, max_examples=1000)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS.SLOW, ids=lambda f: f.__name__)
def test_a_longer_walk_catches(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(fault, monkeypatch, max_examples=4000)


def assert_caught(fault: Fault, patch: pytest.MonkeyPatch, *, max_examples: int) -> None:
    """The walk fails with the fault planted. It need not be shortened for that."""
    fault(patch)
    walk = settings(
        max_examples=max_examples,
        stateful_step_count=80,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, KvplaneError, KeyError, IndexError)):
        run_state_machine_as_test(PlanesMachine, settings=walk)
