"""The parts that the core puts together, without the core: a pool of one shard, its sessions, and
steps and receipts for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from registration_messages import LAYOUT, hello

from control_plane.planning.integrity import check_pool
from control_plane.planning.pools.pool import Pool
from control_plane.planning.pools.publications import root_of
from control_plane.planning.pools.shards import PoolShards, ShardState
from control_plane.planning.sequence import Sequence as CoreSequence
from control_plane.planning.session import Session
from control_plane.planning.steps.draft import Draft
from control_plane.planning.steps.planner import Planner
from control_plane.planning.steps.receipts import take_receipts
from kvplane import columns, ops, protocol, signing
from kvplane.columns import INT32, INT64, UINT8
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

DEVICE, HOST = tpb.TIER_DEVICE, tpb.TIER_HOST
BLOCK_SIZE = LAYOUT.block_size_tokens
EPOCH = 11


class PlanningRig:
    """Session 1 is open."""

    def __init__(
        self, num_device_blocks: int = 8, num_host_blocks: int = 4, *, watermark: float = 0.0
    ) -> None:
        shards = PoolShards(1, LAYOUT, bytes(32))
        shards.states[0] = ShardState(hello(epoch=EPOCH), LAYOUT)
        self.pool = Pool("pool", shards, watermark)
        self.pool.set_tiers({DEVICE: num_device_blocks, HOST: num_host_blocks})
        self.pool.built = True
        self.sessions: dict[int, Session] = {}
        self.session = self.open(1)

    def open(self, session_id: int, tenant: str = "default") -> Session:
        session = Session(
            tpb.SessionRef(incarnation=1, session_id=session_id),
            self.pool,
            ordinal=session_id,
            tenant=tenant,
            root=root_of(LAYOUT.fingerprint, tenant, ""),
            num_answers=3,
        )
        self.pool.open(session_id)
        self.sessions[session_id] = session
        return session

    def end(self, session_id: int) -> None:
        self.sessions.pop(session_id).end()

    def draft(self, session: Session | None = None) -> Draft:
        """The session's next step, whose number is used up."""
        session = session or self.session
        session.numbers.use()
        return Draft(session, session.numbers.last)

    def step(
        self, *operations: cpb.Operation, session: Session | None = None
    ) -> tuple[list[cpb.OperationResult], tpb.Plan | None]:
        """Run a step; its results and its plan."""
        draft = self.draft(session)
        planner = Planner(draft.session, draft, max_sequences=100, max_table_entries=1000)
        results = [planner.run(i, operation) for i, operation in enumerate(operations)]
        signed = draft.finish()
        return results, None if signed is None else tpb.Plan.FromString(signed.payload)

    def admit(
        self, sequence_id: int, token_ids: Sequence[int], *, session: Session | None = None
    ) -> CoreSequence:
        """A sequence, all of which the step computes."""
        session = session or self.session
        (result,), _ = self.step(ops.admit(sequence_id, token_ids), session=session)
        assert not result.failures, result
        return session.sequences[sequence_id]

    def run(self, *, up_to: int | None = None, session: Session | None = None) -> None:
        """Submit the receipts of plans in flight, of all or of those up to a number."""
        session = session or self.session
        numbers = [n for n in session.plans if up_to is None or n <= up_to]
        take_receipts(session, [self.receipt(session, number) for number in numbers])

    def receipt(self, session: Session, number: int) -> tpb.SignedPayload:
        payload = tpb.Receipt(
            version=protocol.PAYLOAD_VERSION,
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


def entries_of(changes: tpb.TableChanges) -> list[tuple[int, int, bool]]:
    """(index, generation, allocated) of every table entry that is set."""
    indices = columns.read(INT32, changes.indices, "indices")
    generations = columns.read(INT64, changes.generations, "generations")
    return list(zip(indices, generations, map(bool, changes.allocated), strict=True))


def transfers_of(message: tpb.Transfers) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(source, destination) of each, as (tier, index, generation)."""
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


def spans_of(message: tpb.Spans) -> list[tuple[int, int, int]]:
    """(sequence, first position, number of tokens) of each."""
    return list(
        zip(
            columns.read(INT64, message.sequence_ids, "sequence_ids"),
            columns.read(INT64, message.first_positions, "first_positions"),
            columns.read(INT32, message.num_tokens, "num_tokens"),
            strict=True,
        )
    )
