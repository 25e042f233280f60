"""The control plane's core: the metadata of every pool, behind one interface of messages.

Imports neither grpc nor torch. Single-threaded: it is only called from the event loop, and every
call but those that return ``Slices`` runs to its end. Invariant: ``check_integrity`` holds after
every call and every slice, also after one that raises.

    registration   register, report, disconnect, fence_done, files_forgotten, announce,
                   take_notified, take_outgoing, take_missed
    work           long work, a few milliseconds at a time
    sessions       open_session, renew_session, close_session, tick
    requests       step, abort_plans: in the order of their numbers, each
                   applying its receipts first; run in slices, for either of them
    prefixes       find_prefix, retain_prefix, forget_prefixes, follow: without a session
    queries        validate, list_sequences, pool_ids, list_pools, get_pool, list_sessions,
                   observe_pool, check_integrity
"""

from __future__ import annotations

import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, cast

import xxhash
from google.protobuf.message import Message

from control_plane import checks, limits, prefixes, queries
from control_plane.config import CoreConfig
from control_plane.observing import PoolObservation, observe
from control_plane.pools.layouts import layout_fingerprint, mismatch
from control_plane.pools.pool import Pool
from control_plane.pools.publications import MAX_NAMESPACE_CHARACTERS
from control_plane.registration.registration import Registration
from control_plane.sessions.session import Session
from control_plane.sessions.sessions import Sessions, random_session_id
from control_plane.sessions.silent_shards import lost_sessions
from control_plane.steps.answers import StepAnswer
from control_plane.steps.failures import add_error
from control_plane.steps.operations import Step, check_no_plan, read_operations
from control_plane.steps.plans import sign_grant
from control_plane.steps.requests import Request, Requests
from control_plane.watching import Watcher, Watchers
from kvplane.errors import (
    InvalidRequestError,
    MissingReceiptError,
    PoolNotFoundError,
    PoolNotReadyError,
    SessionExpiredError,
    SessionNotFoundError,
    TooManyPlansInFlightError,
)
from kvplane.slices import Slices, run_to_end
from kvplane.wire import signing
from kvplane.wire.error_messages import duration_of
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import pool_pb2 as ppb
from kvplane.wire.v1 import prefix_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

_LOGGER: Final = logging.getLogger(__name__)
_RETRY_DELAY_S: Final = 0.5
_MAX_CLIENT_NAME: Final = 128
_CHECKED_AT_A_TIME: Final = 256  # operations, which take a millisecond

_VALIDATED: Final = {"session", "operations", "traceparent", "validate_only"}
"""Fields that a request with ``validate_only`` may have."""
AnswerT = TypeVar("AnswerT", bound=Message)

_KEY: Final = re.compile(r"[!-~]{1,64}")


