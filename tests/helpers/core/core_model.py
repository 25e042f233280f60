"""A naive model of the core's surroundings: its data planes, and engines that know tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane.config import CoreConfig
from control_plane.core import ControlPlane
from control_plane.observing import PoolObservation
from kvplane import ops
from kvplane.errors import KvplaneError, StepOutOfOrderError
from kvplane.layout import Layout
from kvplane.prefixes import ForgetScope
from kvplane.results import SequenceState, error_of, news_of, sequence_states
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import pool_pb2
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_beliefs import ModelSequence, believe, believe_grants
from tests.helpers.core.core_data_plane import DataPlane
from tests.helpers.core.core_messages import DEVICE, LAYOUT, POOL, BlockId, pack
from tests.helpers.core.core_prefixes import forget, num_cached
from tests.helpers.outcomes import is_refused

OK, LATER, NEVER, FAILED = (
    cpb.ITEM_STATUS_UNSPECIFIED,
    cpb.ITEM_STATUS_LATER,
    cpb.ITEM_STATUS_NEVER,
    cpb.ITEM_STATUS_FAILED,
)


class Clock:
    """Seconds, which pass only when a test adds them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """One core and the data planes of one pool."""

    def __init__(
        self,
        *,
        num_shards: int = 1,
        num_device: int = 16,
        num_host: int = 8,
        config: CoreConfig | None = None,
        layout: Layout = LAYOUT,
    ) -> None:
        self.clock = Clock()
        self.config = config or CoreConfig(watermark=0.0)
        self.layout = layout
        self.incarnation = 1
        self._random = random.Random(1)
        self.core = self._core()
        self.epoch = 100
        self.shards = [
            DataPlane(self, i, num_shards, num_device, num_host) for i in range(num_shards)
        ]
        for shard in self.shards:
            shard.join()

    def _core(self) -> ControlPlane:
        return ControlPlane(
            incarnation=self.incarnation,
            config=self.config,
            clock=self.clock,
            new_session_id=lambda: self._random.randrange(1, 2**53),
        )

    def restart_control_plane(self) -> None:
        """Start another process with a higher incarnation; every shard registers and reports."""
        self.incarnation += 1
        self.core = self._core()
        for shard in self.shards:
            shard.join()

    def pump(self) -> None:
        """Deliver all waiting messages to every data plane, and its answers."""
        for shard in self.shards:
            shard.pump()

    def pass_time(self, seconds: float, *engines: Engine) -> None:
        """Pass time in ticks so short that the core doesn't conclude that it slept; the leases of
        these engines are renewed.
        """
        self.core.tick()
        for _ in range(round(seconds / 0.25)):
            self.clock.now += 0.25
            self.core.tick()
            for engine in engines:
                engine.renew()

    def engine(self, tenant: str = "tenant", namespace: str = "") -> Engine:
        """Return a new engine with an open session."""
        return Engine(self, tenant, namespace)

    def pool(self) -> pool_pb2.GetPoolResponse:
        return self.core.get_pool(POOL)

    def observed(self) -> PoolObservation:
        return self.core.observe_pool(POOL)

    def usage(self, tier: int = DEVICE) -> dict[str, int]:
        """Return the blocks of a tier by state."""
        (usage,) = (usage for usage in self.pool().usage if usage.tier == tier)
        return {
            "free": usage.num_free_blocks,
            "cached": usage.num_cached_blocks,
            "held": usage.num_held_blocks,
            "retired": usage.num_retired_blocks,
        }


@dataclass
class MadePlan:
    """A plan that an engine got, and the shards that have run it."""

    signed: tpb.SignedPayload
    plan: plan_pb2.Plan
    ran_on: set[int] = field(default_factory=set)

    @property
    def digest(self) -> bytes:
        return signing.digest(self.signed.payload)


@dataclass(frozen=True)
class Sent:
    """A request with a number, and its outcome."""

    method: str
    request: Any
    answer: Any
    error: KvplaneError | None


