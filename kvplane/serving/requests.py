"""Decodes the requests of a call, after checking the caller and the room for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakValueDictionary

import grpc.aio
from google.protobuf.message import DecodeError

from kvplane.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    KvplaneError,
    QuotaExceededError,
)
from kvplane.serving.callers.identity import HEALTH_CHECKS, Gate
from kvplane.serving.limits.message_bounds import MAX_STRING_BYTES, MessageBounds
from kvplane.serving.limits.receive_budget import ReceiveBudget
from kvplane.wire.twin import whole

# How long the request of a unary call may take to arrive.
_ARRIVAL_S: Final = 30.0
# Smaller answers are not counted: the limit of calls bounds them enough.
_SMALL_ANSWER_BYTES: Final = 1 << 16
# Requests that take a millisecond or more to read.
_LARGE_BYTES: Final = 1 << 20
_BETWEEN_PLANES: Final = frozenset({"/kvplane.plane.v1.RegistrationService/Register"})
# Most calls of a caller at one time, and most health checks of a connection.
MAX_CALLER_CALLS: Final = 4096
MAX_HEALTH_CALLS: Final = 16
# How soon a call without a request to refuse ends after its caller lost the right to make it.
_RECHECK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Admission:
    """Holds what a server checks before it decodes requests. ``bounds``: by method,
    "/SERVICE/METHOD".
    """

    gate: Gate
    bounds: Mapping[str, MessageBounds]
    budget: ReceiveBudget
    answers: ReceiveBudget = field(default_factory=ReceiveBudget)
    """Budget of unread answers to unary calls, which gRPC keeps until the callers read them."""
    num_calls: Counter[str] = field(default_factory=Counter)
    """Number of open calls by caller."""
    large: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock by which large requests are decoded and begun in turn, so that others come between."""
    of_peers: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """Lock of each connection, by which its health checks are read in turn: nobody knows who sends
    them, and gRPC reads a message of any size.
    """


class Requests:
    """Iterates over the requests of one call, as they come. Iteration can continue after a refused
    one, as a generator's could not. ``close`` must be called.
    """

    def __init__(
        self,
        admission: Admission,
        method: str,
        decode: Callable[[bytes], Any] | None,
        context: Any,
    ) -> None:
        """Admit the call, before any of it is read. ``decode``: parses bytes to a message.

        Raises UnauthenticatedError, NotPermittedError, QuotaExceededError.
        """
        self._gate, self._budget, self._large = admission.gate, admission.budget, admission.large
        self._bounds = admission.bounds.get(method)  # None: not a method of the contract
        self._answers = admission.answers
        self._method = method
        self._decode = decode
        self._context = context
        # Planes of neighbouring releases ignore what they do not know of each other.
        self._is_strict = self._bounds is not None and method not in _BETWEEN_PLANES
        self._num_held, self._paid_by = 0, ""
        self._is_open = self._gate.is_open
        self._admitted_at = self._gate.num_reloads
        self._caller = self._gate.admit(method, context)
        self._turn: contextlib.AbstractAsyncContextManager[Any] = contextlib.nullcontext()
        most, self._counts_as = MAX_CALLER_CALLS, self._caller
        if method.startswith(HEALTH_CHECKS):
            most, self._counts_as = MAX_HEALTH_CALLS, f"health {self._caller}"
            self._turn = admission.of_peers.setdefault(self._caller, asyncio.Lock())
        self._num_calls = admission.num_calls
        if self._num_calls[self._counts_as] >= most:
            raise QuotaExceededError(
                f"{most} calls are open, which is the most of one caller", retry_delay_s=1.0
            )
        self._num_calls[self._counts_as] += 1

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Any:
        """Return the next request; the one before counts as answered.

        Raises QuotaExceededError when too many bytes wait to be answered, InvalidRequestError for
        bytes that are no request or exceed its bounds, and as the constructor when the access list
        changed.
        """
        self._release()
        data = await self._context.read()  # gRPC's iterator would keep the request
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        return await self.take(data)

    async def take(self, data: bytes) -> Any:
        """Check and decode the request in ``data``. Raises as iteration does."""
        if not self._is_open:
            self.check_caller()
        self._budget.take(self._caller, len(data))
        self._num_held, self._paid_by = len(data), self._caller
        if self._bounds is not None:
            self._bounds.check(data)
        elif len(data) > MAX_STRING_BYTES:  # of health and reflection
            raise InvalidRequestError(f"must have at most {MAX_STRING_BYTES} bytes")
        if len(data) >= _LARGE_BYTES:
            await self._large.acquire()
            asyncio.get_running_loop().call_soon(self._large.release)
        return self._read(data)

    def _read(self, data: bytes) -> Any:
        if self._decode is None:
            return data
        try:
            message = self._decode(data)
        except DecodeError as error:
            wanted = self._method.rpartition("/")[2]
            raise InvalidRequestError(f"the bytes are not a request of {wanted}") from error
        return whole(message, data) if self._is_strict else message

    async def only(self) -> Any:
        """Return the request of a call that has one. Raises as iteration does, and
        DeadlineExceededError when it does not come in time.
        """
        try:
            async with asyncio.timeout(_ARRIVAL_S), self._turn:
                return await anext(self)
        except TimeoutError:
            raise DeadlineExceededError(f"no request came within {_ARRIVAL_S:g} s") from None
        except StopAsyncIteration:
            raise InvalidRequestError("the call ended without a request") from None

    @property
    def num_bytes(self) -> int:
        """Size of the last request in bytes."""
        return self._num_held

    def hold_answer(self, num_bytes: int) -> None:
        """Count the answer until the call is over. Raises QuotaExceededError when the caller has
        too many bytes of unread answers.
        """
        if num_bytes >= _SMALL_ANSWER_BYTES:
            answers, caller = self._answers, self._caller
            answers.take(caller, num_bytes)
            self._context.add_done_callback(lambda _: answers.give_back(caller, num_bytes))

    def check_caller(self) -> None:
        """Look the caller up again if the access list has changed. Raises as the constructor."""
        num_reloads = self._gate.num_reloads
        if self._admitted_at != num_reloads:
            self._caller = self._gate.admit(self._method, self._context)
            self._admitted_at = num_reloads

    async def revoked(self) -> KvplaneError:
        """Wait until the caller may no longer make the call; returns the error that says why."""
        while True:
            await asyncio.sleep(_RECHECK_S)
            try:
                self.check_caller()
            except KvplaneError as error:
                return error

    def close(self) -> None:
        """End the call: its last request was answered, or nobody waits for the answer."""
        self._release()
        self._num_calls[self._counts_as] -= 1
        if not self._num_calls[self._counts_as]:
            del self._num_calls[self._counts_as]

    def _release(self) -> None:
        if self._num_held:
            self._budget.give_back(self._paid_by, self._num_held)
            self._num_held = 0
