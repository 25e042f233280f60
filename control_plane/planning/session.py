"""One engine's lease on a pool: its sequences, its blocks, its plans in flight.

Invariants: the pool's reservations count every live sequence and every device block of its tables;
a plan is in ``plans`` until it is receipted or aborted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from control_plane.blocks.block_store import ENDED, BlockStore
from control_plane.planning.pools.pool import Pool
from control_plane.planning.sequence import Sequence
from control_plane.planning.steps.numbering import Numbering
from control_plane.planning.steps.plan_columns import TransferColumns
from kvplane.errors import KvplaneError, SequenceNotFoundError, SessionNotFoundError
from kvplane.v1 import types_pb2 as tpb

_MAX_VOIDED: Final = 1024
_DEVICE: Final = tpb.TIER_DEVICE


@dataclass(slots=True)
class PlanRecord:
    """What a plan in flight will change once it has run, or must undo when it is aborted."""

    number: int
    digest: bytes
    touched: list[Sequence]  # have spans or transfers in it
    transfers: TransferColumns
    pins: list[tuple[BlockStore, int]]  # transfer sources


class Session:
    """State of an open session; what changes it is in the planner, receipts and abort."""

    __slots__ = (
        "_voided",
        "done",
        "expires_at_s",
        "id",
        "last_plan",
        "numbers",
        "ordinal",
        "plans",
        "pool",
        "receipted",
        "ref",
        "resync_due",
        "root",
        "sequences",
        "tenant",
    )

    def __init__(
        self,
        ref: tpb.SessionRef,
        pool: Pool,
        *,
        ordinal: int,
        tenant: str,
        root: bytes,
        num_answers: int,
    ) -> None:
        """``root``: of the prefixes that it shares. ``num_answers``: how many are remembered."""
        self.ref = ref
        self.id = ref.session_id
        self.pool = pool
        self.ordinal = ordinal
        self.tenant = tenant
        self.root = root
        self.expires_at_s = 0.0
        self.sequences: dict[int, Sequence] = {}
        self.numbers = Numbering(num_answers)
        self.last_plan = 0
        self.plans: dict[int, PlanRecord] = {}
        self.receipted = [0] * pool.shards.num_shards  # highest plan receipted by each shard
        self.done = 0  # highest plan receipted by all
        self.resync_due = False
        self._voided: deque[int] = deque(maxlen=_MAX_VOIDED)

    # Sequences

    def sequence(self, sequence_id: int, *, field: str) -> Sequence:
        """The live sequence. Raises SequenceNotFoundError naming ``field``."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            raise SequenceNotFoundError(f"sequence {sequence_id} is not live", field=field)
        return sequence

    def add(self, sequence: Sequence) -> None:
        """Add a live sequence and guarantee its need."""
        self.sequences[sequence.id] = sequence
        self.pool.reservations.add_sequence(self.id, sequence.need)

    def remove(self, sequence: Sequence) -> None:
        """Remove a live sequence, whose blocks were released."""
        del self.sequences[sequence.id]
        self.pool.reservations.remove_sequence(self.id, sequence.need)

    # Blocks

    def allocate(self, tier: tpb.Tier, num_blocks: int) -> list[int]:
        """Blocks for a table of the session. The caller has checked that there is room."""
        blocks = self.pool.tiers[tier].allocate(self.id, num_blocks)
        if tier == _DEVICE:
            self.pool.reservations.hold(self.id, blocks)
        return blocks

    def share(self, tier: tpb.Tier, blocks: list[int]) -> None:
        """Add a reference of a table of the session to each block."""
        self.pool.tiers[tier].share(blocks)
        if tier == _DEVICE:
            self.pool.reservations.hold(self.id, blocks)

    def release(self, tier: tpb.Tier, blocks: list[int], plan: int) -> int:
        """Remove a table's reference to each block, tails first. They may be touched until
        ``plan`` has run.

        Returns how many blocks no table refers to any more.
        """
        if tier == _DEVICE:
            self.pool.reservations.release(self.id, blocks)
        return self.pool.tiers[tier].release(blocks, self.id, plan)

    def unpin(self, record: PlanRecord, plan: int) -> None:
        """Unpin the sources of an aborted plan, whose transfers may run until ``plan`` has."""
        for store, block in reversed(record.pins):
            store.touched_until([block], self.id, plan)
            store.unpin([block])

    def end(self) -> None:
        """Release all blocks. They are retired until every shard has fenced the session."""
        for sequence in list(self.sequences.values()):
            self.release(sequence.tier, sequence.table[::-1], ENDED)
            sequence.table = []
            self.remove(sequence)
        for record in self.plans.values():
            self.unpin(record, ENDED)
        self.plans.clear()
        self.pool.end(self.ref, self.ordinal)

    # Plans

    def void(self, number: int) -> None:
        """Remember that the plan is aborted, so that aborting it again changes nothing."""
        self._voided.append(number)

    def is_voided(self, number: int) -> bool:
        """Whether the plan was aborted."""
        return number in self._voided


class EndedSessions:
    """Why recently ended sessions ended, to tell their callers."""

    __slots__ = ("_max_sessions", "_reasons")

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._reasons: OrderedDict[int, tuple[str, type[KvplaneError]]] = OrderedDict()

    def add(self, session: Session, reason: type[KvplaneError]) -> None:
        """The session ended; later calls raise ``reason``."""
        self._reasons[session.id] = (session.tenant, reason)
        while len(self._reasons) > self._max_sessions:
            self._reasons.popitem(last=False)

    def knows(self, session_id: int, tenant: str | None = None) -> bool:
        """Whether a session of this id, and the tenant's if one is given, is among them."""
        owner, _ = self._reasons.get(session_id, (None, None))
        return owner is not None and tenant in (None, owner)

    def error(self, session_id: int, tenant: str) -> KvplaneError:
        """What to raise for a session that is not open, or not the tenant's."""
        owner, reason = self._reasons.get(session_id, (tenant, SessionNotFoundError))
        if owner != tenant:
            reason = SessionNotFoundError
        return reason(
            f"session {session_id} is not open: open another and admit its sequences again",
            field="session.session_id",
        )
