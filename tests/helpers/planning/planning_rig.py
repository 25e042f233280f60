"""The parts that the core puts together, without the core: a pool of one shard, its sessions, and
steps and receipts for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane import queries
from control_plane.config import CoreConfig
from control_plane.pools.pool import Pool
from control_plane.pools.shards import PoolShards
from control_plane.queries import check_pool
from control_plane.sessions.session import Session
from control_plane.sessions.sessions import Sessions
from control_plane.steps.abort import abort_plans
from control_plane.steps.operations import Step, read_operations
from control_plane.steps.plans import finish_plan
from control_plane.steps.receipts import take_receipts
from kvplane import ops
from kvplane.errors import SessionNotFoundError
from kvplane.slices import run_to_end
from kvplane.wire import columns, protocol, signing
from kvplane.wire.columns import INT32, INT64, UINT8
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.registration_messages import LAYOUT, hello

DEVICE, HOST = tpb.TIER_DEVICE, tpb.TIER_HOST
BLOCK_SIZE = LAYOUT.block_size_tokens
EPOCH = 11


@dataclass(frozen=True)
class State:
    """The core's state of a live sequence."""

    tier: int
    table: list[int]
    num_tokens: int
    num_scheduled: int
    num_written: int
    num_cached: int
    admitted_by: int