class ControlPlane:
    """Holds all pools and sessions of one control plane process."""

    def __init__(
        self,
        *,
        incarnation: int,
        config: CoreConfig,
        clock: Callable[[], float],
        new_key: Callable[[], bytes] = signing.new_key,
        new_session_id: Callable[[], int] = random_session_id,
    ) -> None:
        """``clock`` returns monotonic seconds, ``new_session_id`` random ids from 1 to 2^53 - 1."""
        self._config = config
        self._clock = clock
        self._pools: dict[str, Pool] = {}
        self.sessions = Sessions(
            config, incarnation=incarnation, clock=clock, new_session_id=new_session_id
        )
        self._next_tick_s: float | None = None
        registry = self._registration = Registration(
            self._pools, self.sessions, config=config, new_key=new_key
        )
        self.register, self.report = registry.register, registry.report
        self.disconnect, self.take_notified = registry.disconnect, registry.take_notified
        self.files_forgotten, self.has_work = registry.files_forgotten, registry.has_work
        self.has_announcements, self.announce = registry.has_announcements, registry.announce
        self.take_outgoing, self.take_missed = registry.take_outgoing, registry.take_missed
        self._touch = registry.touched.add
        self._watchers = Watchers(lambda: self.incarnation, limits.MAX_WATCHERS)
        self.unwatch, self.holds_key = self._watchers.remove, registry.holds_key
        self._requests = Requests(config, self.sessions)
        self._repeats = Repeats()

    @property
    def incarnation(self) -> int:
        """The control plane's incarnation, which is part of each session's reference."""
        return self.sessions.incarnation

    @incarnation.setter
    def incarnation(self, incarnation: int) -> None:
        self.sessions.incarnation = incarnation

    def fence_done(self, pool_id: str, shard_index: int, epoch: int, done: rpb.FenceDone) -> None:
        """Record that a shard has fenced a session. Raises PoolNotFoundError, StaleEpochError."""
        if pool_id in self._pools:
            self._pools[pool_id].set_time(self._clock())
        self._registration.fence_done(pool_id, shard_index, epoch, done)
        self.sessions.admission_of(self._pools[pool_id]).serve()

    def work(self) -> bool:
        """Continue long work for a few milliseconds: building pools, freeing forgotten prefixes,
        releasing ended sessions. Returns whether some is left.
        """
        is_left = self._registration.work()
        for admission in self.sessions.admissions():
            admission.serve()
        return is_left

    def take_news(self) -> list[tuple[int, cpb.News]]:
        """Return the news of each session that were neither pushed nor answered yet, with the
        session's id. They stay there for the session's next answer.
        """
        admissions = self.sessions.admissions()
        return [unsent for each in admissions for unsent in each.news.take_unsent()]

    # Sessions

    def open_session(
        self, request: cpb.OpenSessionRequest, tenant: str, idempotency_key: str = ""
    ) -> cpb.OpenSessionResponse:
        """Open a session for an engine and return its lease and its grant. ``idempotency_key``: as
        for ``Repeats.once``.

        Raises PoolNotFoundError, PoolNotReadyError, LayoutMismatchError, QuotaExceededError,
        InvalidRequestError.
        """
        return self._repeats.once(
            idempotency_key, tenant, request, lambda: self._open_session(request, tenant)
        )

    def _open_session(
        self, request: cpb.OpenSessionRequest, tenant: str
    ) -> cpb.OpenSessionResponse:
        pool = self._pool(request.pool_id)
        checks.short(request.client_name, _MAX_CLIENT_NAME, "client_name")
        checks.short(request.namespace, MAX_NAMESPACE_CHARACTERS, "namespace")
        fingerprint = layout_fingerprint(request.layout, field="layout")
        if not pool.ready:
            raise PoolNotReadyError(
                f"pool {pool.id!r} cannot be used yet: {pool.shards.what_is_missing()}",
                retry_delay_s=_RETRY_DELAY_S,
            )
        if fingerprint != pool.layout.fingerprint:
            raise mismatch(request.layout, pool.layout, pool.id)
        session = self.sessions.open(pool, request, tenant)
        self._touch(pool)
        return cpb.OpenSessionResponse(
            session=session.ref,
            time_to_live=duration_of(self._config.lease_s),
            max_plans_in_flight=self._config.max_plans_in_flight,
            grant=sign_grant(session, self._config.max_plans_in_flight),
            shards=pool.shards.infos(),
        )

    def renew_session(self, session: tpb.SessionRef, tenant: str) -> float:
        """Renew a session's lease; returns how many seconds it now runs."""
        self._session(session, tenant)
        return self._config.lease_s

    def close_session(self, session: tpb.SessionRef, tenant: str) -> None:
        """End a session. Closing one that has ended already changes nothing."""
        self.sessions.check_incarnation(session)
        if not self.sessions.has_ended(session.session_id, tenant):
            self.sessions.end(self._session(session, tenant), SessionNotFoundError)

    def tick(self) -> float:
        """End the sessions whose leases ran out. Returns the seconds until the next call is due, at
        most a quarter of a lease.

        A call that is late by more than another quarter means that this process slept. Messages
        that would have renewed leases may then wait unread, or their senders may have slept too, so
        every lease starts again from now.
        """
        now = self._clock()
        lease_s = self._config.lease_s
        if self._next_tick_s is not None and now > self._next_tick_s + lease_s / 4:
            _LOGGER.warning("this process slept late_s=%.3f", now - self._next_tick_s)
            for session in self.sessions.by_id.values():
                session.expires_at_s = now + lease_s
        self.sessions.expire(now)
        for pool_id in self._registration.forget_lost_pools(now):
            self.sessions.forget(pool_id)
        leases = (session.expires_at_s for session in self.sessions.by_id.values())
        first_s = min(leases, default=now + lease_s)
        self._next_tick_s = min(first_s, now + lease_s / 4)
        return min(self._next_tick_s - now, self._tick_queues(now))

    def _tick_queues(self, now_s: float) -> float:
        """Run the admission queues of all pools, and end sessions that owe receipts; returns the
        seconds until the next call is due.
        """
        delay_s = math.inf
        for pool in self._pools.values():
            pool.set_time(now_s)
            self._touch(pool)
            pool_delay_s, overdue = self.sessions.admission_of(pool).tick()
            delay_s = min(delay_s, pool_delay_s)
            for session in overdue:
                self.sessions.end(session, SessionExpiredError)
            open_sessions = [*self.sessions.of(pool)]
            for session in lost_sessions(pool, open_sessions, limits.RECEIPT_TIMEOUT_S):
                self.sessions.end(session, MissingReceiptError)
        return delay_s

    # Requests with numbers

    def step(self, request: cpb.StepRequest, tenant: str) -> cpb.StepResponse:
        """Apply a step's receipts, then its deferred tokens, then each operation; return the answer
        with one plan.

        Raises InvalidRequestError, StepOutOfOrderError or StepConflictError when the number is
        refused. When the step fails as a whole, raises what ``take_receipts`` and
        ``take_deferred_tokens`` raise, TooManyPlansInFlightError or InvalidRequestError.
        """
        answer: StepAnswer = run_to_end(self.run(request, tenant))
        return cpb.StepResponse.FromString(answer.step)

    def abort_plans(self, request: cpb.AbortPlansRequest, tenant: str) -> cpb.AbortPlansResponse:
        """Abort all of a session's plans in flight. Raises PlanReceiptedError, and as ``step``."""
        return cast(cpb.AbortPlansResponse, run_to_end(self.run(request, tenant)))

    def run(self, request: Request, tenant: str) -> Slices[Any]:
        """Run a numbered request (Step or AbortPlans) in slices. Between slices other sessions may
        make any call, and the request's own session none. Returns the answer's message, which for a
        Step is a StepAnswer.
        """
        return self._requests.run(self._session(request.session, tenant), request)

    # Prefixes

    def find_prefix(
        self, request: prefix_pb2.FindPrefixRequest, tenant: str
    ) -> Slices[prefix_pb2.FindPrefixResponse]:
        """Return how much of a prompt each pool has cached. Any call may come between the slices.
        Raises PoolNotFoundError, and as ``prefixes.find``.
        """
        ids = [*request.pool_ids] or sorted(self._pools)
        named = [self._pool(pool_id, f"pool_ids[{n}]") for n, pool_id in enumerate(ids)]
        pools = sorted(set(named), key=lambda pool: pool.id)
        return (yield from prefixes.find(pools, request, tenant))

    def retain_prefix(
        self, request: prefix_pb2.RetainPrefixRequest, tenant: str, idempotency_key: str = ""
    ) -> prefix_pb2.RetainPrefixResponse:
        """Protect a prompt's cached prefix from eviction for some time, or end that. Raises
        PoolNotFoundError, and as ``prefixes.retain`` and ``Repeats.once``.
        """
        return self._repeats.once(
            idempotency_key,
            tenant,
            request,
            lambda: prefixes.retain(self._changing(request.pool_id), request, tenant),
        )

    def forget_prefixes(
        self, request: prefix_pb2.ForgetPrefixesRequest, tenant: str, idempotency_key: str = ""
    ) -> prefix_pb2.ForgetPrefixesResponse:
        """Remove prefixes from the index. Raises PoolNotFoundError, and as ``prefixes.forget`` and
        ``Repeats.once``.
        """
        return self._repeats.once(
            idempotency_key, tenant, request, lambda: self._forget_prefixes(request, tenant)
        )

    def _forget_prefixes(
        self, request: prefix_pb2.ForgetPrefixesRequest, tenant: str
    ) -> prefix_pb2.ForgetPrefixesResponse:
        pool = self._changing(request.pool_id)
        response = prefixes.forget(pool, request, tenant)
        self.sessions.admission_of(pool).serve()
        return response

    def watch(
        self,
        request: prefix_pb2.WatchPrefixesRequest,
        tenant: str,
        wake: Callable[[], None],
        payer: str = "",
    ) -> Watcher:
        """Watch the changes of a pool's prefix index until ``unwatch``; see ``Watchers.add``."""
        return self._watchers.add(self._pool(request.pool_id), request, tenant, wake, payer)

    # Queries

    def validate(self, request: cpb.StepRequest, tenant: str) -> Slices[cpb.StepResponse]:
        """Answer each item as if it were the only one of a step made now, without changing
        anything. An operation whose step would raise TooManyPlansInFlightError fails with that.
        Does not renew the lease. Between the slices any call may come but a request of this session
        that runs in slices. Raises InvalidRequestError as ``step`` does, and for fields that such a
        request may not have; at any slice also why the session is not open.
        """
        for field, _ in request.ListFields():
            if field.name not in _VALIDATED:
                raise InvalidRequestError("must be absent with validate_only", field=field.name)
        response = cpb.StepResponse()
        session = self.sessions.get(request.session, tenant)
        operations = read_operations(request.operations, self._config.max_operations)
        for begin in range(0, len(operations), _CHECKED_AT_A_TIME):
            if begin:
                yield
                session = self.sessions.get(request.session, tenant)
            admission = self.sessions.admission_of(session.pool)
            step = Step(session, admission, check_as=session.numbers.last + 1)
            for i in range(begin, min(begin + _CHECKED_AT_A_TIME, len(operations))):
                result = response.results.add()
                if len(session.plans) >= self._config.max_plans_in_flight:
                    try:
                        check_no_plan(session, [operations[i]])
                    except TooManyPlansInFlightError as error:
                        add_error(result, "", error)
                        continue
                yield from step.run(i, operations[i], result)
                if not operations[i][0].is_checked_with_answer:
                    result.CopyFrom(cpb.OperationResult(failures=result.failures))
        return response

    def list_sequences(
        self, request: cpb.ListSequencesRequest, tenant: str
    ) -> cpb.ListSequencesResponse:
        """List a session's sequences, or those that are named. Does not renew the lease."""
        return queries.list_sequences(self.sessions.get(request.session, tenant), request)

    def pool_ids(self) -> list[str]:
        """Return the ids of the pools that have registered, in ascending order."""
        return sorted(self._pools)

    def list_pools(self, request: ppb.ListPoolsRequest) -> ppb.ListPoolsResponse:
        """List the pools that have registered."""
        return queries.list_pools(self.pool_ids(), request)

    def get_pool(self, pool_id: str) -> ppb.GetPoolResponse:
        """Describe a pool, ready or not. Raises PoolNotFoundError."""
        return self._pool(pool_id).info()

    def list_sessions(
        self, request: ppb.ListSessionsRequest, tenant: str
    ) -> ppb.ListSessionsResponse:
        """List the tenant's open sessions. Raises PoolNotFoundError."""
        pool = self._pool(request.pool_id)
        own = [each for each in self.sessions.of(pool) if each.tenant == tenant]
        return queries.list_sessions(own, request, self._clock())

    def view_pools(self, tenant: str) -> list[dict[str, Any]]:
        """Return the pools as JSON values for the status page, with this tenant's sessions only."""
        pools = map(self._pool, self._pools)
        return [queries.view(pool, self.sessions.of(pool), tenant) for pool in pools]

    def observe_pool(self, pool_id: str) -> PoolObservation:
        """Return a snapshot of a pool, for metrics. Raises PoolNotFoundError."""
        pool = self._pool(pool_id)
        return observe(pool, self.sessions.of(pool), self._clock())

    def check_integrity(self) -> None:
        """Check all pools' invariants. Raises AssertionError naming the first that is broken."""
        for pool in self._pools.values():
            queries.check_pool(pool, self.sessions.of(pool))
            self.sessions.admission_of(pool).check_integrity()
        open_ids = [s.id for pool in self._pools.values() for s in self.sessions.of(pool)]
        assert sorted(open_ids) == sorted(self.sessions.by_id), "pools differ in sessions"

    # Helpers

    def _pool(self, pool_id: str, field: str = "pool_id") -> Pool:
        """Return a pool, after setting its clock to the present time: pins may have ended. Raises
        InvalidRequestError or PoolNotFoundError naming ``field``.
        """
        if not pool_id:
            raise InvalidRequestError("is missing: it names a pool", field=field)
        pool = self._pools.get(pool_id)
        if pool is None:
            raise PoolNotFoundError(f"{pool_id!r} is not registered: see ListPools", field=field)
        pool.set_time(self._clock())
        return pool

    def _changing(self, pool_id: str) -> Pool:
        """Return a pool that is about to change."""
        pool = self._pool(pool_id)
        self._touch(pool)
        return pool

    def _session(self, ref: tpb.SessionRef, tenant: str) -> Session:
        """Return the tenant's open session and renew its lease. Raises why it is not open."""
        session = self.sessions.get(ref, tenant)
        self.sessions.renew(session)
        self._touch(session.pool)
        return session


