"""Holds all sessions of one control plane. Only here are they opened, and only here do they end.

    open ──► renewed ... ──► end ──► shards fence it ─┐
                              └────► it releases ─────┴─► its blocks are free

An ended session is one record, ``EndedSession``, until its blocks are free.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Final

from control_plane.admission.decisions import AdmissionConfig
from control_plane.config import CoreConfig
from control_plane.pools.pool import Pool
from control_plane.pools.publications import root_of
from control_plane.pools.shards import EndedSession
from control_plane.sessions.pool_admission import PoolAdmission
from control_plane.sessions.session import Session
from kvplane.errors import (
    KvplaneError,
    MissingReceiptError,
    QuotaExceededError,
    SessionExpiredError,
    SessionNotFoundError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

END_CAUSES: Final[dict[type[KvplaneError], str]] = {
    SessionNotFoundError: "closed",
    SessionExpiredError: "expired",
    StaleEpochError: "epoch",
    MissingReceiptError: "receipt",
}
"""The causes of sessions' ends in metrics, by the error that callers then get."""
_WHY_ENDED: Final[dict[type[KvplaneError], str]] = {
    SessionExpiredError: "ended when nothing had renewed its lease in time",
    SessionNotFoundError: "is not open: it was closed, or never opened by this tenant",
    StaleEpochError: "ended when a data plane of its pool was restarted",
    MissingReceiptError: "ended because a shard did not receipt in time a plan that others had",
}
_MAX_SESSION_ID: Final = 2**53 - 1
_ENDING_S: Final = 0.005  # spent on ending sessions at a time
_SLICE_BLOCKS: Final = 65_536  # of an ended session, released at once: a few milliseconds


def random_session_id() -> int:
    """Return a session id that nobody can guess."""
    return 1 + secrets.randbelow(_MAX_SESSION_ID)


