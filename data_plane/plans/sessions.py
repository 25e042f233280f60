"""The sessions that are open here, the order of their plans, and the ids that are dead for good.

plan numbers of one session:   1 ─► 4 ─► 5 ─► 9        each names the one before it
                               receipts of the last  ▲
                               max_plans_in_flight   └ latest: runs, or was the last to finish
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from data_plane.plans.attention_batch import Rows
from data_plane.plans.transfers import Batch
from kvplane.errors import (
    InvalidRequestError,
    PlanConflictError,
    PlanOutOfOrderError,
    SessionExpiredError,
    SessionNotFoundError,
)
from kvplane.v1 import types_pb2 as pb

MAX_PLANS_IN_FLIGHT = 1024
_MAX_REMEMBERED_FENCES = 65_536
_MAX_NUMBER = 2**63 - 2


@dataclass(slots=True)
class Run:
    """A plan that was started here."""

    number: int
    digest: bytes
    rows: Rows
    batches: list[Batch]
    written: torch.Tensor
    """[num_layers, num_rows] bool: what has been written."""
    checked_version: int
    """The tables' publication version when the written blocks were last found writable."""
    num_batches_given: int = 0
    """Of ``batches``; each is given once."""
    receipt: pb.SignedPayload | None = None
    used_after_receipt: bool = False
    """Whether the device may still read its rows though it has its receipt."""
    failure: str = ""
    """Why there will be no receipt; empty while there may be one."""

    @property
    def transferred(self) -> bool:
        """Whether all transfers were given to the kernels. Layers may only come after them."""
        return self.num_batches_given == len(self.batches)

    @property
    def is_complete(self) -> bool:
        """Whether all that it asks for was given to the kernels."""
        return self.transferred and bool(self.written.all())


@dataclass(slots=True)
class Session:
    """One open session."""

    id: int
    max_plans_in_flight: int
    finished: int = 0
    latest: Run | None = None
    receipts: OrderedDict[int, tuple[bytes, pb.SignedPayload]] = field(default_factory=OrderedDict)

    @property
    def running(self) -> Run | None:
        """The plan that has started and not finished."""
        return self.latest if self.latest is not None and self.latest.receipt is None else None

    def place(self, plan: pb.Plan, digest: bytes) -> pb.SignedPayload | Run | None:
        """Where a plan belongs: its receipt if it has run, its run if it is running, None if it is
        new and may start.

        Raises PlanConflictError, PlanOutOfOrderError and InvalidRequestError.
        """
        if not 1 <= plan.number <= _MAX_NUMBER:
            raise InvalidRequestError("must be above 0", field="plan.number")
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
            raise PlanOutOfOrderError(f"plan {newest} has started here", field="plan.number")
        if plan.resync:
            return None
        if running is not None:
            raise PlanOutOfOrderError(f"plan {newest} has not finished", field="plan.previous")
        if plan.previous != self.finished:
            raise PlanOutOfOrderError(
                f"the plan that finished last is {self.finished}", field="plan.previous"
            )
        return None

    def finish(self, run: Run, receipt: pb.SignedPayload) -> None:
        """Keep the receipt of the plan that ran."""
        run.receipt = receipt
        self.finished = run.number
        self.receipts[run.number] = (run.digest, receipt)
        while len(self.receipts) > self.max_plans_in_flight:
            self.receipts.popitem(last=False)


class Sessions:
    """The open sessions and the fenced ones. Ids are never given twice, so a fence is for good."""

    def __init__(self) -> None:
        self.max_session_id = 0
        self._open: dict[int, Session] = {}
        self._fenced: set[int] = set()
        # Ids up to here are dead unless open, so that the set can stay small.
        self._fenced_through = 0

    def __len__(self) -> int:
        return len(self._open)

    def ids(self) -> list[int]:
        """The open sessions."""
        return list(self._open)

    def running(self) -> list[Run]:
        """The plans that have started and not finished."""
        return [run for session in self._open.values() if (run := session.running) is not None]

    def open(self, grant: pb.SessionGrant) -> Session:
        """The session of a verified grant; made when it is new.

        Raises SessionExpiredError when it was fenced, InvalidRequestError for numbers out of range.
        """
        if not 1 <= grant.session_id <= _MAX_NUMBER:
            raise InvalidRequestError("must be above 0", field="grant.session_id")
        if not 1 <= grant.max_plans_in_flight <= MAX_PLANS_IN_FLIGHT:
            raise InvalidRequestError(
                f"must be 1 to {MAX_PLANS_IN_FLIGHT}", field="grant.max_plans_in_flight"
            )
        session = self._open.get(grant.session_id)
        if session is not None:
            return session
        if grant.session_id in self._fenced or grant.session_id <= self._fenced_through:
            raise SessionExpiredError(
                f"session {grant.session_id} has ended", field="grant.session_id"
            )
        session = Session(grant.session_id, grant.max_plans_in_flight)
        self._open[session.id] = session
        self.max_session_id = max(self.max_session_id, session.id)
        return session

    def get(self, session_id: int) -> Session:
        """An open session. Raises SessionExpiredError or SessionNotFoundError."""
        session = self._open.get(session_id)
        if session is not None:
            return session
        if session_id <= self.max_session_id:
            raise SessionExpiredError(f"session {session_id} is not open")
        raise SessionNotFoundError(f"session {session_id} was never opened here")

    def fence(self, session_id: int) -> None:
        """End a session, open or not: its id is refused from now on."""
        self._open.pop(session_id, None)
        self.max_session_id = max(self.max_session_id, session_id)
        if session_id > self._fenced_through:
            self._fenced.add(session_id)
        if len(self._fenced) > _MAX_REMEMBERED_FENCES:
            self._fenced_through = min(self._fenced)
            self._fenced.discard(self._fenced_through)

    def close_all(self) -> None:
        """End every session: ids seen so far are refused from now on."""
        self._open.clear()
        self._fenced.clear()
        self._fenced_through = self.max_session_id


def _check_digest(known: bytes, digest: bytes) -> None:
    if known != digest:
        raise PlanConflictError("was shown with another content", field="plan.number")