class _Done(NamedTuple):
    """A request that was done: a digest of it, its answer, and that one's size."""

    content: bytes
    answer: Any
    num_bytes: int


class Repeats:
    """The requests without a number that were done last, by tenant and idempotency key.

    As with the HTTP field Idempotency-Key (draft-ietf-httpapi-idempotency-key-header), the key
    names what its sender wants done once. A request that was refused may be sent again with its
    key.

    Invariants: at most ``MAX_IDEMPOTENCY_KEYS`` are remembered, and at most
    ``MAX_IDEMPOTENT_ANSWER_BYTES`` of their answers.
    """

    def __init__(self) -> None:
        self._done: OrderedDict[tuple[str, str], _Done] = OrderedDict()
        self._num_bytes = 0

    def once(self, key: str, tenant: str, request: Any, do: Callable[[], AnswerT]) -> AnswerT:
        """Do a request unless a copy of it was done; then return that one's answer. An empty key
        does each. Raises what ``do`` raises, and InvalidRequestError naming ``idempotency-key``.
        """
        if not key:
            return do()
        if not _KEY.fullmatch(key):
            raise InvalidRequestError(
                "must be 1 to 64 visible characters of ASCII", field="idempotency-key"
            )
        encoded = request.SerializeToString(deterministic=True)
        content = xxhash.xxh3_128(type(request).__name__.encode() + encoded).digest()
        earlier = self._done.get((tenant, key))
        if earlier is None:
            answer = do()
            self._remember((tenant, key), _Done(content, answer, answer.ByteSize()))
            return answer
        if earlier.content != content:
            raise InvalidRequestError(
                "was of another request: make one up for each", field="idempotency-key"
            )
        again: AnswerT = earlier.answer
        return again

    def _remember(self, key: tuple[str, str], done: _Done) -> None:
        self._done[key] = done
        self._num_bytes += done.num_bytes
        while (
            len(self._done) > limits.MAX_IDEMPOTENCY_KEYS
            or self._num_bytes > limits.MAX_IDEMPOTENT_ANSWER_BYTES
        ):
            _, oldest = self._done.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
