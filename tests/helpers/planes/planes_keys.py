"""Which keys took whose place, and when a plan may be refused for that."""

from __future__ import annotations

from control_plane.planning.core import ControlPlane
from control_plane.planning.pools.pool import Pool
from control_plane.planning.session import Session
from kvplane.errors import BadSignatureError, KvplaneError

KEY_LIFETIME_S = 1e9


class Successions:
    """Keys that replaced others by rotation."""

    def __init__(self) -> None:
        self.former: list[bytes] = []
        """They signed once."""
        self._first: dict[bytes, bytes] = {}  # by the id of one that replaced another

    def rotate(self, core: ControlPlane, pool: Pool, now_s: float) -> None:
        """Make a pool's key as old as it may get, if it is not being rotated."""
        keys = pool.keys
        if keys.step_s is not None:
            return
        keys.since_s = now_s - KEY_LIFETIME_S
        core._registration.rotate(pool, now_s)
        if keys.next:
            self._first[keys.next_id] = self._first.get(keys.present_id, keys.present_id)
            self.former.append(keys.present)

    def are_successive(self, key_id: bytes, other_id: bytes) -> bool:
        """Whether one took the place of the other without a pause."""
        return self._first.get(key_id, key_id) == self._first.get(other_id, other_id)


def why_lost(session: Session | None, number: int, error: KvplaneError) -> str:
    """Why a plan may be refused for its signature: it was aborted, and its key was dropped."""
    is_void = session is None or session.is_voided(number)
    is_former = session is None or number <= session.last_of_former_key
    return "a former key" if isinstance(error, BadSignatureError) and is_void and is_former else ""
