"""The numbering of a session's requests, so that each runs once however often it is sent.

Invariant: a number keeps one content until it is answered, and any answer, even an error, is taken
to use it up. A call whose outcome is not known (cancelled, timed out, connection lost) stays as it
was sent, receipts included. The same call made again sends it again; any other call first sends it
again to learn its outcome.

    call A ──► number 5 ──► no answer            A again ──► number 5, same bytes ──► answer
                             └─────────────────► B ──► number 5 (A) ──► abandoned; B ──► number 6

Some refusals come before the control plane reads the number (a message too large, a caller that is
not authenticated), and the caller cannot tell them all from others. So numbers refused since the
last one that was surely used may be free: if the next one is out of order, they are tried in turn.

Receipts that no call carries are submitted in the background (see ``Session``). That call is
numbered like all others, and never made between an abandoned call and its repetition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvplane.errors import (
    CancelledError,
    DeadlineExceededError,
    KvplaneError,
    PlaneUnavailableError,
    StepConflictError,
    StepOutOfOrderError,
)
from kvplane.transport.retry import Deadline, retry_until
from kvplane.v1 import control_pb2
from kvplane.v1 import types_pb2 as pb

Send = Callable[[Any, Deadline], Awaitable[Any]]

# After these errors the request may have run or not; every other error is its answer.
_UNKNOWN_OUTCOME: Final = (PlaneUnavailableError, DeadlineExceededError, CancelledError)


@dataclass(frozen=True, slots=True)
class AbandonedResult:
    """The answer to a call that its caller abandoned: a StepResult, an AbortPlanResponse or a
    ResyncResponse.

    When it has a plan, that plan must run before later ones, or be aborted.
    """

    number: int
    answer: Any


@dataclass(slots=True)
class _Pending:
    request: Any
    send: Send
    is_asked_for: bool
    in_doubt: bool = False


class Steps:
    """Numbers and sends requests, one after the other.

    ``last_number``: of the last answered call, ``submit_idle`` left out; 0 before the first.
    ``changed`` is set when a receipt was added and when a call has ended.
    """

    def __init__(self) -> None:
        self.last_number = 0
        self.abandoned: list[AbandonedResult] = []
        self.receipts: list[pb.SignedPayload] = []
        self.changed = asyncio.Event()
        self._last_used = 0
        self._last_surely_used = 0
        self._pending: _Pending | None = None
        self._lock = asyncio.Lock()

    def add_receipt(self, receipt: pb.SignedPayload) -> None:
        """Send ``receipt`` with the next call."""
        self.receipts.append(receipt)
        self.changed.set()

    async def call(self, content: Any, send: Send, deadline: Deadline) -> Any:
        """Return the result of ``send(request, deadline)`` for ``content`` with its number and all
        pending receipts filled in.

        ``content``: a request message with ``number`` and ``receipts`` left empty; it is kept.
        """
        try:
            async with deadline.guard(), self._lock:
                if self._pending is not None and not _repeats(self._pending, content):
                    await self._settle(self._pending, deadline)
                if self._pending is None:
                    self._pending = self._number(content, send, is_asked_for=True)
                return await self._answer(self._pending, deadline)
        finally:
            self.changed.set()

    async def submit_idle(self, content: Any, send: Send, deadline: Deadline) -> None:
        """``call`` for pending receipts alone. Does nothing if there are none, or if a call runs or
        was abandoned: that one, or the next, carries them.
        """
        if self._lock.locked():
            return
        async with deadline.guard(), self._lock:
            if self._pending is None and self.receipts:
                self._pending = self._number(content, send, is_asked_for=False)
            if self._pending is not None and not self._pending.is_asked_for:
                await self._answer(self._pending, deadline)

    def _number(self, content: Any, send: Send, *, is_asked_for: bool) -> _Pending:
        content.number = self._last_used + 1
        content.receipts.extend(self.receipts)
        return _Pending(content, send, is_asked_for)

    async def _settle(self, pending: _Pending, deadline: Deadline) -> None:
        """Learn the outcome of an abandoned call. Raises when that cannot be learnt now."""
        try:
            answer = await self._answer(pending, deadline)
        except KvplaneError:
            if self._pending is not None:
                raise
            return  # the call was refused, and its caller no longer waits
        if not isinstance(answer, control_pb2.SubmitReceiptsResponse):
            self.abandoned.append(AbandonedResult(pending.request.number, answer))

    async def _answer(self, pending: _Pending, deadline: Deadline) -> Any:
        async def attempt() -> Any:
            pending.in_doubt = True
            try:
                return await pending.send(pending.request, deadline)
            except KvplaneError as error:
                pending.in_doubt = isinstance(error, _UNKNOWN_OUTCOME)
                raise

        request = pending.request
        while True:
            try:
                answer = await retry_until(deadline, attempt)
                break
            except KvplaneError as error:
                if self._try_another_number(request, error):
                    continue
                if not pending.in_doubt:
                    self._pending = None
                    self._drop_refused(error, request.receipts)
                    if not isinstance(error, StepOutOfOrderError):
                        self._use(pending)
                raise
        self._pending = None
        self._use(pending)
        self._last_surely_used = request.number
        self._drop(request.receipts)
        return answer

    def _use(self, pending: _Pending) -> None:
        self._last_used = pending.request.number
        if pending.is_asked_for:
            self.last_number = self._last_used

    def _try_another_number(self, request: Any, error: KvplaneError) -> bool:
        """Give ``request`` another number, if ``error`` refuses its own. Returns whether it did."""
        if isinstance(error, StepOutOfOrderError):
            is_tried = request.number == self._last_surely_used + 1
            request.number = self._last_surely_used + 1
            return not is_tried
        if isinstance(error, StepConflictError) and request.number <= self._last_used:
            self._last_surely_used = request.number
            request.number += 1
            return True
        return False

    def _drop(self, receipts: Sequence[pb.SignedPayload]) -> None:
        self.receipts = [receipt for receipt in self.receipts if receipt not in receipts]

    def _drop_refused(self, error: KvplaneError, sent: Sequence[pb.SignedPayload]) -> None:
        """Drop the receipt that ``error`` names: it would make every later call fail."""
        name, _, rest = error.field.partition("[")
        index = rest.partition("]")[0]
        if name == "receipts" and index.isdecimal() and int(index) < len(sent):
            self._drop([sent[int(index)]])


def _repeats(pending: _Pending, content: Any) -> bool:
    request = pending.request
    if not pending.is_asked_for or type(request) is not type(content):
        return False
    bare = type(request)()
    bare.CopyFrom(request)
    for field in ("number", "receipts"):
        bare.ClearField(field)
    if isinstance(bare, control_pb2.StepRequest):
        bare.traceparent = content.traceparent
    return bool(bare == content)
