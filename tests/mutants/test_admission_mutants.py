"""Each planted fault of the queue is caught, by the checker or by a test of one behaviour."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import pytest

from tests.helpers.patched_faults import load
from tests.helpers.planning.admission_checker import CASES, SLOW, starved
from tests.helpers.planning.admission_world import CONFIG

Fault = Callable[[pytest.MonkeyPatch], None]


FAULTS = load("mutants/admission/faults.py")
BEHAVIOURS = [
    function
    for part in ("queue", "turns", "victims")
    for name, function in vars(load(f"unit/admission/test_admission_{part}.py")).items()
    if name.startswith("test_") and not inspect.signature(function).parameters
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", FAULTS.STARVING, ids=lambda f: f.__name__)
def test_the_checker_catches(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    name = FAULTS.STARVING[fault]
    max_doublings = SLOW.get(name, CONFIG.max_doublings)
    assert starved(CASES[name], dataclasses.replace(CONFIG, max_doublings=max_doublings))[0]


@pytest.mark.parametrize("fault", FAULTS.OTHERS, ids=lambda f: f.__name__)
def test_a_behaviour_is_lost_with(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert any(_fails(behaviour) for behaviour in BEHAVIOURS)


def _fails(behaviour: Callable[[], None]) -> bool:
    try:
        behaviour()
    except AssertionError:
        return True
    return False


def test_no_fault_is_left_out() -> None:
    written = {
        function
        for name, function in vars(FAULTS).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }
    assert written == {*FAULTS.STARVING, *FAULTS.OTHERS}