class Sessions:
    """Holds the control plane's sessions. ``by_id``: the open ones. ``incarnation``: the control
    plane's, which is part of their references.
    """

    def __init__(
        self,
        config: CoreConfig,
        *,
        incarnation: int,
        clock: Callable[[], float],
        new_session_id: Callable[[], int] = random_session_id,
    ) -> None:
        """``clock`` returns monotonic seconds, ``new_session_id`` random ids from 1 to 2^53 - 1."""
        self.by_id: dict[int, Session] = {}
        self.incarnation = incarnation
        self._config = config
        self._clock = clock
        self._new_session_id = new_session_id
        self._admissions: dict[str, PoolAdmission] = {}  # by pool
        # Of the sessions that ended last: the tenant, and what its calls raise.
        self._why_ended: OrderedDict[int, tuple[str, type[KvplaneError]]] = OrderedDict()
        self._max_remembered = max(4096, 4 * config.max_sessions)

    # By pool

    def admission_of(self, pool: Pool) -> PoolAdmission:
        """Return the object that shares a pool's blocks among its sessions, made at first use."""
        admission = self._admissions.get(pool.id)
        if admission is None:
            config = AdmissionConfig(headroom=self._config.watermark)
            admission = self._admissions[pool.id] = PoolAdmission(pool, config)
        return admission

    def admissions(self) -> Collection[PoolAdmission]:
        """Return the PoolAdmission of each pool that has had sessions."""
        return self._admissions.values()

    def of(self, pool: Pool) -> Collection[Session]:
        """Return the open sessions of a pool."""
        return self.admission_of(pool).sessions.values()

    def forget(self, pool_id: str) -> None:
        """Drop the state kept for a pool, which has no open session."""
        self._admissions.pop(pool_id, None)

    # Open sessions

    def open(self, pool: Pool, request: cpb.OpenSessionRequest, tenant: str) -> Session:
        """Open a session in a pool that is ready. Raises QuotaExceededError, PoolNotReadyError."""
        self._require_room(tenant)
        root = root_of(pool.layout.fingerprint, tenant, request.namespace)
        pool.set_time(self._clock())
        pool.require_can_open(tenant, root)
        session = Session(
            tpb.SessionRef(incarnation=self.incarnation, session_id=self._unused_id()),
            pool,
            ordinal=pool.shards.next_ordinal(),
            tenant=tenant,
            client_name=request.client_name,
            namespace=request.namespace,
            root=root,
            num_answers=self._config.max_plans_in_flight + 1,
        )
        self.by_id[session.id] = session
        self.admission_of(pool).open(session)
        self.renew(session)
        return session

    def get(self, ref: tpb.SessionRef, tenant: str) -> Session:
        """Return the tenant's open session, after setting its pool's clock. Raises
        StaleIncarnationError, or the error that says why it is not open.
        """
        self.check_incarnation(ref)
        session = self.by_id.get(ref.session_id)
        if session is None or session.tenant != tenant:
            raise self.error(ref.session_id, tenant)
        session.pool.set_time(self._clock())
        return session

    def check_incarnation(self, ref: tpb.SessionRef) -> None:
        """Raise StaleIncarnationError if another control plane opened the session."""
        if ref.incarnation != self.incarnation:
            raise StaleIncarnationError(
                f"is not this control plane's, {self.incarnation}: open a session and admit again",
                field="session.incarnation",
            )

    def require_open(self, session: Session) -> None:
        """Raise the error that says why a session has ended, if it has."""
        if self.by_id.get(session.id) is not session:
            raise self.error(session.id, session.tenant)

    def renew(self, session: Session) -> None:
        """Restart a session's lease from its pool's present time."""
        session.expires_at_s = session.pool.now_s + self._config.lease_s

    # Their end

    def end(self, session: Session, reason: type[KvplaneError]) -> None:
        """End a session, whose calls raise ``reason`` from now on. Its blocks are released, many
        sequences in slices, and stay retired until every shard has fenced it.
        """
        pool, admission = session.pool, self.admission_of(session.pool)
        admission.close(session)
        pool.statistics.num_expired_sessions += reason is SessionExpiredError
        pool.statistics.reclaimed_blocks[END_CAUSES[reason]] += session.num_held()
        session.drop_plans([*session.plans])
        del self.by_id[session.id]
        self._why_ended[session.id] = (session.tenant, reason)
        while len(self._why_ended) > self._max_remembered:
            self._why_ended.popitem(last=False)
        is_left = pool.native.end_session(session.handle, _SLICE_BLOCKS)
        ended = pool.shards.ended[session.id] = EndedSession(
            session.ref,
            session.ordinal,
            tenant=session.tenant,
            handle=session.handle,
            ended_s=pool.now_s,
            unfenced_shards=set(pool.shards.states),
            is_released=not is_left,
            lacks_receipt=reason is MissingReceiptError,
        )
        if is_left:
            pool.releasing.append(ended)
        pool.shards.send([ended.fence()])
        admission.serve()

    def end_all(self, pool: Pool) -> None:
        """End all sessions of a pool, because a shard of it has restarted."""
        for session in [*self.of(pool)]:
            self.end(session, StaleEpochError)

    def expire(self, now_s: float) -> None:
        """End the sessions whose leases have run out, for a few milliseconds: the next call, which
        is due at once, ends the others.
        """
        for session in [s for s in self.by_id.values() if s.expires_at_s <= now_s]:
            self.end(session, SessionExpiredError)
            if self._clock() > now_s + _ENDING_S:
                break

    def fenced(self, pool: Pool, shard_index: int, session_ids: Iterable[int]) -> None:
        """Record that the shard will never again run a plan of these ended sessions: it has fenced
        them, or the process that was to do so is gone.
        """
        for session_id in session_ids:
            ended = pool.shards.ended.get(session_id)
            if ended is not None:
                ended.unfenced_shards.discard(shard_index)
                self._free_if_done(pool, ended)

    def release_some(self, pool: Pool) -> None:
        """Release sequences that a pool's ended sessions still hold, for a few milliseconds."""
        if pool.releasing:
            ended = pool.releasing[0]
            assert ended.handle is not None
            if not pool.native.end_some(ended.handle, _SLICE_BLOCKS):
                pool.releasing.popleft()
                ended.is_released = True
                self._free_if_done(pool, ended)

    def _free_if_done(self, pool: Pool, ended: EndedSession) -> None:
        if ended.unfenced_shards or not ended.is_released:
            return
        del pool.shards.ended[ended.ref.session_id]
        if ended.handle is not None:
            pool.native.session_fenced(ended.handle)
            pool.statistics.fence_s.add(pool.now_s - ended.ended_s)

    def has_ended(self, session_id: int, tenant: str) -> bool:
        """Return whether a session of the tenant is among those that ended last."""
        return session_id in self._why_ended and self._why_ended[session_id][0] == tenant

    def error(self, session_id: int, tenant: str) -> KvplaneError:
        """Return the error for a session that is not open, or not the tenant's."""
        owner, reason = self._why_ended.get(session_id, (tenant, SessionNotFoundError))
        if owner != tenant:
            reason = SessionNotFoundError
        return reason(
            f"session {session_id} {_WHY_ENDED[reason]}: open another and admit its sequences "
            "again",
            field="session.session_id",
        )

    # Helpers

    def _require_room(self, tenant: str) -> None:
        """Raise QuotaExceededError if the tenant may open no further session."""
        most = self._config.max_sessions
        if len(self.by_id) >= most:
            raise QuotaExceededError(f"{most} sessions are open: close one first")
        most = self._config.max_tenant_sessions
        if not most:
            return
        num = sum(session.tenant == tenant for session in self.by_id.values())
        for admission in self._admissions.values():
            unfenced = admission.pool.shards.unfenced()
            num += sum(ended.tenant == tenant for ended in unfenced)
        if num >= most:
            raise QuotaExceededError(f"the tenant has {most} sessions: close one first")

    def _unused_id(self) -> int:
        while True:
            session_id = self._new_session_id()
            if session_id not in self.by_id and session_id not in self._why_ended:
                return session_id
