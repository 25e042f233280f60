"""A naive model of the core's surroundings: its data planes, and engines that know tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvplane_blocks import Pool as NativePool

from control_plane import queries
from control_plane.config import CoreConfig
from control_plane.core import ControlPlane
from control_plane.observing import PoolObservation
from control_plane.pools.pool import Pool
from control_plane.pools.publications import root_of
from control_plane.sessions.session import Session
from kvplane import ops
from kvplane.errors import KvplaneError, StepOutOfOrderError
from kvplane.layout import Layout
from kvplane.prefixes import ForgetScope
from kvplane.results import ItemFailure, SequenceState
from kvplane.slices import run_to_end
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_data_plane import DataPlane, Plane
from tests.helpers.core.core_messages import DEVICE, POOL, BlockId, pack
from tests.helpers.native.native_pool import find
from tests.helpers.planning.registration_messages import LAYOUT, TENANT, half

Owner = tuple[str, str]
"""The tenant and the namespace of a session."""
INCARNATION = 7  # of a world's first control plane
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
    """One core and the data planes of one pool, by shard.

    Each world draws the same keys and session ids.
    """

    def __init__(
        self,
        num_shards: int = 1,
        *,
        num_device: int | tuple[int, ...] = 16,
        num_host: int | tuple[int, ...] = 8,
        layout: Layout = LAYOUT,
        plane: type[Plane] = DataPlane,
        **settings: Any,
    ) -> None:
        """``num_shards``: 0 for none yet. ``num_device``, ``num_host``: of each layer group.
        ``settings``: of the core.
        """
        self.clock = Clock()
        self.config = CoreConfig(**{"watermark": 0.0, **settings})
        self.layout = layout
        self.incarnation = INCARNATION
        self._random = random.Random(1)
        self.core = self._core()
        self.epoch = 100
        self.shards: list[Any] = []
        num_device, num_host = (n if isinstance(n, tuple) else (n,) for n in (num_device, num_host))
        groups = [
            rpb.GroupBlocks(num_device_blocks=device, num_host_blocks=host)
            for device, host in zip(num_device, num_host, strict=True)
        ]
        whole = tpb.Shard(
            num_shards=1,
            num_layers=sum(len(group.layers) for group in layout.groups),
            num_kv_heads=max(group.num_kv_heads for group in layout.groups),
        )
        for i in range(num_shards):
            plane(
                self,
                shard=half(i) if num_shards > 1 else whole,
                layout=layout.to_proto(),
                num_device_blocks=num_device[0],
                num_host_blocks=num_host[0],
                groups=groups if len(groups) > 1 else (),
            ).come()

    def _core(self) -> ControlPlane:
        return ControlPlane(
            incarnation=self.incarnation,
            config=self.config,
            clock=self.clock,
            new_key=lambda: self._random.randbytes(32),
            new_session_id=lambda: self._random.randrange(1, 2**53),
        )

    @property
    def pool(self) -> Pool:
        """The core's state of the pool."""
        return self.core._pools[POOL]

    def restart_control_plane(self) -> None:
        """Start another process with a higher incarnation; every shard registers and reports."""
        self.incarnation += 1
        self.core = self._core()
        for shard in self.shards:
            shard.come()

    def pump(self) -> None:
        """Deliver all waiting messages to every data plane, and its answers."""
        for shard in self.shards:
            shard.pump()

    def work(self) -> None:
        """Do all work that is left, a slice at a time, as between requests."""
        self.core.take_notified()
        while self.core.work():
            self.core.check_integrity()

    def after(self, seconds: float) -> None:
        """Let the core notice, at once, that so much time has passed."""
        self.clock.now += seconds
        self.core.tick()

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

    def observed(self) -> PoolObservation:
        return self.core.observe_pool(POOL)

    def usage(self, tier: int = DEVICE, group: int = 0) -> dict[str, int]:
        """Return the blocks of a layer group's tier by state."""
        (usage,) = (u for u in self.pool.usage() if (u.tier, u.group) == (tier, group))
        return {
            "free": usage.num_free_blocks,
            "cached": usage.num_cached_blocks,
            "held": usage.num_held_blocks,
            "retired": usage.num_retired_blocks,
        }

    def found(self, tokens: Iterable[int], tenant: str = TENANT, namespace: str = "") -> list[int]:
        """Return the device blocks that hold the longest cached prefix of a prompt."""
        self.core.check_integrity()
        root = root_of(self.layout.fingerprint, tenant, namespace)
        primary = self.pool.primary
        _, (_, _, indices, *_) = find(
            NativePool([primary]), primary, root, ops.pack_tokens(list(tokens))
        )
        return columns.read(INT32, indices, "indices").tolist()

    def generations(self, tier: tpb.Tier = DEVICE) -> list[int]:
        """Return the generations of all blocks of a tier."""
        return columns.read(INT64, self.pool.primary.generations(tier), "generations").tolist()


