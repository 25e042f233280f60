"""Checks that a pool is consistent: what must hold after every call to the core.

The native core counts its blocks again from tables, plans and sessions. It scans the pool, which is
slow: for tests.
"""

from __future__ import annotations

from collections.abc import Iterable

from control_plane.pools.pool import Pool
from control_plane.sessions.session import Session


def check_pool(pool: Pool, sessions: Iterable[Session]) -> None:
    """Raise AssertionError saying what is wrong, if anything is. ``sessions``: all open ones."""
    for core in pool.groups:
        core.check_integrity()
    sessions = list(sessions)
    slots = {session.slot for session in sessions}
    assert len(slots) == len(sessions), "two sessions have one slot"
    for session in sessions:
        _check_session(pool, session)
    for usage in pool.usage().tiers:
        parts = (
            usage.num_free_blocks,
            usage.num_cached_blocks,
            usage.num_held_blocks,
            usage.num_retired_blocks,
        )
        assert min(parts) >= 0, f"tier {usage.tier}: a negative count"
        assert sum(parts) == usage.num_blocks, f"tier {usage.tier}: blocks are not conserved"


def _check_session(pool: Pool, session: Session) -> None:
    native, slot = session.native, session.slot
    assert native is pool.native, f"session {session.id}: of an earlier build of the pool"
    assert native.plans_in_flight(slot) == len(session.plans), "plans in flight differ"
    assert native.last_plan(slot) == session.last_plan, "last plans differ"
    assert all(number > session.done for number in session.plans), "a plan that ran is in flight"
    assert session.done == min(session.receipted), f"session {session.id}: receipts differ"
