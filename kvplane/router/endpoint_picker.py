"""An endpoint picker for Kubernetes' Gateway API: Envoy's external processing, by which a gateway
asks for the engine of each request and sends it there itself.

    gateway   headers, body ──────────────►  picker     the engine's address, in a header
              headers of the answer, body ─►            when it began, and when it was over

A gateway sends a request's body whole (BUFFERED), or in parts that are sent back to it
(FULL_DUPLEX_STREAMED). It should send the answer's headers and body too: they tell how fast
engines are.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import urlsplit

import grpc.aio
from google.protobuf.struct_pb2 import ListValue

from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    NotFoundError,
    PlaneUnavailableError,
    QuotaExceededError,
)
from kvplane.router.engines import Engines
from kvplane.router.ext_proc.v3 import ext_proc_pb2 as pb
from kvplane.router.metrics import RouterMetrics
from kvplane.router.picker import Picker
from kvplane.router.prompts import PromptReader
from kvplane.serving.http_requests import BODY_S, refusal
from kvplane.serving.limits.receive_budget import ReceiveBudget, Received

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION: Final = "x-gateway-destination-endpoint"
# Where other filters find what was picked, and say what may be, by the Gateway API's protocol.
_METADATA: Final = "envoy.lb"
_HINT, _SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_BUFFERED, _DUPLEX = 2, 4
_OVERWRITE: Final = 2
# Parts of a body that are sent back: gateways refuse messages of more than 64 KiB.
_PART_BYTES: Final = 62_000


class EndpointPicker:
    """Answers gateways. ``max_requests``: most of them at one time."""

    def __init__(
        self,
        engines: Engines,
        picker: Picker,
        reader: PromptReader,
        metrics: RouterMetrics,
        *,
        max_requests: int,
        max_body_bytes: int,
        max_received_bytes: int = 1 << 28,
    ) -> None:
        """``max_received_bytes``: of all bodies for which no engine is picked yet."""
        self.engines = engines
        self.picker = picker
        self.reader = reader
        self.metrics = metrics
        self.max_body_bytes = max_body_bytes
        self.budget = ReceiveBudget(max_received_bytes)
        self.endpoints = {engine: _endpoint(engine) for engine in picker.loads}
        self._max_requests = max_requests
        self._num_open = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve it there."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),)
        )

    async def _process(
        self, messages: AsyncIterator[pb.ProcessingRequest], _: Any
    ) -> AsyncIterator[pb.ProcessingResponse]:
        exchange = _Exchange(self)
        self._num_open += 1
        try:
            if self._num_open > self._max_requests:
                raise QuotaExceededError(
                    f"{self._max_requests} requests are open, which is the most", retry_delay_s=1.0
                )
            async for message in _in_time(messages, exchange):
                async with aclosing(exchange.answer(message)) as responses:
                    async for response in responses:
                        yield response
        except KvplaneError as error:
            yield _refused(error)
        finally:
            self._num_open -= 1
            exchange.end()


class _Exchange:
    """One request and its answer, as far as they have come."""

    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker
        self._body = bytearray()
        self._received = Received(picker.budget, "")
        self.is_picked = False
        self._modes = pb.ProtocolConfiguration(request_body_mode=_BUFFERED)
        self._allowed: Collection[str] | None = None
        self._engine = ""
        self._number = -1
        self._is_stream = False
        self._sent_s = 0.0
        self._has_begun = False

    async def answer(
        self, message: pb.ProcessingRequest
    ) -> AsyncGenerator[pb.ProcessingResponse, None]:
        """What a message is answered with; nothing while a body is not complete."""
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            async for response in self._request_headers(message):
                yield response
        elif kind == "request_body":
            self._take(message.request_body.body)
            is_last = message.request_body.end_of_stream
            if not self._is_duplex:
                yield await self._picked("request_body")
            elif is_last:
                yield await self._picked("request_headers")
                for response in self._parts(is_last=True):
                    yield response
                self._drop_body()
        elif kind == "request_trailers":
            if self._is_duplex:
                yield await self._picked("request_headers")
                for response in self._parts(is_last=False):
                    yield response
                self._drop_body()
            yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
        elif kind == "response_headers":
            self._drop_body()
            if not self._modes.response_body_mode:
                self._begin()
            yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())
        elif kind == "response_body":
            self._begin()
            response = pb.ProcessingResponse(response_body=pb.BodyResponse())
            if self._modes.response_body_mode == _DUPLEX:
                part = response.response_body.response.body_mutation.streamed_response
                part.body = message.response_body.body
                part.end_of_stream = message.response_body.end_of_stream
            yield response
        elif kind == "response_trailers":
            yield pb.ProcessingResponse(response_trailers=pb.TrailersResponse())

    def end(self) -> None:
        """Nothing more comes of the request."""
        self._drop_body()
        self._unpick()

    def _unpick(self) -> None:
        if self._engine:
            self._picker.picker.loads[self._engine].ended(self._number)
            self._engine = ""

    @property
    def _is_duplex(self) -> bool:
        return bool(self._modes.request_body_mode == _DUPLEX)

    async def _request_headers(
        self, message: pb.ProcessingRequest
    ) -> AsyncIterator[pb.ProcessingResponse]:
        if message.HasField("protocol_config"):
            self._modes = message.protocol_config
        self._allowed = _subset(message.metadata_context)
        if message.request_headers.end_of_stream:  # there is nothing to read: any engine will do
            yield await self._picked("request_headers")
        elif self._modes.request_body_mode not in (_BUFFERED, _DUPLEX):
            raise InvalidRequestError(
                "must be BUFFERED or FULL_DUPLEX_STREAMED", field="request_body_mode"
            )
        elif not self._is_duplex:
            yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())

    def _take(self, part: bytes) -> None:
        self._received.take(len(part))
        self._body += part
        most = self._picker.max_body_bytes
        if len(self._body) > most:
            raise InvalidRequestError(f"must have at most {most} bytes", field="body")

    def _drop_body(self) -> None:
        """It is sent back, or not needed any more."""
        self._body = bytearray()
        self._received.close()

    async def _picked(self, answers: str) -> pb.ProcessingResponse:
        """Pick an engine, and say so in answer to headers or a body."""
        endpoint = await self._pick()
        self.is_picked = True
        response = pb.ProcessingResponse()
        response.dynamic_metadata.update({_METADATA: {DESTINATION: endpoint}})
        common = getattr(response, answers).response
        common.clear_route_cache = True
        common.header_mutation.set_headers.add(
            header=pb.HeaderValue(key=DESTINATION, raw_value=endpoint.encode()),
            append_action=_OVERWRITE,
        )
        return response

    async def _pick(self) -> str:
        body: Any = None
        if self._body:
            try:
                body = json.loads(self._body)
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError("is not JSON", field="body") from error
        fields = body if isinstance(body, dict) else {}
        of, prompts = self._picker, await self._picker.reader.read(body)
        self._unpick()  # what was picked before, should a gateway send more after a body's end
        among = of.engines.serving(fields["model"]) if "model" in fields else of.engines.up
        if of.engines.up and not among:
            raise NotFoundError(f"{str(fields['model'])[:64]!r} is not served", field="model")
        if self._allowed is not None:
            among = {engine for engine in among if of.endpoints[engine] in self._allowed}
        self._sent_s = time.monotonic()
        pick = of.picker.pick(
            prompts.token_ids,
            self._sent_s,
            num_unread_tokens=prompts.num_unread_tokens,
            among=among,
        )
        if pick is None:
            raise PlaneUnavailableError("no engine can be reached", retry_delay_s=1.0)
        self._is_stream = fields.get("stream") is True
        self._engine = pick.engine
        self._number = of.picker.sent(pick, self._sent_s, is_told=self._is_stream)
        of.metrics.count_sent(pick)
        return of.endpoints[pick.engine]

    def _begin(self) -> None:
        """The answer has begun."""
        if self._is_stream and self._engine and not self._has_begun:
            self._has_begun = True
            now_s = time.monotonic()
            self._picker.picker.loads[self._engine].answered(self._number, now_s)
            self._picker.metrics.first_byte.observe(now_s - self._sent_s)

    def _parts(self, *, is_last: bool) -> list[pb.ProcessingResponse]:
        """The body, to be sent on as it came."""
        body, responses = bytes(self._body), []
        for first in range(0, max(1, len(body)), _PART_BYTES):
            response = pb.ProcessingResponse()
            part = response.request_body.response.body_mutation.streamed_response
            part.body = body[first : first + _PART_BYTES]
            part.end_of_stream = is_last and first + _PART_BYTES >= len(body)
            responses.append(response)
        return responses


async def _in_time(
    messages: AsyncIterator[pb.ProcessingRequest], exchange: _Exchange
) -> AsyncIterator[pb.ProcessingRequest]:
    """The messages of a gateway. Raises InvalidRequestError when the request does not come."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + BODY_S
    while True:
        try:
            async with asyncio.timeout_at(None if exchange.is_picked else until_s):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise InvalidRequestError(f"did not come within {BODY_S:g} s", field="body") from None
        yield message


def _endpoint(url: str) -> str:
    """The host and port of an engine's URL."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{host}:{port}"


def _subset(metadata: pb.Metadata) -> Collection[str] | None:
    """The endpoints that the gateway allows; None where it does not say."""
    hint = metadata.filter_metadata.get(_HINT)
    if hint is None or _SUBSET not in hint:
        return None
    allowed = hint[_SUBSET]
    names = allowed.split(",") if isinstance(allowed, str) else allowed
    if not isinstance(names, list | ListValue):
        return ()
    return {str(name).strip() for name in names}


def _refused(error: KvplaneError) -> pb.ProcessingResponse:
    """An error that the gateway answers the client with."""
    answer = refusal(error)
    response = pb.ProcessingResponse()
    response.immediate_response.status.code = answer.status_code
    response.immediate_response.body = bytes(answer.body)
    for name, value in answer.headers.items():
        if name in ("content-type", "retry-after"):
            response.immediate_response.headers.set_headers.add(
                header=pb.HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE
            )
    return response