class MadePlan:
    """A plan that an engine got, and the shards that have run it."""

    def __init__(self, signed: tpb.SignedPayload) -> None:
        self.signed = signed
        self.plan = plan_pb2.Plan.FromString(signed.payload)
        self.ran_on: set[int] = set()


@dataclass(frozen=True)
class Sent:
    """A request with a number, and its outcome."""

    method: str
    request: Any
    answer: Any
    error: KvplaneError | None


class Engine:
    """One client: numbers its requests, runs its plans in order, keeps its receipts.

    A token whose slot is computed before it is known is ``position % 2``.
    """

    def __init__(self, world: World, tenant: str, namespace: str = "") -> None:
        self.world = world
        self.tenant = tenant
        self.owner = (tenant, namespace)
        request = cpb.OpenSessionRequest(
            pool_id=POOL, layout=world.layout.to_proto(), namespace=namespace, client_name="engine"
        )
        self.opened = world.core.open_session(request, tenant)
        self.ref = self.opened.session
        self.id = self.ref.session_id
        self.number = 0
        self.queue: list[MadePlan] = []
        self.receipts: list[tpb.SignedPayload] = []
        self.sent: list[Sent] = []

    @property
    def session(self) -> Session:
        """The core's state of the session."""
        return self.world.core.sessions.by_id[self.id]

    # Requests

    def call(self, method: str, request: Any) -> Any:
        """Send a request under the next number, which is used up whatever its outcome."""
        self.number += 1
        request.session.CopyFrom(self.ref)
        request.number = self.number
        try:
            answer = getattr(self.world.core, method)(request, self.tenant)
        except KvplaneError as error:
            is_found = not error.field.startswith("session.")
            assert error.next_number == (self.number + 1 if is_found else 0)
            self.sent.append(Sent(method, request, None, error))
            raise
        self.sent.append(Sent(method, request, answer, None))
        if answer.HasField("plan"):
            self.queue.append(MadePlan(answer.plan))
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
        return observed_state(self.world.core, self.id)

    def step(
        self,
        *operations: cpb.Operation,
        receipts: Sequence[tpb.SignedPayload] = (),
        deferred: bool | cpb.DeferredTokens = False,
    ) -> cpb.StepResponse:
        """Send the next step. ``deferred``: with all deferred tokens, or these."""
        request = cpb.StepRequest(operations=operations, receipts=receipts)
        if deferred:
            message = self.deferred_tokens() if deferred is True else deferred
            request.deferred_tokens.CopyFrom(message)
        answer: cpb.StepResponse = self.call("step", request)
        return answer

    def send(self, *operations: cpb.Operation) -> cpb.StepResponse:
        """Send a step with all receipts and deferred tokens at hand; then run its plan."""
        receipts, self.receipts = self.receipts, []
        result = self.step(*operations, receipts=receipts, deferred=True)
        self.run_all()
        return result

    def do(self, *operations: cpb.Operation) -> cpb.StepResponse:
        """Send a step, run its plan, and submit the receipt."""
        result = self.send(*operations)
        self.settle()
        return result

    def admit(self, sequence_id: int, tokens: Sequence[int], **options: Any) -> cpb.StepResponse:
        """Admit, run, and submit the receipt."""
        return self.do(ops.admit(sequence_id, pack(tokens), **options))

    def cached(self, sequence_id: int, tokens: Sequence[int]) -> int:
        """Admit; return how many tokens were found cached."""
        (result,) = self.admit(sequence_id, tokens).results
        assert status_of(result) == OK, result
        return result.admit.num_cached_tokens

    def write(self, tokens: Sequence[int]) -> list[int]:
        """Write a prompt as a sequence of its own, with nothing looked up. Return its blocks."""
        sequence_id = self.number + 1
        self.admit(sequence_id, tokens, skip_prefix_lookup=True)
        return [index for _, index in self.table(sequence_id)]

    def cache(self, tokens: Sequence[int]) -> None:
        """Leave a prompt's full blocks cached, and no sequence of it."""
        self.admit(1, tokens)
        self.do(ops.free([1]))

    def append(
        self, sequence_id: int, *tokens: int, num_slots: int | None = None
    ) -> cpb.StepResponse:
        """Append known tokens, run, and submit the receipt."""
        slots = len(tokens) if num_slots is None else num_slots
        return self.do(self.growth(sequence_id, tokens, slots))

    def growth(
        self, sequence_id: int, tokens: Sequence[int] = (), num_slots: int = 0
    ) -> cpb.Operation:
        """Return an append at the sequence's present position."""
        first_position = self.state(sequence_id).num_scheduled_tokens
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
        return self.step(receipts=receipts, deferred=deferred)

    def deferred_tokens(self) -> cpb.DeferredTokens:
        """Return tokens of computed positions that the core was not given yet."""
        states = SequenceState.all_from_proto(queries.states(self.session))
        return deferred_of(states)

    def abort(
        self, plan_number: int, receipts: Sequence[tpb.SignedPayload] = ()
    ) -> cpb.AbortPlansResponse:
        """Abort a plan and all in flight with it."""
        request = cpb.AbortPlansRequest(plan_number=plan_number, receipts=receipts)
        answer: cpb.AbortPlansResponse = self.call("abort_plans", request)
        return answer

    def resync(self, receipts: Sequence[tpb.SignedPayload] = ()) -> cpb.AbortPlansResponse:
        """Abort whatever is in flight, with a plan of whole tables."""
        request = cpb.AbortPlansRequest(whole_tables=True, receipts=receipts)
        answer: cpb.AbortPlansResponse = self.call("abort_plans", request)
        return answer

    # Requests without numbers

    def renew(self) -> None:
        """Renew the lease."""
        self.world.core.renew_session(self.ref, self.tenant)

    def close(self) -> None:
        """End the session."""
        self.world.core.close_session(self.ref, self.tenant)

    def lookup(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt are cached."""
        return num_cached(self.world.core, self.owner, tokens)

    def forget(
        self, what: Sequence[int] | ForgetScope, *, force: bool = False
    ) -> ppb.ForgetPrefixesResponse:
        """Forget a prefix, or all of a scope, of the session's tenant and namespace."""
        request = ppb.ForgetPrefixesRequest(pool_id=POOL, namespace=self.owner[1], force=force)
        if isinstance(what, ForgetScope):
            request.scope = what.value
        else:
            request.scope = ppb.FORGET_SCOPE_PREFIX
            request.token_ids = ops.pack_tokens(what)
        return self.world.core.forget_prefixes(request, self.tenant)

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
        (state,) = SequenceState.all_from_proto(self._about(sequence_id).sequences)
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
            receipt = self.world.shards[shard].receipt(waiting[0].signed)
            self.receipts.append(receipt)

    def run_all(self) -> None:
        """Run every plan of the queue on every shard."""
        for shard in range(len(self.world.shards)):
            for _ in range(len(self.queue)):
                self.run_next(shard)
        self.queue = [m for m in self.queue if len(m.ran_on) < len(self.world.shards)]


def observed_state(core: ControlPlane, session_id: int) -> tuple[Any, ...]:
    """Return all state that requests of a session could change."""
    pool = core.get_pool(POOL).SerializeToString(deterministic=True)
    seen = core.observe_pool(POOL)
    counts = seen.counters, seen.num_sessions, seen.num_sequences, seen.num_waiting
    session = core.sessions.by_id.get(session_id)
    if session is None:
        return (pool, counts)
    states = queries.states(session).SerializeToString(deterministic=True)
    return (pool, counts, states, sorted(session.plans), session.resync_due)


def num_cached(core: ControlPlane, owner: Owner, tokens: Sequence[int]) -> int:
    """Return how many tokens of a prompt an admission would find cached."""
    tenant, namespace = owner
    request = ppb.FindPrefixRequest(
        token_ids=ops.pack_tokens(tokens), namespace=namespace, pool_ids=[POOL]
    )
    (match,) = run_to_end(core.find_prefix(request, tenant)).matches
    return min(match.num_device_tokens + match.num_host_tokens, len(tokens) - 1)


def deferred_of(states: Sequence[SequenceState]) -> cpb.DeferredTokens:
    """Return the tokens of all positions that were scheduled without them."""
    late = [state for state in states if state.num_tokens < state.num_scheduled_tokens]
    tokens = [tokens_written(state) for state in late]
    return ops.deferred_tokens(
        [state.sequence_id for state in late],
        [state.admitted_by for state in late],
        [state.num_tokens for state in late],
        [len(each) for each in tokens],
        [token for each in tokens for token in each],
    )


def tokens_written(state: SequenceState) -> list[int]:
    """Return the tokens of slots that were scheduled without them: alike for all forks, because
    they may share the slots.
    """
    return [at % 2 for at in range(state.num_tokens, state.num_scheduled_tokens)]


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
    return ItemFailure.from_proto(failure).error
