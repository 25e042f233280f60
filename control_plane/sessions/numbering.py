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
from kvplane.wire.v1 import session_pb2 as cpb

_METHODS: Final[dict[type[Message], bytes]] = {
    cpb.StepRequest: b"step",
    cpb.AbortPlansRequest: b"abort_plans",
}


class Answer:
    """The answer that a number got: a message, or why its request failed as a whole."""

    __slots__ = ("_content", "_error", "_message", "_request")

    def __init__(self, request: Any, message: Any, error: KvplaneError | None) -> None:
        """``message``: a protobuf message or a StepAnswer."""
        self._request = request
        self._content = b""
        self._message = message
        # A copy without a traceback, which would keep the request alive.
        self._error = None if error is None else _copy(error)

    def content(self) -> bytes:
        """Return the digest of the request (``content_of``), computed by the first call."""
        if self._request is not None:
            self._content, self._request = content_of(self._request), None
        return self._content

    def result(self) -> Any:
        """Return the message, or the StepAnswer. Raises the error if the request failed."""
        if self._error is not None:
            raise _copy(self._error)
        return self._message


class Numbering:
    """The last number used, and the answers that are still remembered."""

    __slots__ = ("_answers", "_latest", "_num_kept", "last")

    def __init__(self, num_kept: int) -> None:
        self.last = 0
        self._num_kept = num_kept
        self._answers: OrderedDict[int, Answer] = OrderedDict()
        self._latest: Answer | None = None

    def repeated(self, request: Any) -> Answer | None:
        """Return the answer that this request's number got before, or None if the number is the
        next one.

        Raises InvalidRequestError, StepOutOfOrderError, StepConflictError; none uses a number.
        """
        number = request.number
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
        if answer.content() != content_of(request):
            raise StepConflictError(
                f"{number} was used for a request of other content: send this one as "
                f"{self.last + 1}",
                field="number",
            )
        return answer

    def use(self) -> None:
        """Use up the next number, whether or not its request succeeds."""
        self.last += 1

    def remember(self, request: Any, message: Any, error: KvplaneError | None = None) -> None:
        """Remember the last number's answer: a message or a StepAnswer, or an error."""
        self.settle()
        self._latest = self._answers[self.last] = Answer(request, message, error)
        while len(self._answers) > self._num_kept:
            self._answers.popitem(last=False)

    def settle(self) -> None:
        """Replace the last request by its digest, which is enough to recognise a repeat. Called
        after the answer is sent, which need not wait for it.
        """
        if self._latest is not None:
            self._latest.content()
            self._latest = None


def content_of(request: Any) -> bytes:
    """Return a digest of the method, the number and everything else in the request but its session,
    its traceparent and its receipts: a repeat may bring others.
    """
    # Part by part: a copy of the request without its receipts would cost more than the rest.
    content = xxhash.xxh3_128(b"%b %d" % (_METHODS[type(request)], request.number))
    if isinstance(request, cpb.AbortPlansRequest):
        content.update(b" %d %d" % (request.plan_number, request.whole_tables))
        return content.digest()
    for operation in request.operations:
        encoded = operation.SerializeToString()
        content.update(b"%d " % len(encoded))
        content.update(encoded)
    if request.HasField("deferred_tokens"):
        encoded = request.deferred_tokens.SerializeToString()
        content.update(b" deferred %d " % len(encoded))
        content.update(encoded)
    return content.digest()


def _copy(error: KvplaneError) -> KvplaneError:
    copy = type(error)(error.message, field=error.field, retry_delay_s=error.retry_delay_s)
    copy.next_number = error.next_number
    return copy
