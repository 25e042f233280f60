"""The numbers of one session's requests: each is used once, even if its request fails.

    number == last + 1      the next: it runs
    number remembered       the answer that it got, also an error; STEP_CONFLICT for other content
    any other               STEP_OUT_OF_ORDER

Invariant: at most ``num_kept`` answers are remembered, those of the last numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import xxhash
from google.protobuf.message import Message

from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    StepConflictError,
    StepOutOfOrderError,
)
from kvplane.v1 import control_pb2 as cpb

_METHODS: Final[dict[type[Message], bytes]] = {
    cpb.StepRequest: b"step",
    cpb.SubmitReceiptsRequest: b"submit_receipts",
    cpb.AbortPlanRequest: b"abort_plan",
    cpb.ResyncRequest: b"resync",
}
_WITH_TOKENS: Final = (cpb.StepRequest, cpb.SubmitReceiptsRequest)


class Answer:
    """The answer to a number: a message, or why the request failed as a whole."""

    __slots__ = ("_error", "_message", "content")

    def __init__(self, content: bytes, message: Any, error: KvplaneError | None) -> None:
        """``message``: a message or an encoded StepResponse."""
        self.content = content
        self._message = message
        # A copy without a traceback, which would keep the request alive.
        self._error = None if error is None else _copy(error)

    def result(self) -> Any:
        """Return the message. Raises the error instead when there is one."""
        if self._error is not None:
            raise _copy(self._error)
        if isinstance(self._message, bytes):
            self._message = cpb.StepResponse.FromString(self._message)
        return self._message


class Numbering:
    """The last number used, and the answers that are still remembered."""

    __slots__ = ("_answers", "_num_kept", "last")

    def __init__(self, num_kept: int) -> None:
        self.last = 0
        self._num_kept = num_kept
        self._answers: OrderedDict[int, Answer] = OrderedDict()

    def repeated(self, number: int, content: bytes) -> Answer | None:
        """Return the answer that the number got, or None when it is the next one.

        Raises InvalidRequestError, StepOutOfOrderError, StepConflictError; none uses a number.
        """
        if number < 1:
            raise InvalidRequestError("must be at least 1: count requests from 1", field="number")
        if number == self.last + 1:
            return None
        answer = self._answers.get(number)
        if answer is None:
            raise StepOutOfOrderError(
                f"{number} is not the next: send the next request as {self.last + 1}",
                field="number",
            )
        if answer.content != content:
            raise StepConflictError(
                f"{number} was used for a request of other content: send this one as "
                f"{self.last + 1}",
                field="number",
            )
        return answer

    def use(self) -> None:
        """Use up the next number."""
        self.last += 1

    def remember(self, content: bytes, message: Any, error: KvplaneError | None = None) -> None:
        """Remember the last number's answer: a message or encoded StepResponse, or an error."""
        self._answers[self.last] = Answer(content, message, error)
        while len(self._answers) > self._num_kept:
            self._answers.popitem(last=False)


def content_of(request: Any) -> bytes:
    """Return a digest of the method, the number and everything else in the request but its session,
    its traceparent and its receipts: a repeat may bring others.
    """
    # Part by part: a copy of the request without its receipts would cost more than the rest.
    kind = type(request)
    content = xxhash.xxh3_128(b"%b %d" % (_METHODS[kind], request.number))
    if kind is cpb.StepRequest:
        for operation in request.operations:
            _add(content, operation)
    elif kind is cpb.AbortPlanRequest:
        content.update(b" %d" % request.plan_number)
    if kind in _WITH_TOKENS and request.HasField("deferred_tokens"):
        content.update(b" deferred ")
        _add(content, request.deferred_tokens)
    return content.digest()


def _add(content: xxhash.xxh3_128, part: Message) -> None:
    encoded = part.SerializeToString()
    content.update(b"%d " % len(encoded))
    content.update(encoded)


def _copy(error: KvplaneError) -> KvplaneError:
    return type(error)(error.message, field=error.field, retry_delay_s=error.retry_delay_s)
