"""One interceptor around every RPC: it admits or refuses callers, turns typed errors into gRPC
statuses, counts calls, and keeps the text of other errors from callers.

Requests are decoded here too (``kvplane.serving.requests``), so that bytes that are not the
method's message are the caller's error (INVALID_ARGUMENT) and not the server's. On a stream the
request iterator raises it, and can still be read after it. ``ServicerContext.read`` is not decoded,
so servicers here iterate.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_status import rpc_status

from kvplane import tracing
from kvplane.errors import InternalError, KvplaneError
from kvplane.serving.callers.identity import HEALTH_CHECKS
from kvplane.serving.observability.logs import frames_of
from kvplane.serving.observability.metrics import RpcMetrics
from kvplane.serving.requests import Admission, Requests
from kvplane.wire.error_codec import to_rich_status
from kvplane.wire.error_messages import REQUEST_ID

_LOGGER: Final = logging.getLogger(__name__)

_REQUEST_ID: Final = re.compile(r"[\w.:-]{1,64}", re.ASCII)

_Context = Any  # grpc.aio's context classes are generic in the stubs and plain at run time


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Converts handlers' errors to gRPC statuses, and counts calls by their status.

    gRPC reads a unary request before it calls the handler, whoever sends it. So where callers must
    be known, all methods are served as streaming ones, and so are health checks, which nobody needs
    to be known for; elsewhere unary ones stay, which is faster.
    """

    def __init__(self, metrics: RpcMetrics, admission: Admission) -> None:
        self._metrics = metrics
        self._admission = admission

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # no such method: grpc answers UNIMPLEMENTED
            return None
        method, decode = handler_call_details.method, handler.request_deserializer
        call = _Call(self._metrics, self._admission, method, decode)
        encode = _passing_bytes(handler.response_serializer)
        if handler.unary_unary:
            unary = call.wrap_unary(handler.unary_unary)
            if self._admission.gate.is_open and not method.startswith(HEALTH_CHECKS):
                return grpc.unary_unary_rpc_method_handler(unary, None, encode)
            return grpc.stream_unary_rpc_method_handler(unary, None, encode)
        if handler.stream_unary:
            raise TypeError(f"{handler_call_details.method}: no service here streams to unary")
        stream = call.wrap_stream(
            handler.unary_stream or handler.stream_stream, bool(handler.unary_stream)
        )
        return grpc.stream_stream_rpc_method_handler(stream, None, encode)


