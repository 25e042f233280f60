"""What a tenant may have, over all its sessions in all pools. A quota of 0 is none.

Counted when asked for: only operations under a quota pay for it. The native core counts the blocks
of each pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from control_plane.planning.config import CoreConfig
from control_plane.planning.session import Session
from kvplane.errors import QuotaExceededError


class Quotas:
    """The quotas of every tenant."""

    def __init__(self, config: CoreConfig, sessions: Mapping[int, Session]) -> None:
        """``sessions``: the open ones."""
        self._config = config
        self._sessions = sessions
        # Steps that each tenant may make now, at most those of a second, and as of when.
        self._steps: dict[str, tuple[float, float]] = {}

    def require_session(self, tenant: str, num_unfenced: int) -> None:
        """Raise QuotaExceededError unless the tenant may open a session. ``num_unfenced``: its
        sessions that have ended, but not at all data planes.
        """
        most = self._config.max_tenant_sessions
        if most and sum(1 for _ in self._of(tenant)) + num_unfenced >= most:
            raise QuotaExceededError(f"the tenant has {most} sessions: close one first")

    def require_sequences(self, session: Session, num_more: int, field: str) -> None:
        """Raise QuotaExceededError naming ``field`` unless so many sequences may be started."""
        if not self.allows_sequences(session, num_more):
            raise QuotaExceededError(
                f"the tenant may have {self._config.max_tenant_sequences} live sequences: free one "
                "first",
                field=field,
            )

    def allows_sequences(self, session: Session, num_more: int) -> bool:
        """Whether so many sequences may be started."""
        most = self._config.max_tenant_sequences
        if not most:
            return True
        num = sum(s.native.num_sequences(s.slot) for s in self._of(session.tenant))
        return num + num_more <= most

    def take_step(self, tenant: str, now_s: float) -> None:
        """Count a step. Raises QuotaExceededError with the seconds to wait."""
        rate = self._config.max_tenant_steps_per_s
        if not rate:
            return
        most = max(1.0, rate)
        left, at_s = self._steps.get(tenant, (most, now_s))
        left = min(most, left + (now_s - at_s) * rate)
        if left < 1:
            self._steps[tenant] = (left, now_s)
            raise QuotaExceededError(
                f"the tenant may make {rate:g} steps a second", retry_delay_s=(1 - left) / rate
            )
        self._steps[tenant] = (left - 1, now_s)

    def _of(self, tenant: str) -> Iterable[Session]:
        return (session for session in self._sessions.values() if session.tenant == tenant)
