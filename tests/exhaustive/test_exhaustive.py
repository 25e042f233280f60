"""All orders of events in small scenarios of both planes: none leads to what must not be.

The planted faults of ``tests/mutants/faults/planes.txt`` that are named "all orders" show that the
search finds what was there once.
"""

from __future__ import annotations

import pytest

from tests.exhaustive.explorer import SETTINGS, explore


@pytest.mark.parametrize("name", ["order", "fences"])
def test_no_short_order_of_events_leads_to_what_must_not_be(name: str) -> None:
    assert explore(SETTINGS[name], 4) == 4


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_order_of_events_leads_to_what_must_not_be(name: str) -> None:
    assert explore(SETTINGS[name], 6) == 6