class PlanningRig:
    """A pool on which session 1 is open."""

    def __init__(
        self, num_device_blocks: int = 8, num_host_blocks: int = 4, **settings: Any
    ) -> None:
        """``settings``: of CoreConfig; the watermark is 0 unless given."""
        shards = PoolShards(1, LAYOUT)
        shards.add(hello(epoch=EPOCH))
        config = CoreConfig(**{"watermark": 0.0, **settings})
        self.pool = Pool("pool", shards, config)
        self.all = Sessions(
            config, incarnation=1, clock=lambda: 0.0, new_session_id=lambda: self._next_id
        )
        self._next_id = 0
        self.admission = self.all.admission_of(self.pool)
        self.pool.set_tiers({DEVICE: num_device_blocks, HOST: num_host_blocks})
        self.pool.built = True
        self.session = self.open(1)

    @property
    def sessions(self) -> dict[int, Session]:
        return self.all.by_id

    def open(self, session_id: int, tenant: str = "default") -> Session:
        self._next_id = session_id
        return self.all.open(self.pool, cpb.OpenSessionRequest(client_name="test"), tenant)

    def end(self, session_id: int) -> None:
        self.all.end(self.sessions[session_id], SessionNotFoundError)

    def fence(self, session_id: int) -> None:
        """The only shard fences a session that ended."""
        self.all.fenced(self.pool, 0, [session_id])

    def step(
        self, *operations: cpb.Operation, session: Session | None = None
    ) -> tuple[list[cpb.OperationResult], plan_pb2.Plan | None]:
        """Run a step, whose number is used up; return its results and its plan."""
        result = self.answer(*operations, session=session)
        plan = plan_pb2.Plan.FromString(result.plan.payload) if result.HasField("plan") else None
        return list(result.results), plan

    def answer(
        self, *operations: cpb.Operation, session: Session | None = None
    ) -> cpb.StepResponse:
        """Run ``step``; return the whole answer."""
        session = session or self.session
        session.numbers.use()
        number = session.numbers.last
        result = cpb.StepResponse()
        session.native.begin(session.handle, number)
        step = Step(session, self.admission)
        for i, operation in enumerate(read_operations(operations, 1000)):
            run_to_end(step.run(i, operation, result.results.add()))
        plan = run_to_end(finish_plan(session, number))
        if plan is not None:
            result.plan.MergeFrom(
                tpb.SignedPayload(type=signing.PLAN, payload=plan.payload, signature=plan.signature)
            )
        self.pool.announce()
        return result

    def admit(
        self, sequence_id: int, token_ids: Sequence[int], *, session: Session | None = None
    ) -> State:
        """Admit a sequence, all of which the step computes."""
        (result,), _ = self.step(ops.admit(sequence_id, token_ids), session=session)
        assert not result.failures, result
        return self.state(sequence_id, session=session)

    def run(self, *, up_to: int | None = None, session: Session | None = None) -> None:
        """Submit the receipts of plans in flight, of all or of those up to a number."""
        session = session or self.session
        numbers = [n for n in session.plans if up_to is None or n <= up_to]
        run_to_end(take_receipts(session, [self.receipt(session, number) for number in numbers]))
        self.pool.announce()

    def abort(self) -> None:
        """Abort all plans in flight, under the next number."""
        self.session.numbers.use()
        request = cpb.AbortPlansRequest(number=self.session.numbers.last)
        run_to_end(abort_plans(self.session, request))
        self.admission.apply(self.session)

    def receipt(self, session: Session, number: int) -> tpb.SignedPayload:
        payload = plan_pb2.Receipt(
            version=protocol.NEWEST_PAYLOAD_VERSION,
            session=session.ref,
            pool_id=self.pool.id,
            epoch=EPOCH,
            plan_number=number,
            plan_digest=session.plans[number].digest,
        ).SerializeToString()
        signature = signing.sign(self.pool.key, signing.RECEIPT, payload)
        return tpb.SignedPayload(type=signing.RECEIPT, payload=payload, signature=signature)

    def check(self) -> None:
        check_pool(self.pool, self.sessions.values())

    # What it has

    def state(self, sequence_id: int, *, session: Session | None = None) -> State:
        session = session or self.session
        tier, indices, *_ = session.pool.primary.table(session.handle, sequence_id)
        ids = columns.pack(INT64, [sequence_id])
        message = queries.states(session, ids)

        def one(column: bytes) -> int:
            return columns.read(INT32, column, "column")[0]

        return State(
            tier,
            columns.read(INT32, indices, "indices").tolist(),
            one(message.num_tokens),
            one(message.num_scheduled_tokens),
            one(message.num_written_tokens),
            one(message.num_cached_tokens),
            columns.read(INT64, message.admitted_by, "admitted_by")[0],
        )

    def live(self, *, session: Session | None = None) -> list[int]:
        """Return the ids of the live sequences."""
        message = queries.states(session or self.session)
        return columns.read(INT64, message.sequence_ids, "ids").tolist()

    def found(self, token_ids: Iterable[int], *, session: Session | None = None) -> int:
        """Return the leading full blocks of a prompt that a session finds on the device."""
        session = session or self.session
        return session.native.match(session.root, ops.pack_tokens(list(token_ids)))[0]

    def usage(self, tier: tpb.Tier = DEVICE) -> dict[str, int]:
        """Return the blocks of a tier by state."""
        (usage,) = (usage for usage in self.pool.usage() if usage.tier == tier)
        return {
            "free": usage.num_free_blocks,
            "cached": usage.num_cached_blocks,
            "held": usage.num_held_blocks,
            "retired": usage.num_retired_blocks,
        }

    def obtainable(self, session: Session | None = None, tier: tpb.Tier = DEVICE) -> int:
        """Return the number of blocks that the session could allocate now."""
        return self.pool.native.num_obtainable((session or self.session).handle, tier)

    def published(self) -> list[tuple[int, int]]:
        """Return (index, parent's index) of each block announced since the last call."""
        found: list[tuple[int, int]] = []
        outgoing = self.pool.shards.states[0].outgoing
        for message in outgoing:
            publications = message.publish.publications
            indices = columns.read(INT32, publications.indices, "indices")
            parents = columns.read(INT32, publications.parent_indices, "parents")
            found += zip(indices, parents, strict=True)
        outgoing.clear()
        return found


def entries_of(changes: plan_pb2.TableChanges) -> list[tuple[int, int, bool]]:
    """Return (index, generation, allocated) of every table entry that is set."""
    indices = columns.read(INT32, changes.indices, "indices")
    generations = columns.read(INT64, changes.generations, "generations")
    return list(zip(indices, generations, map(bool, changes.allocated), strict=True))


def transfers_of(message: plan_pb2.Transfers) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (source, destination) of each, as (tier, index, generation)."""
    ends = [
        list(
            zip(
                columns.read(UINT8, getattr(message, f"{end}_tiers"), "tiers"),
                columns.read(INT32, getattr(message, f"{end}_indices"), "indices"),
                columns.read(INT64, getattr(message, f"{end}_generations"), "generations"),
                strict=True,
            )
        )
        for end in ("source", "destination")
    ]
    return list(zip(*ends, strict=True))


def spans_of(message: plan_pb2.Spans) -> list[tuple[int, int, int]]:
    """Return (sequence, first position, number of tokens) of each."""
    return list(
        zip(
            columns.read(INT64, message.sequence_ids, "sequence_ids"),
            columns.read(INT32, message.first_positions, "first_positions"),
            columns.read(INT32, message.num_tokens, "num_tokens"),
            strict=True,
        )
    )
