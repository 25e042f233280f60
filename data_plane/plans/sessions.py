"""The open sessions and the order of their plans, and which sessions have ended for good.

plan numbers of one session:   1 ─► 4 ─► 5 ─► 9        each plan has the number of the one before
                               receipts of the last  ▲
                               max_plans_in_flight   └ latest: runs, or was the last to finish
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_plane.plans.batches.attention_batch import AttentionBatch
from data_plane.plans.batches.checkpoints import Checkpoints
from data_plane.plans.batches.transfers import Batch, Transfers
from data_plane.plans.contents.last_tenants import BlocksByTier
from data_plane.plans.contents.written_slots import SlotsToWrite
from data_plane.plans.progress import Progress
from data_plane.plans.tables.allocations import AllocatedBlocks
from kvplane import tracing
from kvplane.errors import (
    InvalidRequestError,
    PlanConflictError,
    PlanOutOfOrderError,
    SessionExpiredError,
)
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb

MAX_PLANS_IN_FLIGHT = 1024
MAX_SESSION_ID = 2**53 - 1
_MAX_NUMBER = 2**63 - 2
_MAX_KEYS = 16
_PASSES_AT_ONCE = 16
_MANY_ENTRIES = 2**20


@dataclass(slots=True)
class RunningPlan:
    """A plan that was started on this data plane, and how far it has come."""

    number: int
    payload_version: int
    digest: bytes
    whole: tuple[AttentionBatch, ...]
    """The batch of all of the plan's tokens for each layer group, on the host."""
    attention: tuple[AttentionBatch, ...]
    """The batch of each layer group for the plan, or for its present pass, on the kernels' device.
    If the session has fixed steps: on the host until ``PlanRunner.batch`` is called.
    """
    on_host: tuple[AttentionBatch, ...]
    """The batches of ``attention``, on the host."""
    allocated: AllocatedBlocks
    to_clear: tuple[BlocksByTier, BlocksByTier]
    """Blocks that may hold another tenant's data: those to clear before and after transfers."""
    transfers: Transfers
    batches: list[Batch]
    """The transfers as batches for the kernels."""
    of_sources: NDArray[np.int64]
    """How many slots were written in the source block of each transfer, before the plan."""
    to_write: tuple[SlotsToWrite, ...]
    """The slots that the spans write in each layer group."""
    progress: Progress
    """How much of the plan, or of its present pass, is written."""
    checked_version: int
    """The publications' version when the written blocks were last found writable."""
    checked_taken: int
    """The tables' ``num_taken`` when none of the spans' entries was last found stale."""
    checkpoints: Checkpoints | None = None
    """The checkpoints that the plan keeps; None in a pool without states."""
    skips_files: bool = False
    """True if nothing may be loaded from files."""
    pass_index: int | None = None
    """The present pass; None where all tokens are computed at once."""
    cleared: bool = False
    """True once the clearing before the transfers is queued."""
    num_batches_queued: int = 0
    """How many of ``batches`` are queued on the device; each is queued once."""
    transferred: bool = False
    """True once all clearing and transfers are queued. Layers may only come after them."""
    receipt: pb.SignedPayload | None = None
    used_after_receipt: bool = False
    """True if the device may still read the batch after the receipt."""
    failure: str = ""
    """Text that says why there will be no receipt; empty while there may be one."""
    span: Any = None
    """Tracing span that lasts until the plan ends; None while traces are off."""
    _coming: deque[tuple[AttentionBatch, ...]] = field(default_factory=deque)
    """Batches of the passes after the present one."""
    _num_context_tokens: dict[int, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all spans."""
        return self.whole[0].num_tokens

    @property
    def num_spans(self) -> int:
        """Number of spans of the plan."""
        return self.whole[0].num_spans

    @property
    def num_passes(self) -> int:
        """Number of passes in which the plan can be computed, with one token of a span in each."""
        return self.whole[0].max_tokens

    def num_context_tokens(self, window_tokens: int) -> int:
        """Return ``AttentionBatch.num_context_tokens`` of the plan or pass. It is computed once for
        each window, as all batches have the same spans.
        """
        num = self._num_context_tokens.get(window_tokens)
        if num is None:
            num = self.attention[0].num_context_tokens(window_tokens)
            self._num_context_tokens[window_tokens] = num
        return num

    @property
    def is_queued(self) -> bool:
        """Return whether the plan's transfers and the layers of its present pass are all queued."""
        return self.transferred and self.progress.is_complete

    @property
    def is_complete(self) -> bool:
        """Return whether all of the plan's transfers, all layers of all its passes and all its
        checkpoints are queued.
        """
        if self.checkpoints is not None and not self.checkpoints.progress.is_complete:
            return False
        return self.is_queued and self.pass_index in (None, self.num_passes - 1)

    @property
    def writes(self) -> Sequence[AttentionBatch | Checkpoints]:
        """Return what the plan, or its present pass, writes in each layer group."""
        if self.checkpoints is None:
            return self.attention
        return (*self.attention, self.checkpoints)

    def check_next_pass(self, index: int) -> None:
        """Raise PlanOutOfOrderError unless the pass is the present one, or may begin."""
        if self.pass_index is None:
            coming, may_begin = 0, not self.progress.has_begun
            why = "begin pass 0 first" if may_begin else "its layers came without passes already"
        else:
            coming, may_begin = self.pass_index + 1, self.progress.is_complete
            why = f"pass {self.pass_index} was begun last; pass {coming} may begin once it is done"
        if index == self.pass_index or (index == coming and may_begin):
            return
        raise PlanOutOfOrderError(f"plan {self.number}: {why}", field="pass_index")

    def check_pass(self, index: int | None, field: str) -> None:
        """Raise PlanOutOfOrderError naming ``field`` unless the plan is in this pass."""
        if index != self.pass_index:
            present, asked = (
                "all tokens at once" if each is None else f"pass {each}"
                for each in (self.pass_index, index)
            )
            raise PlanOutOfOrderError(
                f"is of {asked}, but plan {self.number} computes {present}", field=field
            )

    def begin_pass(self, index: int) -> None:
        """Begin the next pass, which has this index. Its batch is on the host."""
        if not self._coming:
            # Several at once take a third of the time: between two passes, a model's weights evict
            # this code from the processor's caches.
            is_small = sum(batch.block_tables.numel() for batch in self.whole) < _MANY_ENTRIES
            coming = range(
                index, min(index + (_PASSES_AT_ONCE if is_small else 1), self.num_passes)
            )
            of_groups = [[batch.of_pass(i) for i in coming] for batch in self.whole]
            self._coming.extend(zip(*of_groups, strict=True))
        self.attention = self.on_host = self._coming.popleft()
        num_tokens = np.ones(self.on_host[0].num_spans, np.int64)
        self.pass_index, self.progress = index, Progress(self.progress.num_layers, num_tokens)
        self._num_context_tokens.clear()

    def num_written(self, layers: Sequence[int], span: int) -> int:
        """Return how many tokens of a span were written in all of ``layers``."""
        index = self.pass_index
        if index is None:
            return self.progress.num_written(layers, span)
        starts = self.whole[0].starts
        is_written = all(map(self.progress.is_written, layers))
        return min(int(starts[span + 1] - starts[span]), index + is_written)

    def check_transferred(self) -> None:
        """Raise PlanOutOfOrderError unless all transfers are queued."""
        if not self.transferred:
            raise PlanOutOfOrderError(
                "the transfers of the session's latest plan have not all run: start it again",
                field="plan.number",
            )


@dataclass(slots=True)
class Session:
    """An open session: the plan that it runs, and the receipts of its last plans."""

    ref: pb.SessionRef
    ordinal: int
    tenant: str
    max_plans_in_flight: int
    namespace: str | None
    """The session's namespace; None where the control plane does not send it."""
    finished: int = 0
    """The number of the last plan that finished; 0 before the first."""
    latest: RunningPlan | None = None
    has_ended: bool = False
    has_fixed_steps: bool = False
    """True if most plans use the buffers of a fixed step, and not buffers of their own."""
    receipts: OrderedDict[int, tuple[bytes, pb.SignedPayload]] = field(default_factory=OrderedDict)
    """Digest and receipt of the last ``max_plans_in_flight`` finished plans, by number."""

    @property
    def id(self) -> int:
        """The session's id."""
        return self.ref.session_id

    @property
    def running(self) -> RunningPlan | None:
        """The plan that has started and not finished, None if there is none."""
        return self.latest if self.latest is not None and self.latest.receipt is None else None

    def continued(
        self, plan: plan_pb2.Plan, digest: bytes
    ) -> pb.SignedPayload | RunningPlan | None:
        """Return the receipt of a plan that has run, the run of one that is running, or None for a
        new one that may start.

        Raises PlanConflictError, PlanOutOfOrderError and InvalidRequestError.
        """
        if not 1 <= plan.number <= _MAX_NUMBER:
            raise InvalidRequestError(
                f"must be 1 to {_MAX_NUMBER}, is {plan.number}", field="plan.number"
            )
        known = self.receipts.get(plan.number)
        running = self.running
        if known is not None:
            _check_digest(known[0], digest)
            return known[1]
        if running is not None and running.number == plan.number:
            _check_digest(running.digest, digest)
            return running
        newest = running.number if running is not None else self.finished
        if plan.number <= newest:
            raise PlanOutOfOrderError(
                f"plan {newest} of the session was started here, so plan {plan.number} is void or "
                "its receipt is no longer kept",
                field="plan.number",
            )
        if plan.resync:
            if plan.finished > self.finished:
                raise PlanOutOfOrderError(
                    f"the plan keeps tables as plan {plan.finished} left them, and the session's "
                    f"last plan to finish here is {self.finished}: call AbortPlans with "
                    "whole_tables, whose plan keeps none",
                    field="plan.finished",
                )
            return None
        if running is not None:
            raise PlanOutOfOrderError(
                f"finish plan {newest} first: send its missing layers, or abort it at the control "
                "plane",
                field="plan.previous",
            )
        if plan.previous != self.finished:
            raise PlanOutOfOrderError(
                f"run plan {plan.previous} first: this one follows it, and the session's last plan "
                f"to finish here is {self.finished}",
                field="plan.previous",
            )
        return None

    def finish(self, run: RunningPlan, receipt: pb.SignedPayload) -> None:
        """Record a plan as finished, and keep its receipt."""
        run.receipt = receipt
        self.finished = run.number
        self.receipts[run.number] = (run.digest, receipt)
        while len(self.receipts) > self.max_plans_in_flight:
            self.receipts.popitem(last=False)


class EndedSessions:
    """The sessions that have ended for good, as ranges of their ordinals in the pool. The set only
    grows. Sessions are numbered from 1 as they are opened, and each is fenced when it ends, so
    there is at most one more range than there are sessions open on the pool.
    """

    def __init__(self) -> None:
        # Range i is [_first[i], _last[i]]. Ranges ascend, and no two are adjacent.
        self._first: list[int] = []
        self._last: list[int] = []

    def __contains__(self, ordinal: int) -> bool:
        i = bisect_right(self._first, ordinal) - 1
        return i >= 0 and ordinal <= self._last[i]

    def add(self, ordinal: int) -> None:
        """Add an ordinal to the set, joining adjacent ranges. Does nothing if it is in the set."""
        if ordinal in self:
            return
        i = bisect_right(self._first, ordinal)
        joins_before = i > 0 and self._last[i - 1] == ordinal - 1
        joins_after = i < len(self._first) and self._first[i] == ordinal + 1
        if joins_before and joins_after:
            self._last[i - 1] = self._last.pop(i)
            del self._first[i]
        elif joins_before:
            self._last[i - 1] = ordinal
        elif joins_after:
            self._first[i] = ordinal
        else:
            self._first.insert(i, ordinal)
            self._last.insert(i, ordinal)


class Sessions:
    """The open sessions of a data plane, and those that have ended and never open again."""

    def __init__(self) -> None:
        self._open: dict[int, Session] = {}
        self._ended = EndedSessions()
        # By the key that signed their grants: ordinals start over with a new key, and a key that
        # was replaced returns when two control planes of one incarnation take turns.
        self._ended_by_key = OrderedDict({b"": self._ended})

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._open

    def running(self) -> list[RunningPlan]:
        """Return the plans that have started and not finished."""
        return [run for session in self._open.values() if (run := session.running) is not None]

    def open(self, grant: plan_pb2.SessionGrant) -> Session:
        """Return the session of a verified grant, opening it if it is new.

        Raises SessionExpiredError when it has ended, InvalidRequestError for numbers out of range.
        """
        session_id = grant.session.session_id
        if not 1 <= session_id <= MAX_SESSION_ID:
            raise InvalidRequestError(
                f"must be 1 to {MAX_SESSION_ID}, is {session_id}", field="grant.session.session_id"
            )
        check_ordinal(grant.ordinal, "grant.ordinal")
        if not 1 <= grant.max_plans_in_flight <= MAX_PLANS_IN_FLIGHT:
            raise InvalidRequestError(
                f"must be 1 to {MAX_PLANS_IN_FLIGHT}, is {grant.max_plans_in_flight}",
                field="grant.max_plans_in_flight",
            )
        if grant.ordinal in self._ended:
            raise SessionExpiredError(
                f"session {session_id} has ended: open another one", field="grant.session"
            )
        session = self._open.get(session_id)
        if session is None:
            session = Session(
                grant.session,
                grant.ordinal,
                grant.tenant,
                grant.max_plans_in_flight,
                grant.namespace if grant.HasField("namespace") else None,
            )
            self._open[session_id] = session
        elif session.ordinal != grant.ordinal:
            raise InvalidRequestError(
                f"session {session_id} was opened with ordinal {session.ordinal}, not "
                f"{grant.ordinal}",
                field="grant.ordinal",
            )
        return session

    def get(self, session_id: int) -> Session:
        """Return an open session. Raises SessionExpiredError."""
        session = self._open.get(session_id)
        if session is None:
            raise SessionExpiredError(
                f"session {session_id} is not open here: it has ended, or its grant was not "
                "presented yet"
            )
        return session

    def fence(self, session_id: int, ordinal: int) -> None:
        """End a session, open or not: its grant is refused from now on."""
        session = self._open.pop(session_id, None)
        if session is not None:
            _end(session)
        self._ended.add(ordinal)

    def end_all(self, key_id: bytes) -> None:
        """End every open session. ``key_id`` names the key that signs grants from now on; if it is
        one of the last ``_MAX_KEYS``, grants of sessions that ended under it stay refused.
        """
        for session in self._open.values():
            _end(session)
            self._ended.add(session.ordinal)
        self._open.clear()
        self._ended = self._ended_by_key.setdefault(key_id, EndedSessions())
        self._ended_by_key.move_to_end(key_id)
        if len(self._ended_by_key) > _MAX_KEYS:
            self._ended_by_key.popitem(last=False)


def check_ordinal(ordinal: int, field: str) -> None:
    """Check that a session can have this ordinal. Raises InvalidRequestError."""
    if not 1 <= ordinal <= _MAX_NUMBER:
        raise InvalidRequestError(f"must be 1 to {_MAX_NUMBER}, is {ordinal}", field=field)


def _end(session: Session) -> None:
    """End a session, and the tracing span of its unfinished plan: only spans that end are exported,
    and this one helps to explain an engine's death.
    """
    session.has_ended = True
    if session.running is not None:
        tracing.end(session.running.span, "the session has ended")


def _check_digest(known: bytes, digest: bytes) -> None:
    if known != digest:
        raise PlanConflictError(
            "another plan with this number was started here: present that one again",
            field="plan.number",
        )
