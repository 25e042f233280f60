"""Each planted fault of requests in slices is caught by the test that says so."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers.patched_faults import load

TIMEOUT_S = 30.0
IN_ONE = "test_a_request_in_slices_is_answered_as_in_one"
# What other tests that have parameters are given.
ARGUMENTS = {
    "test_a_session_may_end_between_the_slices": (2,),
    "test_a_session_may_end_while_many_blocks_are_swapped": ("swap",),
    "test_a_session_that_ends_is_released_between_requests": (True,),
}


FAULTS = load("mutants/core/slice_faults.py")
CORE = load("unit/core/test_core_slices.py")
LANE = load("unit/planning/test_request_lane.py")


@pytest.mark.parametrize("fault", FAULTS.CORE, ids=lambda fault: fault.__name__)
def test_a_test_of_the_core_catches(fault: FAULTS.Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    name = FAULTS.CORE[fault]
    arguments = ARGUMENTS.get(name, ())
    if name == IN_ONE:  # makes slices small by itself
        arguments = (0, monkeypatch)
    else:
        CORE.make_small(monkeypatch)
    fault(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        getattr(CORE, name)(*arguments)


@pytest.mark.parametrize("fault", FAULTS.LANE, ids=lambda fault: fault.__name__)
async def test_a_test_of_the_lane_catches(
    fault: FAULTS.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception, asyncio.CancelledError)):
        async with asyncio.timeout(TIMEOUT_S):
            await getattr(LANE, FAULTS.LANE[fault])()
