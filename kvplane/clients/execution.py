"""Executions: plans run layer by layer on a stream.

Invariant: a lost connection, or a wait that was cancelled, loses nothing. The plan is presented
again on a new stream and continues from where it is, and the layer is sent again; its slots then
hold the same bytes as before.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvplane.attention_options import AttentionOptions
from kvplane.errors import InternalError, InvalidRequestError, PlanOutOfOrderError
from kvplane.tensor import Tensor
from kvplane.transport.connection import Connection
from kvplane.transport.retry import retry_until
from kvplane.transport.stream import Stream
from kvplane.v1 import data_pb2 as pb
from kvplane.v1.types_pb2 import SignedPayload
from kvplane.wire.error_codec import from_wire
from kvplane.wire.protocol import check_chosen, supported


@dataclass(frozen=True, slots=True)
class Started:
    """A plan was started. ``num_tokens``: first extent of q, k and v.

    ``receipt`` is there when no layer is expected: the plan has no spans, or it had run before.
    """

    plan_number: int
    num_tokens: int
    receipt: SignedPayload | None


class Execution:
    """Made by ``DataClient.open``. One call at a time: ``start``, then ``layer`` for each layer.

    ``layers``: the layers held, ascending. ``receipt``: that of the plan started last, once it has
    run; a layer sent again after that is answered again and writes nothing.
    """

    def __init__(self, connection: Connection, stub: Any, grant: SignedPayload) -> None:
        self.layers: list[int] = []
        self.receipt: SignedPayload | None = None
        self._connection = connection
        self._stub = stub
        self._grant = grant
        self._plan: SignedPayload | None = None
        self._stream: Stream[pb.ExecuteRequest, pb.ExecuteResponse] = Stream(lambda: stub.Execute())
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Execution:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def connect(self, *, timeout_s: float | None = None) -> None:
        """Open the stream and learn ``layers``. ``start`` and ``layer`` do so by themselves."""
        deadline = self._connection.deadline(timeout_s)
        async with deadline.guard(), self._lock:
            await retry_until(deadline, self._open)

    async def start(self, plan: SignedPayload | None, *, timeout_s: float | None = None) -> Started:
        """Present a plan, which makes its table changes and transfers. Safe to repeat.

        Raises InvalidRequestError for None, which is the plan of a step that changed nothing.
        """
        if plan is None:
            raise InvalidRequestError("is None: the step has nothing to carry out", field="plan")
        deadline = self._connection.deadline(timeout_s)
        async with deadline.guard(), self._lock:
            self._plan, self.receipt = None, None
            started = await retry_until(deadline, lambda: self._start(plan))
            self._plan, self.receipt = plan, started.receipt
            return started

    async def layer(
        self,
        index: int,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None,
        *,
        options: AttentionOptions = AttentionOptions(),
        timeout_s: float | None = None,
    ) -> Tensor:
        """Write one layer's keys and values, then attend: [num_tokens, num_heads, value_head_size].

        ``query`` [num_tokens, num_heads, head_size]; without it the answer has no elements.
        ``key``, ``value`` [num_tokens, num_kv_heads, head_size], of ``value`` value_head_size; none
        where the layer keeps latents. Safe to repeat.
        """
        request = pb.LayerInput(
            layer=index,
            query=None if query is None else query.to_proto(),
            key=key.to_proto(),
            value=None if value is None else value.to_proto(),
            options=options.to_proto(),
        )
        deadline = self._connection.deadline(timeout_s)
        async with deadline.guard(), self._lock:
            if self._plan is None:
                raise PlanOutOfOrderError("no plan was started: call start first")
            plan = self._plan
            return await retry_until(deadline, lambda: self._layer(plan, request))

    async def close(self) -> None:
        """End the stream. Another execution can continue what was started."""
        await self._stream.close()

    async def _open(self) -> None:
        if self._stream.is_open:
            return
        request = pb.OpenExecution(protocol=supported(), grant=self._grant)
        self._stream.open()
        try:
            await self._stream.send(pb.ExecuteRequest(open=request))
            opened = (await self._receive("opened")).opened
        except BaseException:
            self._stream.drop()  # an open stream is always one whose execution was opened
            raise
        check_chosen(opened.protocol_version)
        self.layers = list(opened.layers)

    async def _start(self, plan: SignedPayload) -> Started:
        await self._open()
        await self._stream.send(pb.ExecuteRequest(plan=plan))
        started = (await self._receive("started")).started
        receipt = None
        if started.finished or started.num_tokens == 0:
            receipt = (await self._receive("receipt")).receipt
        return Started(started.plan_number, started.num_tokens, receipt)

    async def _layer(self, plan: SignedPayload, request: pb.LayerInput) -> Tensor:
        if not self._stream.is_open:
            self.receipt = (await self._start(plan)).receipt
        await self._stream.send(pb.ExecuteRequest(layer=request))
        answer = (await self._receive("output")).output
        if answer.layer != request.layer:
            self._stream.drop()
            raise InternalError(f"layer {request.layer} was answered as {answer.layer}")
        # Once a plan has run, each layer sent again is answered with the receipt too.
        if self.receipt is not None or request.layer == self.layers[-1]:
            self.receipt = (await self._receive("receipt")).receipt
        return _output(answer.output, request)

    async def _receive(self, wanted: str) -> pb.ExecuteResponse:
        response = await self._stream.receive()
        kind = response.WhichOneof("message")
        if kind == "error":
            raise from_wire(response.error)
        if kind != wanted:
            self._stream.drop()
            raise InternalError(f"expected {wanted}, got {kind}")
        return response


def _output(output: Any, request: pb.LayerInput) -> Tensor:
    if not request.HasField("query"):
        return _nothing(request)
    try:
        return Tensor.from_proto(output, field="output")
    except InvalidRequestError as error:
        raise InternalError(f"the data plane's answer is malformed: {error}") from error


def _nothing(request: pb.LayerInput) -> Tensor:
    return Tensor(Tensor.from_proto(request.key, field="key").dtype, (0,), b"")
