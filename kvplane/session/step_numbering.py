"""The numbering of a session's requests, so that each runs once however often it is sent.

An answer settles a call, and so does an error with ``next_number``, which the next call gets. Any
other error came before the control plane looked at the number: the next call has the same one. If a
late copy of the refused call has used it by then, the next call is refused and numbered anew.

A call is in doubt once its outcome is not known (cancelled, timed out, connection lost), because a
copy of it may still arrive and run: no error without ``next_number`` settles it any more. It stays
as it was sent, receipts included. The same call made again sends it again; any other call first
sends it again to learn its outcome.

    call A ──► number 5 ──► no answer            A again ──► number 5, same bytes ──► answer
                             └─────────────────► B ──► number 5 (A) ──► abandoned; B ──► number 6

Receipts that no call carries are submitted in the background (see ``Session``). That call is
numbered like all others, and never made between an abandoned call and its repetition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvplane.errors import (
    CancelledError,
    DeadlineExceededError,
    KvplaneError,
    PlaneUnavailableError,
    StepConflictError,
    StepOutOfOrderError,
)
from kvplane.results import SessionNews, StepResult
from kvplane.transport.retry import Deadline, retry_until
from kvplane.wire.v1 import session_pb2
from kvplane.wire.v1 import types_pb2 as pb

Send = Callable[[Any, Deadline], Awaitable[Any]]

# After these errors the request may have run or not.
_UNKNOWN_OUTCOME: Final = (PlaneUnavailableError, DeadlineExceededError, CancelledError)


@dataclass(frozen=True, slots=True)
class AbandonedResult:
    """The answer to a call that its caller abandoned: a StepResult or an AbortPlansResponse.

    If it has a plan, that plan must run before later ones, or be aborted.
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
    """Numbers a session's requests and sends them, one after the other.

    ``last_number``: of the last answered call, ``submit_idle`` left out; 0 before the first.
    ``changed`` is set when a receipt was added and when a call has ended.
    """

    def __init__(self) -> None:
        self.last_number = 0
        self.abandoned: list[AbandonedResult] = []
        self.receipts: list[pb.SignedPayload] = []
        self.changed = asyncio.Event()
        self._unread: SessionNews | None = None
        self._next_number = 1
        self._pending: _Pending | None = None
        self._lock = asyncio.Lock()

    def add_receipt(self, receipt: pb.SignedPayload) -> None:
        """Add ``receipt`` to the next call."""
        self.receipts.append(receipt)
        self.changed.set()

    async def call(self, content: Any, send: Send, deadline: Deadline) -> Any:
        """Send a request under the next number and return its answer: the result of ``send(request,
        deadline)`` for ``content`` with its number and all pending receipts filled in.

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
        """Make a ``call`` only to submit pending receipts. Does nothing if there are none, or if a
        call runs or was abandoned: that one, or the next, carries them.
        """
        if self._lock.locked():
            return
        async with deadline.guard(), self._lock:
            if self._pending is None and self.receipts:
                self._pending = self._number(content, send, is_asked_for=False)
            if self._pending is not None and not self._pending.is_asked_for:
                self.keep_news(await self._answer(self._pending, deadline))

    def keep_news(self, answer: StepResult) -> None:
        """Keep the news in an answer that the caller does not see, for its next answer."""
        if answer.has_news:
            self._unread = answer.news if self._unread is None else self._unread.then(answer.news)

    def with_unread_news(self, answer: StepResult) -> StepResult:
        """Return the answer with the news that were kept, each given once."""
        unread, self._unread = self._unread, None
        return answer if unread is None else answer.after(unread)

    def forget_grants(self) -> None:
        """Drop grants from kept news: after an abort they no longer say what the sequences hold."""
        if self._unread is not None:
            self._unread = replace(self._unread, granted=())

    def _number(self, content: Any, send: Send, *, is_asked_for: bool) -> _Pending:
        content.number = self._next_number
        content.receipts.extend(self.receipts)
        return _Pending(content, send, is_asked_for)

    async def _settle(self, pending: _Pending, deadline: Deadline) -> None:
        """Learn an abandoned call's outcome by sending it again. Raises when that fails now."""
        try:
            answer = await self._answer(pending, deadline)
        except KvplaneError:
            if self._pending is not None:
                raise
            return  # the call was refused, and its caller no longer waits
        if isinstance(answer, StepResult) and not pending.request.operations:
            self.keep_news(answer)
        else:
            self.abandoned.append(AbandonedResult(pending.request.number, answer))

    async def _answer(self, pending: _Pending, deadline: Deadline) -> Any:
        request = pending.request

        async def attempt() -> Any:
            while True:
                was_in_doubt, pending.in_doubt = pending.in_doubt, True
                try:
                    return await pending.send(request, deadline)
                except KvplaneError as error:
                    is_unknown = was_in_doubt or isinstance(error, _UNKNOWN_OUTCOME)
                    pending.in_doubt = is_unknown and not error.next_number
                    if not _may_be_renumbered(error, request.number, was_in_doubt):
                        raise
                    request.number = self._next_number = error.next_number

        try:
            answer = await retry_until(deadline, attempt)
        except KvplaneError as error:
            if not pending.in_doubt:
                self._drop_refused(error, request.receipts)
                self._settled(pending, error.next_number)
            raise
        self._settled(pending, request.number + 1)
        self._drop(request.receipts)
        return answer

    def _settled(self, pending: _Pending, next_number: int) -> None:
        self._pending = None
        if next_number:
            self._next_number = next_number
            if pending.is_asked_for:
                self.last_number = pending.request.number

    def _drop(self, receipts: Sequence[pb.SignedPayload]) -> None:
        self.receipts = [receipt for receipt in self.receipts if receipt not in receipts]

    def _drop_refused(self, error: KvplaneError, sent: Sequence[pb.SignedPayload]) -> None:
        """Drop the receipt that ``error`` names: it would make every later call fail."""
        name, _, rest = error.field.partition("[")
        index = rest.partition("]")[0]
        if name == "receipts" and index.isdecimal() and int(index) < len(sent):
            self._drop([sent[int(index)]])


def _may_be_renumbered(error: KvplaneError, number: int, was_in_doubt: bool) -> bool:
    """Return whether ``error`` says that the request ``number`` has certainly not run."""
    if error.next_number in (0, number):
        return False
    # A number is also out of order once its answer is forgotten. An earlier copy may have got it.
    is_out_of_order = isinstance(error, StepOutOfOrderError)
    return isinstance(error, StepConflictError) or (is_out_of_order and not was_in_doubt)


def _repeats(pending: _Pending, content: Any) -> bool:
    request = pending.request
    if not pending.is_asked_for or type(request) is not type(content):
        return False
    bare = type(request)()
    bare.CopyFrom(request)
    for field in ("number", "receipts"):
        bare.ClearField(field)
    if isinstance(bare, session_pb2.StepRequest):
        bare.traceparent = content.traceparent
    return bool(bare == content)
