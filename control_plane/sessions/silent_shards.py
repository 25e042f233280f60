"""Shards that have not receipted a plan that another shard has.

A plan has run when all shards have receipted it. When one is late, either its receipt was lost on
the way, which costs only the session, or the shard does not work. The session cannot tell which,
and must not be believed: it could stop the others. So it ends, and the shard is asked to fence it.
A shard that does not do that in time either makes the whole pool useless.

    receipt missing for RECEIPT_TIMEOUT_S ──► the session ends ──► its fence
                           all sessions end, none is opened ◄── missing for RECEIPT_TIMEOUT_S
"""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.pools.pool import Pool
from control_plane.sessions.session import Session


def num_missing_receipts(num_shards: int, sessions: Sequence[Session]) -> list[int]:
    """Count the plans that each shard has not receipted and another has, by shard index."""
    num_missing = [0] * num_shards
    for session in sessions:
        highest = max(session.receipted)
        for i, receipted in enumerate(session.receipted):
            num_missing[i] += sum(receipted < number <= highest for number in session.plans)
    return num_missing


def lost_sessions(pool: Pool, sessions: Sequence[Session], timeout_s: float) -> list[Session]:
    """Return the pool's sessions that have to end because a shard is silent, at the pool's time."""
    if pool.shards.num_shards == 1:
        return []
    if pool.silent_shards:
        return list(sessions)
    return [session for session in sessions if _is_late(session, pool.now_s - timeout_s)]


def _is_late(session: Session, since_s: float) -> bool:
    """Return whether a plan made before ``since_s`` has receipts of some shards, but not all."""
    oldest = next(iter(session.plans), None)
    if oldest is None or oldest > max(session.receipted):
        return False
    return session.plans[oldest].made_s <= since_s