class _Call:
    """State of one RPC that is being handled."""

    def __init__(self, metrics: RpcMetrics, admission: Admission, method: str, decode: Any) -> None:
        self._metrics = metrics
        self._admission = admission
        self._method = method
        self._decode = decode

    def wrap_unary(self, handler: Callable[[Any, _Context], Any]) -> Callable[..., Any]:
        async def handle(incoming: Any, context: _Context) -> Any:
            begin = time.perf_counter()
            code = grpc.StatusCode.OK
            parent = tracing.from_metadata(context.invocation_metadata())
            span = tracing.begin(self._method.removeprefix("/"), parent, "SERVER")
            requests: Any
            request = response = None
            try:
                with (
                    tracing.inside(span),
                    contextlib.closing(self._requests(context)) as requests,
                ):
                    is_read = isinstance(incoming, bytes)  # by gRPC
                    request = await (requests.take(incoming) if is_read else requests.only())
                    response = handler(request, context)
                    if inspect.isawaitable(response):
                        response = await response
                    try:
                        requests.hold_answer(_num_bytes(response))
                    except KvplaneError as error:
                        # The request has run: if it had a number, that is used up.
                        error.next_number = getattr(request, "number", -1) + 1
                        raise
                    return response
            except BaseException as error:
                code, status = self._judge(error, context)
                if status is None:
                    raise
            finally:
                tracing.end(span, "" if code is grpc.StatusCode.OK else code.name)
                self._metrics.duration.add(time.perf_counter() - begin, self._method)
                self._metrics.handled.inc(self._method, code.name)
            incoming = requests = request = response = None  # the error keeps this frame
            return await _abort(context, status)

        return handle

    def wrap_stream(
        self, handler: Callable[[Any, _Context], Any], has_one_request: bool
    ) -> Callable[..., Any]:
        async def handle(_: Any, context: _Context) -> AsyncIterator[Any]:
            code, status = grpc.StatusCode.OK, None
            requests: Any
            answers: Any
            try:
                with contextlib.closing(self._requests(context)) as requests:
                    request = await requests.only() if has_one_request else requests
                    async with _while_permitted(requests):
                        answers = handler(request, context)
                        if hasattr(answers, "__aiter__"):
                            async with contextlib.aclosing(answers):  # cleans up at once
                                async for answer in answers:
                                    yield answer
                        else:  # the handler writes to the context instead of yielding
                            await answers
            except BaseException as error:
                code, status = self._judge(error, context)
                if status is None:
                    raise
            finally:
                self._metrics.handled.inc(self._method, code.name)
            if status is not None:
                request = requests = answers = None
                await _abort(context, status)

        return handle

    def _requests(self, context: _Context) -> Requests:
        REQUEST_ID.set(_request_id(context))
        return Requests(self._admission, self._method, self._decode, context)

    def _judge(
        self, error: BaseException, context: _Context
    ) -> tuple[grpc.StatusCode, grpc.Status | None]:
        """Return the code to count for an error, and the status to answer; None: let it pass."""
        if isinstance(error, KvplaneError):
            self._metrics.rejected.inc(error.reason)
            _LOGGER.debug(
                "refused request_id=%s method=%s reason=%s field=%s",
                *(REQUEST_ID.get(), self._method, error.reason, error.field),
            )
            status = rpc_status.to_status(to_rich_status(error))
            return status.code, status
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return grpc.StatusCode.CANCELLED, None
        if isinstance(error, grpc.aio.AbortError):
            return context.code() or grpc.StatusCode.UNKNOWN, None
        if not isinstance(error, Exception):
            return grpc.StatusCode.UNKNOWN, None
        request_id = REQUEST_ID.get()
        _LOGGER.error(
            "unexpected error request_id=%s method=%s error=%s",
            *(request_id, self._method, frames_of(error)),
        )
        public = InternalError(f"internal error; the server's log has more of request {request_id}")
        return grpc.StatusCode.INTERNAL, rpc_status.to_status(to_rich_status(public))


def _num_bytes(answer: Any) -> int:
    """Return the size in bytes of an answer, which the handler may have encoded itself."""
    if isinstance(answer, bytes):
        return len(answer)
    return answer.ByteSize() if isinstance(answer, Message) else 0


def _passing_bytes(encode: Callable[[Any], bytes] | None) -> Callable[[Any], bytes] | None:
    """Wrap ``encode`` so that answers which a handler has encoded itself pass unchanged."""
    if encode is None:
        return None
    return lambda answer: answer if type(answer) is bytes else encode(answer)


def _request_id(context: _Context) -> str:
    """Return the caller's own request id, or a new one."""
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id" and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(8)


@contextlib.asynccontextmanager
async def _while_permitted(requests: Requests) -> AsyncIterator[None]:
    """Cancel the body when the caller loses the right to make the call, and raise the reason."""
    inside = asyncio.current_task()
    assert inside is not None
    revoked = asyncio.create_task(requests.revoked())
    revoked.add_done_callback(lambda task: task.cancelled() or inside.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if revoked.done() and not revoked.cancelled():
            inside.uncancel()
            raise revoked.result() from None
        raise
    finally:
        revoked.cancel()


async def _abort(context: _Context, status: grpc.Status) -> None:
    """End the call with ``status``. gRPC keeps the error that this raises, with what the frames
    below hold and the error that is being handled, until the garbage collector runs: neither may
    hold a request.
    """
    await context.abort(status.code, status.details, status.trailing_metadata)
