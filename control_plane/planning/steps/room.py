"""Whether there are blocks for what an operation asks: OK, LATER or NEVER, and why.

obtainable = free + cached + the session's own retired blocks
available  = obtainable - reserved for other sessions - headroom (admissions only)
"""

from __future__ import annotations

from typing import Final

from google.protobuf import duration_pb2

from control_plane.planning.pools.pool import Pool
from control_plane.planning.session import Session
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

_DEVICE: Final = tpb.TIER_DEVICE
# About as long as a step takes on a busy engine: receipts come with steps.
_RETRY_DELAY: Final = duration_pb2.Duration(nanos=50_000_000)


class NoRoom(Exception):
    """There is no room for an item: the answer is LATER or NEVER."""

    def __init__(self, status: cpb.OperationStatus, shortage: cpb.Shortage) -> None:
        super().__init__(status)
        self.status = status
        self.shortage = shortage


def require_fits(pool: Pool, num_blocks: int, tier: tpb.Tier = _DEVICE) -> None:
    """Raise NoRoom with NEVER when the tier is smaller than that."""
    if num_blocks > pool.tiers[tier].num_blocks:
        shortage = cpb.Shortage(
            tier=tier,
            num_blocks_needed=num_blocks,
            num_blocks_available=pool.tiers[tier].num_blocks,
            reason=cpb.SHORTAGE_REASON_BLOCKS,
        )
        raise NoRoom(cpb.OPERATION_STATUS_NEVER, shortage)


def require_room(session: Session, tier: tpb.Tier, num_blocks: int) -> None:
    """Raise NoRoom with LATER when the session cannot have so many blocks now."""
    if num_blocks > session.pool.num_available(session.id, tier):
        raise _later(session, tier, num_blocks)


def require_room_to_admit(
    session: Session, need: int, num_blocks: int, num_tokens: int, hits: list[int]
) -> tuple[list[int], bool]:
    """Raise NoRoom with LATER, or return the hits to use and whether the last is copied.

    When all tokens are cached, the last one is still computed, into a copy of its block. Where
    there is no room for original and copy, that whole block is computed again instead.
    """
    pool = session.pool
    num_guaranteed = pool.reservations.num_guaranteed_with(session.id, need)
    if num_guaranteed > pool.device.num_blocks:
        raise _later(session, _DEVICE, need)
    headroom = pool.num_watermark_blocks()
    num_available = pool.num_available(session.id, _DEVICE) - headroom
    copies_last = len(hits) * pool.block_size == num_tokens
    while True:
        num_needed = num_blocks - len(hits) + copies_last
        num_needed += pool.device.num_obtainable_of(hits, session.id)
        if num_needed <= num_available:
            return hits, copies_last
        if not copies_last:
            raise _later(session, _DEVICE, num_needed, headroom)
        hits, copies_last = hits[:-1], False


def _later(session: Session, tier: tpb.Tier, num_needed: int, headroom: int = 0) -> NoRoom:
    pool, store = session.pool, session.pool.tiers[tier]
    num_available = pool.num_available(session.id, tier)
    if num_needed > store.num_obtainable(session.id):
        reason = cpb.SHORTAGE_REASON_BLOCKS
    elif headroom and num_needed <= num_available:
        reason = cpb.SHORTAGE_REASON_HEADROOM
    else:
        reason = cpb.SHORTAGE_REASON_GROWTH
    shortage = cpb.Shortage(
        tier=tier,
        num_blocks_needed=num_needed,
        num_blocks_available=max(0, num_available - headroom),
        num_blocks_pending=store.num_pending(session.id),
        reason=reason,
        retry_delay=_RETRY_DELAY,
    )
    return NoRoom(cpb.OPERATION_STATUS_LATER, shortage)
