"""All orders of events in small scenarios of both planes: none leads to what must not be, and with
a fault planted that was there once, one does.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.exhaustive.explorer import SETTINGS, FoundError, explore


def _load_faults() -> ModuleType:
    path = Path(__file__).parents[1] / "mutants" / "planes" / "faults.py"
    spec = importlib.util.spec_from_file_location("planes_faults", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAULTS = _load_faults()
# A scenario that shows the fault, and in how many events.
SHOWN_BY = {
    "repeats_not_recognised": ("order", 2),
    "sessions_outlive_a_shard": ("restarts", 3),
    "fence_forgotten": ("fences", 5),
}


@pytest.mark.parametrize("name", ["order", "fences"])
def test_no_short_order_of_events_leads_to_what_must_not_be(name: str) -> None:
    assert explore(SETTINGS[name], 4).longest == 4


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_order_of_events_leads_to_what_must_not_be(name: str) -> None:
    assert explore(SETTINGS[name], 6).longest == 6


@pytest.mark.parametrize("fault", SHOWN_BY)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    getattr(FAULTS, fault)(monkeypatch)
    name, num_events = SHOWN_BY[fault]
    with pytest.raises(FoundError):
        explore(SETTINGS[name], num_events)
