"""The device blocks of a pool as the queue sees them."""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.pools.pool import Pool
from control_plane.sessions.session import Session
from kvplane.wire.v1 import types_pb2 as tpb

_DEVICE = tpb.TIER_DEVICE


class DeviceBlocks:
    """Implements ``admission.decisions.PoolView``."""

    def __init__(self, pool: Pool, sessions: Mapping[int, Session]) -> None:
        self._pool = pool
        self._sessions = sessions

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks(_DEVICE)

    def num_obtainable(self, session: int) -> int:
        return self._pool.native.num_obtainable(self._handle(session), _DEVICE)

    def num_pending(self, session: int) -> int:
        return self._pool.native.num_pending(self._handle(session), _DEVICE)

    def num_held(self, session: int, sequence: int) -> int:
        owner, native = self._sessions[session], self._pool.native
        family = owner.families.by_key(sequence)
        handle = owner.handle
        return sum(native.num_held(handle, i) for i in family.members - family.swapped)

    def num_held_by(self, session: int) -> int:
        owner, native = self._sessions[session], self._pool.native
        held = native.num_blocks_held(owner.handle)  # of both tiers
        families = owner.families.all() if held > self.num_blocks // 8 else []
        if any(family.swapped for family in families):
            return sum(self.num_held(session, family.key) for family in families)
        return held

    def last_progress(self, session: int, sequence: int) -> tuple[float, bool]:
        owner, native = self._sessions[session], self._pool.native
        family = owner.families.by_key(sequence)
        handle = owner.handle
        each = [native.last_progress(handle, i) for i in family.members - family.swapped]
        return max(at_s for at_s, _ in each), any(is_computed for _, is_computed in each)

    def retired_since(self, session: int) -> float | None:
        """Return when the session's oldest plan in flight was made, if blocks wait for receipts."""
        if not self._pool.native.num_own_retired(self._handle(session), _DEVICE):
            return None
        return self._sessions[session].oldest_plan_s()

    def _handle(self, session: int) -> int:
        return self._sessions[session].handle
