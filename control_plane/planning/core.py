"""The control plane's core: the metadata of every pool, behind one interface of messages.

Knows neither grpc nor torch. Single-threaded: it is only ever called from the event loop, and every
call runs to its end. Invariant: ``check_integrity`` holds after every call, one that raises too.

    registration   register, report, disconnect, fence_done, take_outgoing
    sessions       open_session, renew_session, close_session, tick
    requests       step, submit_receipts, abort_plan, resync: in the order of their numbers, each
                   applying its receipts first
    queries        block_table, lookup_prefix, describe_*, check_integrity
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

from control_plane.planning import integrity
from control_plane.planning.config import CoreConfig
from control_plane.planning.pools.layouts import layout_fingerprint
from control_plane.planning.pools.pool import Pool
from control_plane.planning.pools.publications import MAX_NAMESPACE_CHARACTERS, root_of
from control_plane.planning.pools.registration import Registration
from control_plane.planning.sequence import states
from control_plane.planning.session import EndedSessions, Session
from control_plane.planning.steps import checks
from control_plane.planning.steps.abort import abort_from, abort_plans
from control_plane.planning.steps.deferred_tokens import take_deferred_tokens
from control_plane.planning.steps.draft import Draft
from control_plane.planning.steps.numbering import content_of
from control_plane.planning.steps.planner import Planner, may_plan, num_items
from control_plane.planning.steps.receipts import take_receipts
from kvplane import columns, protocol, signing
from kvplane.columns import INT32, INT64
from kvplane.error_messages import duration_of
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    LayoutMismatchError,
    PoolNotFoundError,
    PoolNotReadyError,
    QuotaExceededError,
    SessionExpiredError,
    SessionNotFoundError,
    StaleEpochError,
    StaleIncarnationError,
    TooManyPlansInFlightError,
)
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

_LOGGER: Final = logging.getLogger(__name__)
_RETRY_DELAY_S: Final = 0.5
_MAX_CLIENT_NAME: Final = 128
_MAX_SESSION_ID: Final = 2**53 - 1

_Answer = TypeVar("_Answer")


def _new_session_id() -> int:
    return 1 + secrets.randbelow(_MAX_SESSION_ID)


class ControlPlane:
    """All pools and sessions of one control plane process."""

    def __init__(
        self,
        *,
        incarnation: int,
        config: CoreConfig,
        clock: Callable[[], float],
        new_key: Callable[[], bytes] = signing.new_key,
        new_session_id: Callable[[], int] = _new_session_id,
    ) -> None:
        """``clock`` returns monotonic seconds, ``new_session_id`` random ids from 1 to 2^53 - 1."""
        self.incarnation = incarnation
        self._config = config
        self._clock = clock
        self._new_session_id = new_session_id
        self._pools: dict[str, Pool] = {}
        self._sessions: dict[int, Session] = {}
        self._ended = EndedSessions(max(4096, 4 * config.max_sessions))
        self._next_tick_s: float | None = None
        self._registration = Registration(
            self._pools,
            incarnation=incarnation,
            watermark=config.watermark,
            new_key=new_key,
            end_sessions=self._end_all,
        )
        self.register = self._registration.register
        self.report = self._registration.report
        self.disconnect = self._registration.disconnect
        self.fence_done = self._registration.fence_done
        self.take_outgoing = self._registration.take_outgoing

    # Sessions

    def open_session(self, request: cpb.OpenSessionRequest, tenant: str) -> cpb.OpenSessionResponse:
        """Open a session. The caller negotiates the protocol and fills in its version.

        Raises PoolNotFoundError, PoolNotReadyError, LayoutMismatchError, QuotaExceededError,
        InvalidRequestError.
        """
        pool = self._pool(request.pool_id)
        _require_short(request.client_name, _MAX_CLIENT_NAME, "client_name")
        _require_short(request.namespace, MAX_NAMESPACE_CHARACTERS, "namespace")
        fingerprint = layout_fingerprint(request.layout, field="layout")
        if not pool.ready:
            raise PoolNotReadyError(
                f"pool {pool.id!r} cannot be used yet: {pool.shards.what_is_missing()}",
                retry_delay_s=_RETRY_DELAY_S,
            )
        if fingerprint != pool.layout.fingerprint:
            raise LayoutMismatchError(
                f"is not that of pool {pool.id!r}: ask DescribePool for it", field="layout"
            )
        most = self._config.max_sessions
        if len(self._sessions) >= most:
            raise QuotaExceededError(f"{most} sessions are open: close one first")
        session = Session(
            tpb.SessionRef(incarnation=self.incarnation, session_id=self._unused_session_id()),
            pool,
            ordinal=pool.shards.next_ordinal(),
            tenant=tenant,
            root=root_of(fingerprint, tenant, request.namespace),
            num_answers=self._config.max_plans_in_flight + 1,
        )
        self._sessions[session.id] = session
        self._renew(session)
        pool.open(session.id)
        return cpb.OpenSessionResponse(
            session=session.ref,
            time_to_live=duration_of(self._config.lease_s),
            max_plans_in_flight=self._config.max_plans_in_flight,
            grant=self._grant(session),
            shards=pool.shards.infos(),
            layout=pool.layout.to_proto(),
            num_device_blocks=pool.device.num_blocks,
            num_host_blocks=pool.host.num_blocks,
        )

    def renew_session(self, session: tpb.SessionRef, tenant: str) -> float:
        """Renew a lease; returns how long it now runs, in seconds."""
        self._session(session, tenant)
        return self._config.lease_s

    def close_session(self, session: tpb.SessionRef, tenant: str) -> None:
        """End a session. Closing one that has ended already changes nothing."""
        self._check_incarnation(session)
        if not self._ended.knows(session.session_id, tenant):
            self._end(self._session(session, tenant), SessionNotFoundError)

    def tick(self) -> float:
        """End the sessions whose leases ran out; returns the seconds until the next call is due, at
        most a quarter of a lease.

        A call that is late by more than another quarter means that this process slept. Messages
        that would have renewed leases may then wait unread, or their senders may have slept too, so
        every lease starts again from now.
        """
        now = self._clock()
        lease_s = self._config.lease_s
        if self._next_tick_s is not None and now > self._next_tick_s + lease_s / 4:
            _LOGGER.warning("this process slept late_s=%.3f", now - self._next_tick_s)
            for session in self._sessions.values():
                session.expires_at_s = now + lease_s
        for session in [s for s in self._sessions.values() if s.expires_at_s <= now]:
            self._end(session, SessionExpiredError)
        first_s = min((s.expires_at_s for s in self._sessions.values()), default=now + lease_s)
        self._next_tick_s = min(first_s, now + lease_s / 4)
        return self._next_tick_s - now

    # Requests with numbers

    def step(self, request: cpb.StepRequest, tenant: str) -> cpb.StepResult:
        """Apply receipts, then deferred tokens, then each operation; answer with one plan.

        Raises InvalidRequestError, StepOutOfOrderError or StepConflictError when the number is
        refused. When the step fails as a whole, raises what ``take_receipts`` and
        ``take_deferred_tokens`` raise, TooManyPlansInFlightError or InvalidRequestError.
        """
        return self._answer(request, tenant, lambda session: self._step(session, request))

    def submit_receipts(
        self, request: cpb.SubmitReceiptsRequest, tenant: str
    ) -> cpb.SubmitReceiptsResponse:
        """Apply receipts and deferred tokens. Raises as ``step``."""

        def run(session: Session) -> cpb.SubmitReceiptsResponse:
            self._take_past(session, request)
            pool = session.pool
            return cpb.SubmitReceiptsResponse(usage=pool.usage(), revision=pool.revision())

        return self._answer(request, tenant, run)

    def abort_plan(self, request: cpb.AbortPlanRequest, tenant: str) -> cpb.AbortPlanResponse:
        """Abort a plan and all in flight with it. Raises PlanReceiptedError, and as ``step``."""

        def run(session: Session) -> cpb.AbortPlanResponse:
            take_receipts(session, self._bounded(request.receipts))
            abort_from(session, request.plan_number)
            return cpb.AbortPlanResponse(sequences=states(session.sequences.values()))

        return self._answer(request, tenant, run)

    def resync(self, request: cpb.ResyncRequest, tenant: str) -> cpb.ResyncResponse:
        """Abort every plan in flight, and answer with all tables whole. Raises as ``step``."""

        def run(session: Session) -> cpb.ResyncResponse:
            take_receipts(session, self._bounded(request.receipts))
            abort_plans(session, next_plan=request.number)
            plan = Draft(session, request.number).finish()
            return cpb.ResyncResponse(sequences=states(session.sequences.values()), plan=plan)

        return self._answer(request, tenant, run)

    def _answer(self, request: Any, tenant: str, run: Callable[[Session], _Answer]) -> _Answer:
        """Run a request under its number, or repeat the answer that it got."""
        session = self._session(request.session, tenant)
        content = content_of(request)
        answer = session.numbers.repeated(request.number, content)
        if answer is not None:
            # A receipt is true whenever it arrives. One that is refused does not change the answer.
            try:
                take_receipts(session, self._bounded(request.receipts))
            except KvplaneError as error:
                _LOGGER.info(
                    "a repeated request brought a receipt that was refused: %s", error.reason
                )
            return cast(_Answer, answer.result())
        session.numbers.use()
        try:
            message = run(session)
        except KvplaneError as error:
            session.numbers.remember(content, None, error)
            raise
        session.numbers.remember(content, message)
        return message

    def _step(self, session: Session, request: cpb.StepRequest) -> cpb.StepResult:
        self._take_past(session, request)
        operations, most = request.operations, self._config.max_operations
        if len(operations) > most or num_items(operations) > most:
            raise InvalidRequestError(
                f"must have at most {most} items in all: send them in several steps",
                field="operations",
            )
        if session.resync_due or any(map(may_plan, operations)):
            self._check_plans_in_flight(session)
        draft = Draft(session, request.number)
        planner = Planner(
            session,
            draft,
            max_sequences=self._config.max_sequences,
            max_table_entries=self._config.max_table_entries,
        )
        results = [planner.run(i, operation) for i, operation in enumerate(operations)]
        pool = session.pool
        pool.counters.max_held_blocks = max(pool.counters.max_held_blocks, pool.device.num_held())
        return cpb.StepResult(
            results=results, plan=draft.finish(), usage=pool.usage(), revision=pool.revision()
        )

    def _take_past(
        self, session: Session, request: cpb.StepRequest | cpb.SubmitReceiptsRequest
    ) -> None:
        take_receipts(session, self._bounded(request.receipts))
        if request.HasField("deferred_tokens"):
            take_deferred_tokens(session, request.deferred_tokens, self._config.max_operations)

    def _bounded(self, receipts: Sequence[tpb.SignedPayload]) -> Sequence[tpb.SignedPayload]:
        most = self._config.max_operations
        if len(receipts) > most:
            raise InvalidRequestError(
                f"must be at most {most} receipts, not {len(receipts)}", field="receipts"
            )
        return receipts

    def _check_plans_in_flight(self, session: Session) -> None:
        num = len(session.plans)
        if num >= self._config.max_plans_in_flight:
            raise TooManyPlansInFlightError(
                f"{num} plans wait for their receipts: submit some before the next step"
            )

    # Queries

    def block_table(
        self, request: cpb.GetBlockTableRequest, tenant: str
    ) -> cpb.GetBlockTableResponse:
        """A sequence's blocks, and how many of its tokens are known."""
        session = self._session(request.session, tenant)
        sequence = session.sequence(request.sequence_id, field="sequence_id")
        generations = session.pool.tiers[sequence.tier].generations(sequence.table)
        blocks = tpb.Blocks(
            tier=sequence.tier,
            indices=columns.pack(INT32, sequence.table),
            generations=columns.pack(INT64, generations),
        )
        return cpb.GetBlockTableResponse(tables=[blocks], num_tokens=sequence.num_tokens)

    def lookup_prefix(
        self, request: cpb.LookupPrefixRequest, tenant: str
    ) -> cpb.LookupPrefixResponse:
        """How much of a prompt an admission would find cached now. Nothing is held."""
        session = self._session(request.session, tenant)
        token_ids = request.token_ids
        checks.token_ids(token_ids, at_least=1, field="token_ids")
        index = session.pool.device.index
        hits = index.match(session.root, token_ids)
        num_cached = min(len(hits) * session.pool.block_size, len(token_ids) // 4 - 1)
        return cpb.LookupPrefixResponse(
            num_cached_tokens=num_cached, hashes=b"".join(index.hashes(hits))
        )

    def describe_sequence(
        self, request: cpb.DescribeSequenceRequest, tenant: str
    ) -> cpb.DescribeSequenceResponse:
        """A sequence's positions and blocks."""
        session = self._session(request.session, tenant)
        sequence = session.sequence(request.sequence_id, field="sequence_id")
        return cpb.DescribeSequenceResponse(sequences=states([sequence]))

    def describe_pool(self, pool_id: str) -> cpb.DescribePoolResponse:
        """A pool, ready or not. Raises PoolNotFoundError."""
        pool = self._pool(pool_id)
        return pool.info(sum(len(session.sequences) for session in self._sessions_of(pool)))

    def list_pools(self) -> list[str]:
        """Ids of the pools that have registered, in order."""
        return sorted(self._pools)

    def check_integrity(self) -> None:
        """Raise AssertionError saying what is wrong, if anything is."""
        for pool in self._pools.values():
            integrity.check_pool(pool, self._sessions_of(pool))
        open_ids = [i for pool in self._pools.values() for i in pool.session_ids]
        assert sorted(open_ids) == sorted(self._sessions), "pools and the core differ in sessions"

    # Helpers

    def _pool(self, pool_id: str) -> Pool:
        if not pool_id:
            raise InvalidRequestError("is missing: it names a pool", field="pool_id")
        pool = self._pools.get(pool_id)
        if pool is None:
            raise PoolNotFoundError(f"no shard of pool {pool_id!r} has registered", field="pool_id")
        return pool

    def _session(self, ref: tpb.SessionRef, tenant: str) -> Session:
        """The tenant's open session, its lease renewed. Raises why it is not open."""
        self._check_incarnation(ref)
        session = self._sessions.get(ref.session_id)
        if session is None or session.tenant != tenant:
            raise self._ended.error(ref.session_id, tenant)
        self._renew(session)
        return session

    def _check_incarnation(self, ref: tpb.SessionRef) -> None:
        if ref.incarnation != self.incarnation:
            raise StaleIncarnationError(
                f"is not this control plane's, {self.incarnation}: open a session and admit again",
                field="session.incarnation",
            )

    def _sessions_of(self, pool: Pool) -> list[Session]:
        return [self._sessions[i] for i in pool.session_ids]

    def _unused_session_id(self) -> int:
        while True:
            session_id = self._new_session_id()
            if session_id not in self._sessions and not self._ended.knows(session_id):
                return session_id

    def _grant(self, session: Session) -> tpb.SignedPayload:
        """What the session may do at data planes, signed with the pool's key."""
        pool = session.pool
        payload = tpb.SessionGrant(
            version=protocol.PAYLOAD_VERSION,
            session=session.ref,
            ordinal=session.ordinal,
            pool_id=pool.id,
            shard_epochs=pool.epochs,
            tenant=session.tenant,
            layout_fingerprint=pool.layout.fingerprint,
            max_plans_in_flight=self._config.max_plans_in_flight,
        ).SerializeToString(deterministic=True)
        signature = signing.sign(pool.key, signing.GRANT, payload)
        return tpb.SignedPayload(type=signing.GRANT, payload=payload, signature=signature)

    def _renew(self, session: Session) -> None:
        session.expires_at_s = self._clock() + self._config.lease_s

    def _end_all(self, pool: Pool) -> None:
        """End the sessions of a pool, of which a shard has restarted."""
        for session in self._sessions_of(pool):
            self._end(session, StaleEpochError)

    def _end(self, session: Session, reason: type[KvplaneError]) -> None:
        session.end()
        del self._sessions[session.id]
        self._ended.add(session, reason)


def _require_short(value: str, most: int, field: str) -> None:
    if len(value) > most:
        raise InvalidRequestError(f"must have at most {most} characters", field=field)
