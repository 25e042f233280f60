"""The numbering of a session's steps, so that each runs once however often it is sent.

Invariant: a number goes with one content until it is answered. A call whose outcome is not known
(cancelled, timed out, connection lost) stays as it was sent, receipts included; the same call made
again sends it again, and any other call first sends it again to learn what came of it.

    call A ──► number 5 ──► no answer            A again ──► number 5, same bytes ──► answer
                             └─────────────────► B ──► number 5 (A) ──► unclaimed; B ──► number 6
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
)
from kvplane.retry import Deadline, retry_until
from kvplane.v1 import types_pb2 as pb

Send = Callable[[Any, Deadline], Awaitable[Any]]

# After these the step may have run or not; every other error says that it did not.
_UNKNOWN_OUTCOME: Final = (PlaneUnavailableError, DeadlineExceededError, CancelledError)


@dataclass(frozen=True, slots=True)
class UnclaimedAnswer:
    """The answer to a call that its caller gave up on: a StepResult or a unary response.

    When it has a plan, that plan must run before later ones, or be aborted.
    """

    number: int
    answer: Any


@dataclass(slots=True)
class _Pending:
    request: Any
    send: Send
    in_doubt: bool = False


class Steps:
    """Numbers, sends and remembers. Calls run one after the other."""

    def __init__(self) -> None:
        self.last_number = 0
        self.unclaimed: list[UnclaimedAnswer] = []
        self.receipts: list[pb.SignedPayload] = []
        self._pending: _Pending | None = None
        self._lock = asyncio.Lock()

    async def call(self, content: Any, send: Send, deadline: Deadline) -> Any:
        """What ``send(request, deadline)`` returns for ``content`` with its number filled in.

        ``content``: a request message with ``number`` and ``receipts`` left empty; it is kept.
        Pending receipts go with it, when it has a field for them.
        """
        async with deadline.guard(), self._lock:
            if self._pending is not None and not _is_content_of(self._pending.request, content):
                await self._settle(self._pending, deadline)
            if self._pending is None:
                self._pending = self._number(content, send)
            return await self._answer(self._pending, deadline)

    async def hand_in(self, send: Callable[[list[pb.SignedPayload]], Awaitable[Any]]) -> Any:
        """What ``send(receipts)`` returns; the receipts given to it are then done with."""
        async with self._lock:
            receipts = list(self.receipts)
            try:
                answer = await send(receipts)
            except KvplaneError as error:
                self._drop_refused(error, receipts)
                raise
            self._drop(receipts)
            return answer

    def _number(self, content: Any, send: Send) -> _Pending:
        content.number = self.last_number + 1
        if _takes_receipts(content):
            content.receipts.extend(self.receipts)
        return _Pending(content, send)

    async def _settle(self, pending: _Pending, deadline: Deadline) -> None:
        """Learn what came of a call that was given up. Raises when that can not be learnt now."""
        try:
            answer = await self._answer(pending, deadline)
        except KvplaneError:
            if self._pending is not None:
                raise
            return  # it changed nothing
        self.unclaimed.append(UnclaimedAnswer(pending.request.number, answer))

    async def _answer(self, pending: _Pending, deadline: Deadline) -> Any:
        async def attempt() -> Any:
            pending.in_doubt = True
            try:
                return await pending.send(pending.request, deadline)
            except KvplaneError as error:
                pending.in_doubt = isinstance(error, _UNKNOWN_OUTCOME)
                raise

        try:
            answer = await retry_until(deadline, attempt)
        except KvplaneError as error:
            if not pending.in_doubt:
                self._pending = None
                self._drop_refused(error, _receipts_of(pending.request))
                if isinstance(error, StepConflictError):
                    # The number is taken, though not by this content: a Resync may follow it.
                    self.last_number = pending.request.number
            raise
        self._pending = None
        self.last_number = pending.request.number
        self._drop(_receipts_of(pending.request))
        return answer

    def _drop(self, receipts: Sequence[pb.SignedPayload]) -> None:
        self.receipts = [receipt for receipt in self.receipts if receipt not in receipts]

    def _drop_refused(self, error: KvplaneError, sent: Sequence[pb.SignedPayload]) -> None:
        """Forget a receipt that ``error`` names, or it would spoil every call to come."""
        name, _, rest = error.field.partition("[")
        index = rest.partition("]")[0]
        if name == "receipts" and index.isdecimal() and int(index) < len(sent):
            self._drop([sent[int(index)]])


def _takes_receipts(request: Any) -> bool:
    return "receipts" in request.DESCRIPTOR.fields_by_name


def _receipts_of(request: Any) -> Sequence[pb.SignedPayload]:
    return request.receipts if _takes_receipts(request) else ()


def _is_content_of(request: Any, content: Any) -> bool:
    if type(request) is not type(content):
        return False
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("number")
    if _takes_receipts(bare):
        bare.ClearField("receipts")
    return bool(bare == content)
