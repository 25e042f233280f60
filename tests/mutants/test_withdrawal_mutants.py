"""Faults of withdrawals in the control plane, each of which a test of them must notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from patched_faults import load

from control_plane.planning.pools.pool import Pool

TESTS = load("unit/core/test_withdrawals.py")


def never_sent(patch: pytest.MonkeyPatch) -> None:
    """Data planes are not told what was forgotten."""
    never = property(lambda pool: False, lambda pool, value: None)
    patch.setattr(Pool, "_has_forgotten", never, raising=False)


def sent_once(patch: pytest.MonkeyPatch) -> None:
    """A data plane that was away when something was forgotten is never told."""
    patch.setattr(Pool, "_withdrawn", lambda pool, core, published: iter(()))


NOTICED_BY = {
    never_sent: TESTS.test_a_control_plane_that_restarts_does_not_learn_what_was_forgotten,
    sent_once: TESTS.test_a_data_plane_that_was_away_withdraws_when_it_resumes,
}


@pytest.mark.parametrize("fault", NOTICED_BY, ids=lambda fault: fault.__name__)
def test_a_fault_of_withdrawals_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    NOTICED_BY[fault]()
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        NOTICED_BY[fault]()