class Engine:
    """One client: numbers its requests, runs its plans in order, keeps its receipts."""

    def __init__(self, world: World, tenant: str, namespace: str = "") -> None:
        self.world = world
        self.tenant = tenant
        self.owner = (tenant, namespace)
        request = cpb.OpenSessionRequest(
            pool_id=POOL, layout=LAYOUT.to_proto(), namespace=namespace, client_name="engine"
        )
        self.opened = world.core.open_session(request, tenant)
        self.ref = self.opened.session
        self.id = self.ref.session_id
        self.number = 0
        self.sequences: dict[int, ModelSequence] = {}
        self.waiting: dict[int, tuple[int, cpb.Admit]] = {}
        self.num_learned = (0, 0)  # grants and cuts believed before an answer reported them
        self.queue: list[MadePlan] = []
        self.receipts: list[tpb.SignedPayload] = []
        self.sent: list[Sent] = []

    # Requests

    def call(self, method: str, request: Any) -> Any:
        """Send a request under the next number, which is used up whatever its outcome."""
        self.number += 1
        request.session.CopyFrom(self.ref)
        request.number = self.number
        if self.id in self.world.core.sessions.by_id:
            self.learn()
        try:
            answer = getattr(self.world.core, method)(request, self.tenant)
        except KvplaneError as error:
            is_found = not error.field.startswith("session.")
            assert error.next_number == (self.number + 1 if is_found else 0)
            self.sent.append(Sent(method, request, None, error))
            raise
        self.sent.append(Sent(method, request, answer, None))
        return answer

    def repeat(self, sent: Sent) -> None:
        """Send a request again: it gets the same answer, or none, and changes nothing."""
        before = self.everything()
        num_kept = self.world.config.max_plans_in_flight + 1
        run: Callable[[Any, str], Any] = getattr(self.world.core, sent.method)
        try:
            answer = run(sent.request, self.tenant)
        except StepOutOfOrderError as error:
            assert sent.request.number <= self.number - num_kept, "an answer was forgotten"
            assert error.next_number == self.number + 1
        except KvplaneError as error:
            assert sent.error is not None, f"answered at first, then {error!r}"
            assert error.next_number == sent.request.number + 1
            assert str(error) == str(sent.error)
        else:
            assert answer == sent.answer
        assert self.everything() == before, "a repeat changed something"

    def everything(self) -> tuple[Any, ...]:
        """Return all state that requests of this session could change."""
        self.learn()
        states = [self.state(i) for i in self.sequences]
        session = self.world.core.sessions.by_id[self.id]
        seen = self.world.observed()
        counts = seen.counters, seen.num_sessions, seen.num_sequences
        return (self.world.pool(), counts, states, sorted(session.plans), session.resync_due)

    def step(
        self,
        *operations: cpb.Operation,
        receipts: Sequence[tpb.SignedPayload] = (),
        deferred: bool = False,
    ) -> cpb.StepResponse:
        """Send the next step, and believe its answer. ``deferred``: with all deferred tokens."""
        request = cpb.StepRequest(operations=operations, receipts=receipts)
        if deferred:
            request.deferred_tokens.CopyFrom(self.deferred_tokens())
        result: cpb.StepResponse = self.call("step", request)
        if deferred:
            self._believe_deferred()
        for operation, done in zip(operations, result.results, strict=True):
            believe(self.sequences, self.number, operation, done)
            self._believe_place(operation, done)
        self._believe_news(result.news)
        self.num_learned = (0, 0)
        self._made(result.plan if result.HasField("plan") else None)
        return result

    def send(self, *operations: cpb.Operation) -> cpb.StepResponse:
        """Send a step with all receipts and deferred tokens at hand; then run its plan."""
        receipts, self.receipts = self.receipts, []
        result = self.step(*operations, receipts=receipts, deferred=True)
        self.run_all()
        return result

    def admit(self, sequence_id: int, tokens: Sequence[int], **options: Any) -> cpb.StepResponse:
        """Admit, run, and submit the receipt."""
        result = self.send(ops.admit(sequence_id, pack(tokens), **options))
        self.settle()
        return result

    def cached(self, sequence_id: int, tokens: Sequence[int]) -> int:
        """Admit; return how many tokens were found cached."""
        (result,) = self.admit(sequence_id, tokens).results
        assert status_of(result) == OK, result
        return result.admit.num_cached_tokens

    def cache(self, tokens: Sequence[int]) -> None:
        """Leave a prompt's full blocks cached, and no sequence of it."""
        self.admit(1, tokens)
        self.send(ops.free([1]))
        self.settle()

    def append(
        self, sequence_id: int, *tokens: int, num_slots: int | None = None
    ) -> cpb.StepResponse:
        """Append known tokens, run, and submit the receipt."""
        slots = len(tokens) if num_slots is None else num_slots
        result = self.send(self.growth(sequence_id, tokens, slots))
        self.settle()
        return result

    def growth(
        self, sequence_id: int, tokens: Sequence[int] = (), num_slots: int = 0
    ) -> cpb.Operation:
        """Return an append at the sequence's present position."""
        first_position = self.sequences[sequence_id].num_scheduled
        return ops.append(sequence_id, pack(tokens), num_slots, first_positions=first_position)

    def settle(self) -> None:
        """Submit all receipts and deferred tokens, without a step."""
        receipts, self.receipts = self.receipts, []
        self.submit(receipts, deferred=True)

    def submit(
        self,
        receipts: Sequence[tpb.SignedPayload] = (),
        *,
        deferred: bool | cpb.DeferredTokens = False,
    ) -> cpb.StepResponse:
        """Submit receipts. ``deferred``: also all deferred tokens, or these."""
        request = cpb.StepRequest(receipts=receipts)
        if deferred is True:
            request.deferred_tokens.CopyFrom(self.deferred_tokens())
        elif deferred:
            request.deferred_tokens.CopyFrom(deferred)
        response: cpb.StepResponse = self.call("step", request)
        if deferred is True:
            self._believe_deferred()
        return response

    def deferred_tokens(self) -> cpb.DeferredTokens:
        """Return tokens of computed positions that the core was not given yet."""
        reserved = {i: s for i, s in self.sequences.items() if s.num_known < s.num_scheduled}
        tokens = [s.truth[s.num_known : s.num_scheduled] for s in reserved.values()]
        return ops.deferred_tokens(
            list(reserved),
            [s.admitted_by for s in reserved.values()],
            [s.num_known for s in reserved.values()],
            list(map(len, tokens)),
            pack([token for each in tokens for token in each]),
        )

    def abort(
        self, plan_number: int, receipts: Sequence[tpb.SignedPayload] = ()
    ) -> cpb.AbortPlansResponse:
        """Abort a plan and all in flight with it, and believe the rest."""
        request = cpb.AbortPlansRequest(plan_number=plan_number, receipts=receipts)
        response: cpb.AbortPlansResponse = self.call("abort_plans", request)
        self._believe_states(response.sequences)
        return response

    def resync(self, receipts: Sequence[tpb.SignedPayload] = ()) -> cpb.AbortPlansResponse:
        """Abort whatever is in flight, with a plan of whole tables."""
        request = cpb.AbortPlansRequest(whole_tables=True, receipts=receipts)
        response: cpb.AbortPlansResponse = self.call("abort_plans", request)
        self._believe_states(response.sequences)
        self._made(response.plan)
        return response

    # Requests without numbers

    def renew(self) -> None:
        """Renew the lease."""
        self.world.core.renew_session(self.ref, self.tenant)

    def close(self) -> None:
        """End the session."""
        self.world.core.close_session(self.ref, self.tenant)

    def lookup(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt are cached."""
        return num_cached(self.world.core, POOL, self.owner, tokens)

    def forget(
        self, what: Sequence[int] | ForgetScope, *, force: bool = False
    ) -> ppb.ForgetPrefixesResponse:
        """Forget a prefix, or all of a scope, of the session's tenant and namespace."""
        return forget(self.world.core, POOL, self.owner, what, force=force)

    def blocks(self, sequence_id: int) -> list[tuple[int, int, int]]:
        """Return (tier, index, generation) of each block of the core's table of a sequence."""
        (table,) = self._about(sequence_id, with_tables=True).tables
        indices = columns.read(INT32, table.indices, "indices")
        generations = columns.read(INT64, table.generations, "generations")
        return [(table.tier, i, g) for i, g in zip(indices, generations, strict=True)]

    def table(self, sequence_id: int) -> list[BlockId]:
        """Return (tier, index) of each block of the core's table of a sequence."""
        return [(tier, index) for tier, index, _ in self.blocks(sequence_id)]

    def state(self, sequence_id: int) -> SequenceState:
        """Return the core's state of a sequence."""
        (state,) = sequence_states(self._about(sequence_id).sequences)
        return state

    def _about(self, sequence_id: int, *, with_tables: bool = False) -> cpb.ListSequencesResponse:
        request = cpb.ListSequencesRequest(
            session=self.ref,
            sequence_ids=columns.pack(INT64, [sequence_id]),
            with_tables=with_tables,
        )
        return self.world.core.list_sequences(request, self.tenant)

    # Plans

    def run_next(self, shard: int = 0) -> None:
        """Run the next plan of the queue on a shard."""
        waiting = [made for made in self.queue if shard not in made.ran_on]
        if waiting and self.world.shards[shard].run(waiting[0].signed):
            waiting[0].ran_on.add(shard)
            receipt = self.world.shards[shard].receipt(waiting[0].plan, waiting[0].digest)
            self.receipts.append(receipt)

    def run_all(self) -> None:
        """Run every plan of the queue on every shard."""
        for shard in range(len(self.world.shards)):
            for _ in range(len(self.queue)):
                self.run_next(shard)
        self.queue = [m for m in self.queue if len(m.ran_on) < len(self.world.shards)]

    # What it believes

    def check(self) -> None:
        """Check that the core agrees with this engine's view, and up-to-date shards as well."""
        self.learn()
        for i, sequence in self.sequences.items():
            state = self.state(i)
            assert state.num_tokens == sequence.num_known
            assert state.num_scheduled_tokens == sequence.num_scheduled
            assert state.tier == sequence.tier
            assert state.admitted_by == sequence.admitted_by
        number = self.queue[-1].plan.number if self.queue else None
        done = self.world.core.sessions.by_id[self.id].done
        for plane in self.world.shards:
            assert plane.finished.get(self.id, 0) >= done, "a shard has not run what counts as run"
            if number is not None and plane.finished.get(self.id) == number:
                tables = {i: self.table(i) for i in self.sequences if self.table(i)}
                if self.is_current(plane):
                    assert plane.tables[self.id] == tables

    def _believe_place(self, operation: cpb.Operation, done: cpb.OperationResult) -> None:
        """Believe whether an admission still waits."""
        if operation.HasField("free") and not is_refused(done):
            for i in columns.read(INT64, operation.free.sequence_ids, "ids"):
                self.waiting.pop(i, None)
        elif operation.HasField("admit"):
            admit = operation.admit
            if done.HasField("admit"):
                self.waiting.pop(admit.sequence_id, None)
            elif done.failures[0].shortage.queue_position:
                self.waiting = {admit.sequence_id: (self.number, admit)}

    def learn(self) -> None:
        """Believe now the contents of the next answer."""
        news = self.world.core.sessions.by_id[self.id].news
        if news is not None:
            self._believe_news(news)

    def _believe_news(self, news: cpb.News) -> None:
        num_granted, num_cut = self.num_learned
        cut = columns.read(INT64, news.cut_sequence_ids, "cut_sequence_ids")
        granted = news_of(news).granted
        believe_grants(self.sequences, self.waiting, granted[num_granted:])
        for i in cut[num_cut:]:
            self.sequences.pop(i, None)
            self.waiting.pop(i, None)
        self.num_learned = (len(granted), len(cut))

    def is_current(self, plane: DataPlane) -> bool:
        """Return whether the data plane has run the latest plan, and so knows of every abort."""
        session = self.world.core.sessions.by_id[self.id]
        if session.resync_due or session.is_drafted:
            return False
        return session.last_plan == plane.finished.get(self.id)

    def _believe_deferred(self) -> None:
        for sequence in self.sequences.values():
            sequence.num_known = max(sequence.num_known, sequence.num_scheduled)

    def _believe_states(self, message: cpb.SequenceStates) -> None:
        self.num_learned = (0, self.num_learned[1])  # grants are no news any more
        states = sequence_states(message)
        assert [state.sequence_id for state in states] == sorted(self.sequences)
        for state in states:
            sequence = self.sequences[state.sequence_id]
            assert state.num_scheduled_tokens == state.num_written_tokens
            # One that was granted since the plan was made has all its tokens.
            assert state.num_tokens in (state.num_written_tokens, sequence.num_known)
            sequence.num_known = state.num_tokens
            sequence.num_scheduled = state.num_scheduled_tokens
            del sequence.truth[state.num_tokens :]
            sequence.tier = state.tier

    def _made(self, signed: tpb.SignedPayload | None) -> None:
        if signed is not None:
            self.queue.append(MadePlan(signed, plan_pb2.Plan.FromString(signed.payload)))


def only(answer: cpb.StepResponse) -> cpb.OperationResult:
    """Return the result of a step's only operation."""
    (result,) = answer.results
    return result


def status_of(result: cpb.OperationResult) -> int:
    """Return the status of an operation's only item."""
    return result.failures[0].status if result.failures else OK


def error_in(result: cpb.OperationResult) -> KvplaneError:
    """Return the error of an operation's only item."""
    (failure,) = result.failures
    return error_of(failure)
