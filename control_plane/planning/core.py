"""The control plane's core: the metadata of every pool, behind one interface.

Knows neither grpc nor protobuf nor torch. Single-threaded: it is only ever called from the event
loop, and every call runs to its end. Invariant: a call that raises has changed nothing but leases
and what its receipts say; ``check_integrity`` holds after every call.

    registration   register, report, disconnect, fence_done, take_outgoing     recovery.py pool.py
    sessions       open_session, renew_session, close_session, tick            sessions.py
    steps          step, abort_plan, resync             planner.py receipts.py publish.py abort.py
    questions      block_table, lookup_prefix, describe_*, check_integrity     integrity.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from control_plane.planning import checks, integrity, recovery
from control_plane.planning.abort import abort_plan, abort_plans
from control_plane.planning.model import (
    Append,
    BlockRef,
    CoreConfig,
    Hello,
    LateTokens,
    OpenedSession,
    Operation,
    OperationResult,
    Outgoing,
    Plan,
    PoolInfo,
    PrefixInfo,
    Receipt,
    ReportedBlock,
    ResyncOutcome,
    SealedPlan,
    SequenceState,
    Status,
    StepOutcome,
    Welcome,
)
from control_plane.planning.planner import Planner
from control_plane.planning.pool import Pool, ShardState
from control_plane.planning.publish import root_of
from control_plane.planning.receipts import (
    apply_late_tokens,
    apply_receipts,
    num_in_flight,
    validate_late_tokens,
    validate_receipts,
)
from control_plane.planning.session import EndedSessions, Session
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    LayoutMismatchError,
    NeverFitsError,
    PoolFullError,
    PoolNotFoundError,
    PoolNotReadyError,
    QuotaExceededError,
    SessionExpiredError,
    SessionNotFoundError,
    StaleEpochError,
    StaleIncarnationError,
    StepConflictError,
    StepOutOfOrderError,
    TooManyPlansInFlightError,
)
from kvplane.signing import new_key as random_key

_LOGGER: Final = logging.getLogger(__name__)
_RETRY_DELAY_S: Final = 0.5
_MAX_CLIENT_NAME: Final = 128


class ControlPlane:
    """All pools and sessions of one control plane process."""

    def __init__(
        self,
        *,
        incarnation: int,
        config: CoreConfig,
        clock: Callable[[], float],
        seal: Callable[[bytes, Plan], SealedPlan],
        new_key: Callable[[], bytes] = random_key,
    ) -> None:
        """``clock`` gives seconds, never falling; ``seal`` signs a plan with a pool's key."""
        self.incarnation = incarnation
        self._config = config
        self._clock = clock
        self._seal = seal
        self._new_key = new_key
        self._pools: dict[str, Pool] = {}
        self._sessions: dict[int, Session] = {}
        self._ended = EndedSessions(max(4096, 4 * config.max_sessions))
        self._last_session_id = 0
        self._next_tick_s: float | None = None

    # Registration

    def register(self, hello: Hello) -> Welcome:
        """Take a shard in, or back. Unless it is resumed, it must report next.

        Raises InvalidRequestError, LayoutMismatchError, StaleIncarnationError (it has seen a later
        control plane than this one).
        """
        recovery.validate_hello(hello)
        if hello.incarnation > self.incarnation:
            raise StaleIncarnationError(
                f"{hello.incarnation} is later than this control plane's {self.incarnation}",
                field="hello.incarnation",
            )
        pool = self._pools.get(hello.pool_id)
        if pool is None:
            pool = Pool(hello, self._new_key(), self._config.watermark)
            self._pools[hello.pool_id] = pool
        elif recovery.can_resume(pool, hello, self.incarnation):
            shard = pool.shards[hello.shard.index]
            shard.hello, shard.connected = hello, True
            pool.recall(hello.shard.index)
            return Welcome(self.incarnation, resumed=True, key=pool.key)
        else:
            self._restart_shard(pool, hello)
        pool.shards[hello.shard.index] = ShardState(hello)
        return Welcome(self.incarnation, resumed=False, key=pool.key)

    def report(
        self,
        pool_id: str,
        shard_index: int,
        epoch: int,
        blocks: Sequence[ReportedBlock],
        *,
        last: bool,
        max_session_id: int,
    ) -> None:
        """Take a part of what a shard holds.

        Raises PoolNotFoundError, StaleEpochError, InvalidRequestError.
        """
        pool, shard = self._shard(pool_id, shard_index, epoch)
        if shard.reported:
            raise InvalidRequestError("is complete", field="report")
        if not 0 <= max_session_id <= checks.MAX_REPORTED:
            raise InvalidRequestError("must be from 0 to 2^62", field="report.max_session_id")
        recovery.accept_report(pool, shard, blocks, last=last)
        self._last_session_id = max(self._last_session_id, max_session_id)
        recovery.build_if_complete(pool)

    def disconnect(self, pool_id: str, shard_index: int, epoch: int) -> None:
        """A shard's stream has ended. Sessions go on: their plans travel by the engines."""
        pool = self._pools.get(pool_id)
        shard = pool.shards.get(shard_index) if pool is not None else None
        if shard is not None and shard.hello.epoch == epoch:
            shard.connected = False
            shard.outgoing.clear()

    def fence_done(self, pool_id: str, shard_index: int, epoch: int, session_id: int) -> None:
        """A shard has fenced an ended session. Raises PoolNotFoundError, StaleEpochError."""
        pool, _ = self._shard(pool_id, shard_index, epoch)
        pool.fence_done(session_id, shard_index)
        recovery.build_if_complete(pool)

    def take_outgoing(self, pool_id: str, shard_index: int) -> list[Outgoing]:
        """What a shard is to be told, in order; each is given once, and again on a resume."""
        pool = self._pools.get(pool_id)
        shard = pool.shards.get(shard_index) if pool is not None else None
        if shard is None:
            return []
        outgoing = list(shard.outgoing)
        shard.outgoing.clear()
        return outgoing

    # Sessions

    def open_session(
        self, pool_id: str, layout_fingerprint: bytes, tenant: str, client_name: str = ""
    ) -> OpenedSession:
        """Lease from a pool.

        Raises PoolNotFoundError, PoolNotReadyError, LayoutMismatchError, QuotaExceededError,
        InvalidRequestError.
        """
        pool = self._pool(pool_id)
        if len(client_name) > _MAX_CLIENT_NAME:
            raise InvalidRequestError("must have at most 128 characters", field="client_name")
        if not pool.ready:
            raise PoolNotReadyError(
                f"pool {pool_id!r} waits for its shards", retry_delay_s=_RETRY_DELAY_S
            )
        if layout_fingerprint != pool.layout.fingerprint:
            raise LayoutMismatchError("is not the pool's", field="layout")
        if len(self._sessions) >= self._config.max_sessions:
            raise QuotaExceededError(f"{self._config.max_sessions} sessions are open")
        self._last_session_id += 1
        session = Session(
            self._last_session_id, pool, tenant, client_name, self._clock() + self._config.lease_s
        )
        self._sessions[session.id] = session
        pool.open(session.id)
        return OpenedSession(
            session_id=session.id,
            pool_id=pool.id,
            tenant=tenant,
            key=pool.key,
            shard_epochs=pool.epochs,
            incarnation=self.incarnation,
            time_to_live_s=self._config.lease_s,
            max_plans_in_flight=self._config.max_plans_in_flight,
            layout=pool.layout,
            shards=pool.shard_infos(),
            num_device_blocks=pool.device.num_blocks,
            num_host_blocks=pool.host.num_blocks,
        )

    def renew_session(self, session_id: int, tenant: str) -> float:
        """Renew a lease; returns how long it now runs, s."""
        self._session(session_id, tenant)
        return self._config.lease_s

    def close_session(self, session_id: int, tenant: str) -> None:
        """End a lease. Repeating it, or closing one that ended otherwise, changes nothing."""
        session = self._sessions.get(session_id)
        if session is not None and session.tenant == tenant:
            self._end(session, SessionNotFoundError)
        elif session is not None or not 0 < session_id <= self._last_session_id:
            raise SessionNotFoundError(f"session {session_id} is not open", field="session_id")

    def pool_key(self, session_id: int, tenant: str) -> bytes:
        """The key that signs the session's receipts."""
        return self._session(session_id, tenant).pool.key

    def tick(self) -> float:
        """End the sessions whose leases ran out; returns the seconds until it should come again, at
        most a quarter of a lease.

        When it comes later than that by another quarter, this process slept, and messages that
        would have renewed leases may wait unread, or their senders slept too: then every lease
        runs anew from now instead.
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

    # Steps

    def step(
        self,
        session_id: int,
        tenant: str,
        number: int,
        operations: Sequence[Operation],
        receipts: Sequence[Receipt] = (),
        late_tokens: Sequence[LateTokens] = (),
        *,
        content: bytes,
        atomic: bool = False,
    ) -> StepOutcome:
        """Apply receipts, then late tokens, then each operation by itself; answer with one plan.

        ``number`` 0 brings receipts and late tokens alone. ``content`` is a digest of the request:
        a repeat with the same content gets the same answer. ``atomic``: there is one operation, and
        when it is not done the step raises why and its number is not used up. Raises
        StepConflictError, StepOutOfOrderError, TooManyPlansInFlightError, InvalidRequestError, and
        what receipts raise; then nothing has changed.
        """
        session = self._session(session_id, tenant)
        if number:
            answer = self._repeat(session, number, b"step" + content)
            if isinstance(answer, StepOutcome):
                return answer
        elif operations:
            raise InvalidRequestError("step 0 takes none", field="operations")
        if len(operations) > self._config.max_operations:
            raise InvalidRequestError(
                f"must be at most {self._config.max_operations}", field="operations"
            )
        if atomic and len(operations) != 1:
            raise InvalidRequestError("must be one", field="operations")
        highest = validate_receipts(session, receipts, self.incarnation)
        validate_late_tokens(session, late_tokens)
        if number and (session.resync_due or any(map(_may_plan, operations))):
            self._check_plans_in_flight(num_in_flight(session, highest))

        apply_receipts(session, highest)
        apply_late_tokens(session, late_tokens)
        if not number:
            return StepOutcome(0, (), None, session.pool.usage())
        planner = self._planner(session, number)
        results = tuple(planner.run(i, operation) for i, operation in enumerate(operations))
        if atomic and results[0].status is not Status.OK:
            raise _why_not(results[0])
        plan = self._make_plan(session, number, planner)
        outcome = StepOutcome(number, results, plan, session.pool.usage())
        session.remember(number, b"step" + content, outcome, self._config.max_plans_in_flight)
        return outcome

    def abort_plan(self, session_id: int, tenant: str, plan_number: int) -> list[SequenceState]:
        """Abort a plan and all in flight with it; returns every sequence as it is now.

        Raises PlanReceiptedError, InvalidRequestError.
        """
        session = self._session(session_id, tenant)
        abort_plan(session, plan_number)
        return session.states()

    def resync(self, session_id: int, tenant: str, number: int, *, content: bytes) -> ResyncOutcome:
        """A step that aborts every plan in flight and answers with all tables whole.

        Raises StepConflictError, StepOutOfOrderError, InvalidRequestError.
        """
        session = self._session(session_id, tenant)
        if number < 1:
            raise InvalidRequestError("must be at least 1", field="number")
        answer = self._repeat(session, number, b"resync" + content)
        if isinstance(answer, ResyncOutcome):
            return answer
        abort_plans(session)
        plan = self._make_plan(session, number, self._planner(session, number))
        assert plan is not None, "a resync always has a plan"
        outcome = ResyncOutcome(session.states(), plan)
        session.remember(number, b"resync" + content, outcome, self._config.max_plans_in_flight)
        return outcome

    # Questions

    def block_table(
        self, session_id: int, tenant: str, sequence_id: int
    ) -> tuple[tuple[BlockRef, ...], int]:
        """A sequence's blocks, and how many of its tokens are known."""
        session = self._session(session_id, tenant)
        sequence = session.sequence(sequence_id, field="sequence_id")
        return tuple(session.pool.refs(sequence.tier, sequence.table)), sequence.num_tokens

    def lookup_prefix(self, session_id: int, tenant: str, token_ids: bytes) -> PrefixInfo:
        """How much of a prompt an admission would find cached now. Nothing is held."""
        session = self._session(session_id, tenant)
        checks.token_ids(token_ids, at_least=1, field="token_ids")
        index = session.pool.device.index
        hits = index.match(root_of(session.tenant), token_ids)
        num_cached = min(len(hits) * session.pool.block_size, len(token_ids) // 4 - 1)
        return PrefixInfo(num_cached, tuple(index.hashes(hits)))

    def describe_sequence(self, session_id: int, tenant: str, sequence_id: int) -> SequenceState:
        """How far a sequence is."""
        session = self._session(session_id, tenant)
        return session.sequence(sequence_id, field="sequence_id").state()

    def describe_pool(self, pool_id: str) -> PoolInfo:
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

    # What the above share

    def _pool(self, pool_id: str) -> Pool:
        pool = self._pools.get(pool_id)
        if pool is None:
            raise PoolNotFoundError(f"no shard of pool {pool_id!r} has registered", field="pool_id")
        return pool

    def _shard(self, pool_id: str, shard_index: int, epoch: int) -> tuple[Pool, ShardState]:
        pool = self._pool(pool_id)
        shard = pool.shards.get(shard_index)
        if shard is None or shard.hello.epoch != epoch:
            raise StaleEpochError(f"shard {shard_index} is not of epoch {epoch}")
        return pool, shard

    def _session(self, session_id: int, tenant: str) -> Session:
        """The tenant's open session, its lease renewed. Raises why it is not open."""
        session = self._sessions.get(session_id)
        if session is None:
            raise self._ended.error(session_id, tenant)
        if session.tenant != tenant:
            raise SessionNotFoundError(f"session {session_id} is not open", field="session_id")
        session.expires_at_s = self._clock() + self._config.lease_s
        return session

    def _sessions_of(self, pool: Pool) -> list[Session]:
        return [self._sessions[i] for i in pool.session_ids]

    def _end(self, session: Session, reason: type[KvplaneError]) -> None:
        session.end()
        del self._sessions[session.id]
        self._ended.add(session, reason)

    def _restart_shard(self, pool: Pool, hello: Hello) -> None:
        """Another process, or one that knows nothing of us, takes the shard's place."""
        recovery.check_same_pool(pool, hello)
        for session in self._sessions_of(pool):
            self._end(session, StaleEpochError)
        recovery.restart(pool, hello, self._new_key)

    def _repeat(
        self, session: Session, number: int, content: bytes
    ) -> StepOutcome | ResyncOutcome | None:
        """The answer given to this number, or None when it is the next one."""
        if number == session.last_number + 1:
            return None
        remembered = session.remembered(number)
        if remembered is None:
            raise StepOutOfOrderError(
                f"step {session.last_number + 1} is next, not {number}", field="number"
            )
        if remembered[0] != content:
            raise StepConflictError(f"step {number} came with other content", field="number")
        return remembered[1]

    def _check_plans_in_flight(self, num_plans: int) -> None:
        if num_plans >= self._config.max_plans_in_flight:
            raise TooManyPlansInFlightError(f"{num_plans} plans wait for receipts")

    def _planner(self, session: Session, number: int) -> Planner:
        return Planner(
            session,
            number,
            incarnation=self.incarnation,
            max_sequences=self._config.max_sequences,
        )

    def _make_plan(self, session: Session, number: int, planner: Planner) -> SealedPlan | None:
        """Seal the step's plan, if it has one. From here on its number is used up."""
        session.last_number = number
        counters, device = session.pool.counters, session.pool.device
        counters.max_held_blocks = max(counters.max_held_blocks, device.num_held())
        made = planner.finish()
        if made is None:
            return None
        plan, record = made
        sealed = self._seal(session.pool.key, plan)
        record.digest = sealed.digest
        session.plans[number] = record
        session.last_plan = number
        session.resync_due = False
        return sealed


def _may_plan(operation: Operation) -> bool:
    """Whether the operation can change what the data plane knows."""
    return not (isinstance(operation, Append) and operation.num_slots == 0)


def _why_not(result: OperationResult) -> KvplaneError:
    """What a call of one operation raises when it was not done."""
    if result.error is not None:
        return result.error
    shortage = result.shortage
    assert shortage is not None, "an operation without a shortage is done or has failed"
    text = (
        f"{shortage.num_blocks_needed} blocks of the {shortage.tier.value} tier are needed, "
        f"{shortage.num_blocks_available} can be had, {shortage.num_blocks_pending} are pending"
    )
    return (PoolFullError if result.status is Status.LATER else NeverFitsError)(text)
