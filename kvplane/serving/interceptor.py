"""One interceptor around every RPC: callers are let through or refused, typed errors become gRPC
statuses, calls are counted, and no other error's text reaches the caller.

It also decodes the requests, so that bytes that are not the method's message are the caller's error
(INVALID_ARGUMENT) and not the server's. On a stream the decoding error is raised by the request
iterator, which can still be read after it; ``ServicerContext.read`` is not decoded, so servicers
here iterate.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from kvplane.errors import InternalError, InvalidRequestError, KvplaneError
from kvplane.serving.identity import Gate
from kvplane.serving.logs import frames_of
from kvplane.serving.message_bounds import MessageBounds
from kvplane.serving.metrics import RpcMetrics
from kvplane.wire.error_codec import to_rich_status

_LOGGER: Final = logging.getLogger(__name__)

_Context = Any  # grpc.aio's context classes are generic in the stubs and plain at run time
_Decode = Callable[[bytes], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps what handlers raise and counts what they answer."""

    def __init__(
        self, metrics: RpcMetrics, gate: Gate, bounds: Mapping[str, MessageBounds]
    ) -> None:
        """``bounds``: of the requests, by method, "/SERVICE/METHOD"."""
        self._metrics = metrics
        self._gate = gate
        self._bounds = bounds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED
            return None
        method = handler_call_details.method
        decode = _bounded(handler.request_deserializer, self._bounds.get(method))
        call = _Call(self._metrics, self._gate, method, decode)
        encode = handler.response_serializer
        if handler.unary_unary:
            unary = call.wrap_unary(handler.unary_unary)
            return grpc.unary_unary_rpc_method_handler(unary, None, encode)
        if handler.unary_stream:
            stream = call.wrap_stream(handler.unary_stream, lambda data, _: call.decode(data))
            return grpc.unary_stream_rpc_method_handler(stream, None, encode)
        if handler.stream_unary:
            raise TypeError(f"{handler_call_details.method}: no service here streams to unary")
        stream = call.wrap_stream(handler.stream_stream, call.decode_all)
        return grpc.stream_stream_rpc_method_handler(stream, None, encode)


class _Call:
    """One RPC."""

    def __init__(
        self, metrics: RpcMetrics, gate: Gate, method: str, decode: _Decode | None
    ) -> None:
        self._metrics = metrics
        self._gate = gate
        self._method = method
        self._decode = decode

    def decode(self, data: bytes) -> Any:
        """The request in ``data``. Raises InvalidRequestError."""
        if self._decode is None:
            return data
        try:
            return self._decode(data)
        except DecodeError as error:
            wanted = self._method.rpartition("/")[2]
            raise InvalidRequestError(f"the bytes are not a request of {wanted}") from error

    def decode_all(self, requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[Any]:
        """The requests on a stream, decoded as they come, while the caller may make the call."""
        admitted_at = self._gate.num_reloads

        def decode(data: bytes) -> Any:
            nonlocal admitted_at
            if admitted_at != self._gate.num_reloads:
                admitted_at = self._gate.num_reloads
                self._gate.admit(self._method, context)
            return self.decode(data)

        return _Decoded(requests, decode)

    def wrap_unary(self, handler: Callable[[Any, _Context], Any]) -> Callable[..., Any]:
        async def handle(data: bytes, context: _Context) -> Any:
            begin = time.perf_counter()
            code = grpc.StatusCode.OK
            try:
                self._gate.admit(self._method, context)
                response = handler(self.decode(data), context)
                return await response if inspect.isawaitable(response) else response
            except BaseException as error:
                code, status = self._judge(error, context)
                if status is None:
                    raise
                await _abort(context, status)
            finally:
                self._metrics.duration.add(time.perf_counter() - begin, self._method)
                self._metrics.handled.inc(self._method, code.name)

        return handle

    def wrap_stream(
        self, handler: Callable[[Any, _Context], Any], decode: Callable[[Any, _Context], Any]
    ) -> Callable[..., Any]:
        async def handle(incoming: Any, context: _Context) -> AsyncIterator[Any]:
            code = grpc.StatusCode.OK
            try:
                self._gate.admit(self._method, context)
                answers = handler(decode(incoming, context), context)
                if hasattr(answers, "__aiter__"):
                    async with contextlib.aclosing(answers):  # it is cleaned up at once
                        async for answer in answers:
                            yield answer
                else:  # it writes to the context instead of yielding
                    await answers
            except BaseException as error:
                code, status = self._judge(error, context)
                if status is None:
                    raise
                await _abort(context, status)
            finally:
                self._metrics.handled.inc(self._method, code.name)

        return handle

    def _judge(
        self, error: BaseException, context: _Context
    ) -> tuple[grpc.StatusCode, grpc.Status | None]:
        """The code to count ``error`` under, and the status to answer with; None lets it pass."""
        if isinstance(error, KvplaneError):
            self._metrics.rejected.inc(error.reason)
            status = rpc_status.to_status(to_rich_status(error))
            return status.code, status
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return grpc.StatusCode.CANCELLED, None
        if isinstance(error, grpc.aio.AbortError):
            return context.code() or grpc.StatusCode.UNKNOWN, None
        if not isinstance(error, Exception):
            return grpc.StatusCode.UNKNOWN, None
        _LOGGER.error("unexpected error method=%s error=%s", self._method, frames_of(error))
        public = InternalError("internal error; the server's log has more")
        return grpc.StatusCode.INTERNAL, rpc_status.to_status(to_rich_status(public))


class _Decoded:
    """An iterator that goes on after an element that could not be decoded, as a generator could
    not.
    """

    def __init__(self, requests: AsyncIterator[bytes], decode: _Decode) -> None:
        self._requests = requests.__aiter__()
        self._decode = decode

    def __aiter__(self) -> _Decoded:
        return self

    async def __anext__(self) -> Any:
        return self._decode(await self._requests.__anext__())


def _bounded(decode: _Decode | None, bounds: MessageBounds | None) -> _Decode | None:
    """``decode``, after a look at what the bytes hold."""
    if decode is None or bounds is None:
        return decode

    def check_and_decode(data: bytes) -> Any:
        bounds.check(data)
        return decode(data)

    return check_and_decode


async def _abort(context: _Context, status: grpc.Status) -> None:
    await context.abort(status.code, status.details, status.trailing_metadata)
