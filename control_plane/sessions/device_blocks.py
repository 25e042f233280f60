"""The device blocks of a pool as the queue sees them."""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.pools.pool import Pool
from control_plane.sessions.session import Session
from kvplane.wire.v1 import types_pb2 as tpb

_DEVICE = tpb.TIER_DEVICE


class DeviceBlocks:
    """Counts a pool's device blocks for the admission queue, as its ``PoolView``. What the queue
    calls a sequence is a family of the core: a sequence with its forks.
    """

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
        return self._pool.native.family_held(self._handle(session), sequence)

    def num_held_by(self, session: int) -> int:
        native, handle = self._pool.native, self._handle(session)
        held = native.num_blocks_held(handle)  # of both tiers
        return native.num_device_blocks_held(handle) if held > self.num_blocks // 8 else held

    def last_progress(self, session: int, sequence: int) -> tuple[float, bool]:
        return self._pool.native.family_progress(self._handle(session), sequence)

    def retired_since(self, session: int) -> float | None:
        """Return when the session's oldest plan in flight was made, if blocks wait for receipts."""
        if not self._pool.native.num_own_retired(self._handle(session), _DEVICE):
            return None
        return self._sessions[session].oldest_plan_s()

    def _handle(self, session: int) -> int:
        return self._sessions[session].handle
