"""Each planted fault of checks is caught by the walk that compares them with steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.patched_faults import load

FAULTS = load("mutants/core/check_faults.py").FAULTS
WALK = load("unit/core/test_checked_walk.py")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_the_walk_catches(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        WALK.walk_worlds(0, 12)
