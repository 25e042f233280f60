"""One engine's lease on a pool: its sequences, its blocks, its plans in flight.

Invariants: the pool's reservations know every live sequence and every device block of its tables; a
plan is in ``plans`` until it is receipted or aborted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from control_plane.blocks.block_store import ENDED, BlockStore
from control_plane.planning.model import ResyncOutcome, SequenceState, StepOutcome, Tier, Transfer
from control_plane.planning.pool import Pool
from control_plane.planning.sequence import Sequence
from kvplane.errors import KvplaneError, SequenceNotFoundError, SessionNotFoundError

_MAX_VOIDED: Final = 1024


@dataclass(slots=True)
class PlanRecord:
    """What a plan in flight will change once it has run, or must undo when it is aborted."""

    number: int
    digest: bytes
    touched: list[Sequence]  # have rows or transfers in it
    transfers: list[Transfer]
    pins: list[tuple[BlockStore, int]]  # transfer sources


class Session:
    """State of an open session; what changes it is in the planner, receipts and abort."""

    __slots__ = (
        "_answers",
        "_voided",
        "client_name",
        "done",
        "expires_at_s",
        "id",
        "last_number",
        "last_plan",
        "plans",
        "pool",
        "receipted",
        "resync_due",
        "sequences",
        "tenant",
    )

    def __init__(
        self, session_id: int, pool: Pool, tenant: str, client_name: str, expires_at_s: float
    ) -> None:
        self.id = session_id
        self.pool = pool
        self.tenant = tenant
        self.client_name = client_name
        self.expires_at_s = expires_at_s
        self.sequences: dict[int, Sequence] = {}
        self.last_number = 0
        self.last_plan = 0
        self.plans: dict[int, PlanRecord] = {}
        self.receipted = [0] * pool.num_shards  # highest plan receipted by each shard
        self.done = 0  # highest plan receipted by all
        self.resync_due = False
        self._voided: deque[int] = deque(maxlen=_MAX_VOIDED)
        self._answers: OrderedDict[int, tuple[bytes, StepOutcome | ResyncOutcome]] = OrderedDict()

    # Sequences

    def sequence(self, sequence_id: int, *, field: str) -> Sequence:
        """The live sequence. Raises SequenceNotFoundError naming ``field``."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            raise SequenceNotFoundError(f"no live sequence {sequence_id}", field=field)
        return sequence

    def add(self, sequence: Sequence) -> None:
        """The sequence lives from now on, and its need is guaranteed."""
        self.sequences[sequence.id] = sequence
        self.pool.reservations.add_sequence(self.id, sequence.need)

    def remove(self, sequence: Sequence) -> None:
        """The sequence, whose blocks were released, lives no more."""
        del self.sequences[sequence.id]
        self.pool.reservations.remove_sequence(self.id, sequence.need)

    def states(self) -> list[SequenceState]:
        """Every sequence, by id."""
        return [self.sequences[i].state() for i in sorted(self.sequences)]

    # Blocks

    def allocate(self, tier: Tier, num_blocks: int) -> list[int]:
        """Blocks for a table of the session. The caller has checked that there is room."""
        blocks = self.pool.tiers[tier].allocate(self.id, num_blocks)
        if tier is Tier.DEVICE:
            self.pool.reservations.hold(self.id, blocks)
        return blocks

    def share(self, tier: Tier, blocks: list[int]) -> None:
        """One more table of the session refers to each block."""
        self.pool.tiers[tier].share(blocks)
        if tier is Tier.DEVICE:
            self.pool.reservations.hold(self.id, blocks)

    def release(self, tier: Tier, blocks: list[int], plan: int) -> int:
        """One table less refers to each block, tails first, once ``plan`` has run.

        Returns how many blocks no table refers to now.
        """
        if tier is Tier.DEVICE:
            self.pool.reservations.release(self.id, blocks)
        return self.pool.tiers[tier].release(blocks, self.id, plan)

    def unpin(self, record: PlanRecord, plan: int) -> None:
        """The transfers of an aborted plan may run until ``plan`` has."""
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
        self.pool.end(self.id)

    # Plans

    def void(self, number: int) -> None:
        """The plan is aborted: repeats of the call that said so change nothing."""
        self._voided.append(number)

    def is_voided(self, number: int) -> bool:
        """Whether the plan was aborted."""
        return number in self._voided

    # Answers

    def remember(
        self, number: int, content: bytes, answer: StepOutcome | ResyncOutcome, num_kept: int
    ) -> None:
        """Keep an answer for repeats of its step, and the ``num_kept`` before it."""
        self._answers[number] = (content, answer)
        while len(self._answers) > num_kept + 1:
            self._answers.popitem(last=False)

    def remembered(self, number: int) -> tuple[bytes, StepOutcome | ResyncOutcome] | None:
        """The content of a step and its answer, if it is not too long ago."""
        return self._answers.get(number)


class EndedSessions:
    """Why sessions ended, for a while, so that their callers hear the reason."""

    __slots__ = ("_max_sessions", "_reasons")

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._reasons: OrderedDict[int, tuple[str, type[KvplaneError]]] = OrderedDict()

    def add(self, session: Session, reason: type[KvplaneError]) -> None:
        """The session ended; later calls raise ``reason``."""
        self._reasons[session.id] = (session.tenant, reason)
        while len(self._reasons) > self._max_sessions:
            self._reasons.popitem(last=False)

    def error(self, session_id: int, tenant: str) -> KvplaneError:
        """What to raise for a session that is not open, or not the tenant's."""
        owner, reason = self._reasons.get(session_id, (tenant, SessionNotFoundError))
        if owner != tenant:
            reason = SessionNotFoundError
        return reason(f"session {session_id} is not open", field="session_id")
