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
from kvplane.slices import Slices, run_to_end
from kvplane.wire.v1 import session_pb2 as cpb

_SLICE_BYTES: Final = 1 << 21  # that are digested in one slice: less than a millisecond
_KEPT_BYTES: Final = 1 << 14  # of a request that is kept itself: about as much as its answer
_METHODS: Final[dict[type[Message], bytes]] = {
    cpb.StepRequest: b"step",
    cpb.AbortPlansRequest: b"abort_plans",
}


class Answer:
    """The answer that a number got: a message, or why its request failed as a whole."""

    __slots__ = ("_content", "_error", "_message", "_request")

    def __init__(
        self, request: Any, content: bytes, message: Any, error: KvplaneError | None
    ) -> None:
        """``content``: the digest of the request; empty to compute it later. ``message``: a
        protobuf message or a StepAnswer.
        """
        self._request = None if content else request
        self._content = content
        self._message = message
        # A copy without a traceback, which would keep the request alive.
        self._error = None if error is None else _copy(error)

    def content(self) -> bytes:
        """Return the digest of the request (``content_of``), computed by the first call."""
        if self._request is not None:
            self._content, self._request = content_of(self._request), None
        return self._content

    def shrink(self) -> None:
        """Replace the request by its digest if it is large. Few small ones are ever repeated, and
        to keep one costs less than to digest it.
        """
        if self._request is not None and self._request.ByteSize() > _KEPT_BYTES:
            self.content()

    def result(self) -> Any:
        """Return the message, or the StepAnswer. Raises the error if the request failed."""
        if self._error is not None:
            raise _copy(self._error)
        return self._message


class Numbering:
    """The ``last`` number used, the last one ``answered``, and the answers still remembered."""

    __slots__ = ("_answers", "_digest", "_latest", "_num_kept", "answered", "last")

    def __init__(self, num_kept: int) -> None:
        self.last = 0
        self.answered = 0
        self._num_kept = num_kept
        self._answers: OrderedDict[int, Answer] = OrderedDict()
        self._latest: Answer | None = None
        self._digest = b""

    def is_remembered(self, number: int) -> bool:
        """Return whether ``repeated`` compares a request of this number with an earlier one."""
        return number in self._answers

    def digest(self, request: Any) -> Slices[None]:
        """Digest a large request in slices, for the next call of ``repeated`` or ``remember``,
        which would do it at once.
        """
        self._digest = yield from _digested(request)

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
        if answer.content() != self._content_of(request):
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
        content, self._digest = self._digest, b""
        answer = self._answers[self.last] = Answer(request, content, message, error)
        self._latest = None if content else answer
        while len(self._answers) > self._num_kept:
            self._answers.popitem(last=False)
        self.answered = self.last

    def settle(self) -> None:
        """Replace the last request, if it is large, by its digest, which is enough to recognise a
        repeat. Called after the answer is sent, which need not wait for it.
        """
        if self._latest is not None:
            self._latest.shrink()
            self._latest = None

    def _content_of(self, request: Any) -> bytes:
        content, self._digest = self._digest, b""
        return content or content_of(request)


def content_of(request: Any) -> bytes:
    """Return a digest of the method, the number and everything else in the request but its session,
    its traceparent and its receipts: a repeat may bring others.
    """
    return run_to_end(_digested(request))


def _digested(request: Any) -> Slices[bytes]:
    # Part by part: a copy of the request without its receipts would cost more than the rest.
    content = xxhash.xxh3_128(b"%b %d" % (_METHODS[type(request)], request.number))
    if isinstance(request, cpb.AbortPlansRequest):
        content.update(b" %d %d" % (request.plan_number, request.whole_tables))
        return content.digest()
    for operation in request.operations:
        kind = operation.WhichOneof("operation")
        message = getattr(operation, kind) if kind in ("admit", "append") else None
        if message is not None and len(token_ids := message.token_ids) > _SLICE_BYTES:
            yield from _add_large(content, message, token_ids)
            continue
        encoded = operation.SerializeToString()
        content.update(b"%d " % len(encoded))
        content.update(encoded)
    if request.HasField("deferred_tokens"):
        encoded = request.deferred_tokens.SerializeToString()
        content.update(b" deferred %d " % len(encoded))
        content.update(encoded)
    return content.digest()


def _add_large(content: xxhash.xxh3_128, message: Message, token_ids: bytes) -> Slices[None]:
    """Add an operation of many tokens, which would take too long to encode."""
    content.update(b"%b %d " % (message.DESCRIPTOR.name.encode(), len(token_ids)))
    view = memoryview(token_ids)
    for begin in range(0, len(view), _SLICE_BYTES):
        yield
        content.update(view[begin : begin + _SLICE_BYTES])
    for field in message.DESCRIPTOR.fields:
        if field.name != "token_ids":
            is_set = not field.has_presence or message.HasField(field.name)
            encoded = repr((is_set, getattr(message, field.name))).encode()
            content.update(b" %d " % len(encoded))
            content.update(encoded)


def _copy(error: KvplaneError) -> KvplaneError:
    copy = type(error)(error.message, field=error.field, retry_delay_s=error.retry_delay_s)
    copy.next_number = error.next_number
    return copy
