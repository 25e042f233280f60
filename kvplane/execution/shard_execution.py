"""One shard's part of an execution: plans run layer by layer on a stream, and beside it through
shared memory where the data plane is on the same machine.

Not for callers, who have ``kvplane.Execution``. ``kvplane.runtime`` uses the methods that need no
event loop: ``begin_local``, ``ask_local``, ``bind_local`` and ``layer_local``.

If too many bytes of requests wait at the data plane, calls wait for its retry delay, up to their
deadline.

Invariant: a lost connection, or a wait that was cancelled, loses nothing. The plan is presented
again on a new stream and continues from where it is, and the layer is sent again: it writes the
same bytes to its slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    KvplaneError,
    PlaneUnavailableError,
    PlanOutOfOrderError,
)
from kvplane.results import Signed
from kvplane.tensor import Tensor
from kvplane.transport.connection import Connection
from kvplane.transport.local import packets
from kvplane.transport.local.connection import Addresses, LocalConnection
from kvplane.transport.local.layer import LocalLayer
from kvplane.transport.retry import Deadline, retry_until
from kvplane.transport.stream import Stream
from kvplane.wire import bulk
from kvplane.wire.error_codec import from_wire
from kvplane.wire.plane.v1.plan_pb2 import Plan
from kvplane.wire.protocol import MAX_LAYER_BYTES
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import execution_pb2_grpc, local_pb2, types_pb2
from kvplane.wire.v1.types_pb2 import SignedPayload

if TYPE_CHECKING:
    from kvplane_kernels import LayerCall

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)
_Receipted: TypeAlias = (
    pb.StartPlanResponse | pb.RunLayerResponse | pb.WriteBlocksResponse | pb.LoadFileBlocksResponse
)

_LOGGER: Final = logging.getLogger(__name__)
# Methods whose answers are read here, with one copy of blocks.
_READ_BLOCKS: Final = "/kvplane.v1.BlockService/ReadBlocks"
_EXECUTE: Final = "/kvplane.v1.ExecutionService/Execute"
# Answers that are under way while another one is read.
_READS_AHEAD: Final = 2
# Where their data is, from the outside in.
_FIELDS: Final = (
    pb.ExecuteResponse.READ_FIELD_NUMBER,
    pb.ReadBlocksResponse.BLOCKS_FIELD_NUMBER,
    types_pb2.Tensor.DATA_FIELD_NUMBER,
)
# Data planes whose offer of shared memory could not be taken, which is logged once for each.
_NOT_JOINED: Final[set[str]] = set()


@dataclass(frozen=True, slots=True)
class _Presented:
    """A plan, or a pass of it, that was sent to the data plane. Layers name it."""

    request: pb.ExecuteRequest
    number: int
    pass_index: int | None
    """The pass; None where all tokens are computed at once."""
    num_tokens: int
    named: bytes
    """The bytes that name it in packets of bound layers: see ``packets.named``."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A plan sent ``by`` a local connection, or over gRPC for None, and not answered yet."""

    by: LocalConnection | None


class ShardExecution:
    """Runs plans on one shard. One call at a time: ``start`` or ``begin``, then ``layer`` for each
    layer.

    ``layers``: the layers held, ascending. ``receipt``: of the plan started last, once it has run;
    a layer sent again after that is answered again and writes nothing.
    """

    def __init__(
        self,
        connection: Connection,
        grant: SignedPayload,
        *,
        local: bool = True,
        take_receipt: Callable[[Signed], None] | None = None,
    ) -> None:
        """``connection``: closed with the execution. ``local``: whether to use shared memory where
        it is available. ``take_receipt``: called once with each plan's receipt, on the thread
        whose call to the data plane returned it.
        """
        self.layers: list[int] = []
        self.receipt: SignedPayload | None = None
        self._connection = connection
        self._grant = grant
        self._host_id = packets.host_id() if local else ""
        self._take = take_receipt
        self._last_taken = 0  # number of the plan whose receipt was given to ``take_receipt``
        self._plan: _Presented | None = None
        self._begun: _Begun | None = None  # a plan that was sent and not answered yet
        self._blocks = execution_pb2_grpc.BlockServiceStub(connection.channel)
        self._read: Any = connection.channel.unary_unary(
            _READ_BLOCKS, request_serializer=pb.ReadBlocksRequest.SerializeToString
        )
        execute: Any = connection.channel.stream_stream(
            _EXECUTE, request_serializer=pb.ExecuteRequest.SerializeToString
        )
        self._stream: Stream[pb.ExecuteRequest, bytes] = Stream(lambda: execute())
        self._local: LocalConnection | None = None
        self._lock = asyncio.Lock()

    @property
    def num_tokens(self) -> int:
        """Tokens that the plan or pass started last computes; 0 before the first."""
        return 0 if self._plan is None else self._plan.num_tokens

    @property
    def target(self) -> str:
        """The data plane's address."""
        return self._connection.target

    @property
    def local(self) -> LocalConnection | None:
        """The connection by shared memory, while there is one."""
        return self._local if self._local is not None and self._local.is_open else None

    async def connect(self, *, timeout_s: float | None = None) -> None:
        """Open the stream and learn ``layers``. ``start`` and ``layer`` do so when needed."""
        deadline = self._connection.deadline(timeout_s)
        async with deadline.guard(), self._lock:
            await _tried(deadline, self._open)

    async def start(
        self,
        plan: SignedPayload | None,
        *,
        pass_index: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Start a plan on this shard, as ``Execution.start`` does on all."""
        if plan is None:
            raise InvalidRequestError("is None: the step has nothing to carry out", field="plan")
        deadline = self._connection.deadline(timeout_s)
        async with deadline.guard(), self._lock:
            self._forget_plan()
            request = _request(plan, pass_index)
            started = await _tried(deadline, lambda: self._start(request))
            self._plan = _presented(request, started.plan_number, started.num_tokens)
            self._note_receipt(started)

    async def begin(
        self,
        plan: SignedPayload,
        num_tokens: int,
        *,
        pass_index: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Start a plan without waiting, as ``Execution.begin`` does on all shards."""
        deadline = self._connection.deadline(timeout_s)
        async with deadline.guard(), self._lock:
            self._forget_plan()
            await _tried(deadline, lambda: self._begin(plan, num_tokens, pass_index))

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
        """Run a layer on this shard, as ``Execution.layer`` does on all."""
        deadline = self._connection.deadline(timeout_s)
        async with deadline.guard(), self._lock:
            plan = self._started_plan()

            async def attempt() -> Tensor:
                await self._present(plan)
                if self._begun is None or self._begun.by is not None:
                    output = await self._layer_in_region(index, query, key, value, options)
                    if output is not None:
                        return output
                return await self._layer(index, query, key, value, options)

            return await _tried(deadline, attempt)

    def begin_local(
        self, plan: SignedPayload, num_tokens: int, pass_index: int | None = None
    ) -> bool:
        """Do as ``begin`` in the calling thread. Returns False if not possible: use ``begin``."""
        self._forget_plan()
        request = _request(plan, pass_index)
        presented = _presented(request, _number_of(plan), num_tokens)
        local, packet = self._local_for(request)
        if local is None:
            return False
        try:
            local.send(packet)
        except PlaneUnavailableError:
            return False
        self._plan, self._begun = presented, _Begun(local)
        return True

    def ask_local(self, call: Callable[[LocalConnection, float], T]) -> T | None:
        """Return ``call(connection, timeout_s)``, which sends one request to the data plane on this
        machine and takes its answer in the calling thread. Returns None if that is not possible:
        use ``layer``.
        """
        local, begun, timeout_s = self.local, self._begun, self._connection.timeout_s
        if local is None or (begun is not None and begun.by is not local):
            return None
        try:
            if begun is not None:
                self._check_begun(_parse(local.receive(timeout_s)))
            return call(local, timeout_s)
        except PlaneUnavailableError:
            return None

    def bind_local(self, layer: LocalLayer) -> bool:
        """Bind a layer for plans and passes like the one that was begun last. Returns False if that
        is not possible: use ``layer``, which raises what is wrong.
        """
        answer = self.ask_local(lambda local, timeout_s: local.ask(layer.bind_packet, timeout_s))
        return answer == packets.head_of(packets.BIND_LAYER, layer.binding)

    def layer_local(
        self, layer: LocalLayer, call: LayerCall | None = None, addresses: Addresses = (0, 0, 0, 0)
    ) -> bool | None:
        """Run a bound layer in the calling thread. With ``call``, the tensors are at ``addresses``
        and are moved to the region; otherwise they are there. Returns True if the output was moved
        from the region too, False if it is there, and None if the call is not possible: use
        ``layer``.
        """
        named = self._started_plan().named

        def ask(local: LocalConnection, timeout_s: float) -> tuple[bytes | None]:
            if call is not None:
                return (local.call(call, named, addresses, timeout_s),)
            return (local.ask(layer.head + named, timeout_s),)

        answer = self.ask_local(ask)
        if answer is None:
            return None
        if answer[0] is None:
            return True
        if answer[0] != layer.head:
            self._check_local(answer[0], layer)
        return False

    async def wait_started(self) -> None:
        """Wait until the data plane has started the plan of ``begin``. Raises what ``start``
        would have raised.
        """
        deadline = self._connection.deadline(None)
        async with deadline.guard(), self._lock:
            plan = self._started_plan()

            async def attempt() -> None:
                await self._present(plan)
                await self._settle()

            await _tried(deadline, attempt)

    async def close(self) -> None:
        """End the stream, and close the connection. Another execution can continue the plan."""
        self._leave()
        await self._stream.close()
        await self._connection.close()

    async def read_blocks(
        self, request: pb.ReadBlocksRequest, timeout_s: float | None
    ) -> tuple[pb.ReadBlocksResponse, Tensor]:
        """Send a request to read blocks, with the execution's grant. Returns the answer without its
        blocks, and these.
        """
        request.grant.CopyFrom(self._grant)
        encoded = await self._connection.call(self._read, request, timeout_s)
        return _blocks_of(encoded, pb.ReadBlocksResponse)

    async def read_in_stream(
        self,
        requests: Iterable[pb.ReadBlocksRequest],
        take: Callable[[pb.ReadBlocksRequest, pb.ReadBlocksResponse, memoryview], None],
    ) -> None:
        """Send requests to read blocks over gRPC, in a turn, the next before the answer to one has
        come. ``take`` is given each with its answer and the data of its blocks.
        """
        await self._settle()
        asked: deque[pb.ReadBlocksRequest] = deque()

        async def take_answers(num_left: int) -> None:
            while len(asked) > num_left:
                encoded, request = await self._stream.receive(), asked.popleft()
                answer, blocks = _blocks_of(encoded, pb.ExecuteResponse)
                take(request, answer, memoryview(blocks.data))

        try:
            for request in requests:
                await self._stream.send(pb.ExecuteRequest(read=request))
                asked.append(request)
                await take_answers(_READS_AHEAD)
            await take_answers(0)
        finally:
            if asked:
                self._drop()  # with the answers that are under way

    async def write_blocks(self, request: pb.WriteBlocksRequest, timeout_s: float | None) -> None:
        """Write blocks of the plan started last, and take its receipt with the last of them."""
        request.plan.CopyFrom(self._started_plan().request.plan.plan)
        self._note_receipt(await self.send_blocks(request, timeout_s))

    async def send_blocks(
        self, request: pb.WriteBlocksRequest, timeout_s: float | None
    ) -> pb.WriteBlocksResponse:
        """Send a request to write blocks of the plan that it has, with the execution's grant."""
        request.grant.CopyFrom(self._grant)
        response: pb.WriteBlocksResponse = await self._connection.call(
            self._blocks.WriteBlocks, request, timeout_s
        )
        return response

    async def in_turn(self, deadline: Deadline, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until the deadline, with an open stream and no other call of this execution. What
        lasts until then is cancelled.
        """

        async def opened() -> T:
            await self._open()
            return await attempt()

        async with deadline.guard(), self._lock:
            return await _tried(deadline, opened)

    async def ask_region(
        self, local: LocalConnection, request: pb.ExecuteRequest
    ) -> pb.ExecuteResponse:
        """Send a request whose tensors are in the region and return its answer, in a turn. Raises
        its error.
        """
        await self._settle()
        local.send(request.SerializeToString())
        answer = _parse(await local.receive_soon())
        if answer.HasField("error"):
            raise from_wire(answer.error)
        return answer

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Return the deadline of a call that begins now. Raises InvalidRequestError."""
        return self._connection.deadline(timeout_s)

    def take_receipt(self, answer: pb.WriteBlocksResponse, plan: SignedPayload) -> None:
        """Pass the receipt of a plan on once, if the answer has one."""
        self._take_receipt(answer, _number_of(plan))

    async def find_files(self, token_ids: bytes, timeout_s: float | None) -> int:
        """Count the leading full blocks of a prompt that the shard has in files."""
        request = pb.LoadFileBlocksRequest(grant=self._grant, token_ids=token_ids)
        response: pb.LoadFileBlocksResponse = await self._connection.call(
            self._blocks.LoadFileBlocks, request, timeout_s
        )
        return response.num_blocks

    async def load_files(self, sequence_id: int, token_ids: bytes, timeout_s: float | None) -> int:
        """Load a sequence's span of the plan started last from files; return the number of blocks
        that were written. The receipt comes with the last one.
        """
        request = pb.LoadFileBlocksRequest(
            grant=self._grant,
            plan=self._started_plan().request.plan.plan,
            sequence_id=sequence_id,
            token_ids=token_ids,
        )
        response: pb.LoadFileBlocksResponse = await self._connection.call(
            self._blocks.LoadFileBlocks, request, timeout_s
        )
        self._note_receipt(response)
        return response.num_blocks

    @property
    def _is_open(self) -> bool:
        """Says whether the stream is open, and the local connection too if there was one."""
        return self._stream.is_open and (self._local is None or self._local.is_open)

    def _started_plan(self) -> _Presented:
        if self._plan is None:
            raise PlanOutOfOrderError("no plan was started: call start first")
        return self._plan

    def _forget_plan(self) -> None:
        if self._begun is not None:
            self._drop()  # an unwanted answer is under way
        self._plan, self.receipt, self._begun = None, None, None

    def _leave(self) -> None:
        """Close the shared memory. The next call opens the stream again."""
        if self._local is not None:
            self._local.close()
            self._local = None

    def _local_for(self, plan: pb.ExecuteRequest) -> tuple[LocalConnection | None, bytes]:
        """Return the local connection for a plan, and the plan as a packet; no connection if the
        plan does not fit a packet.
        """
        packet = plan.SerializeToString()
        return self.local if len(packet) <= packets.MAX_PACKET_BYTES else None, packet

    def _drop(self) -> None:
        """Discard the stream and the shared memory; answers still under way are lost."""
        self._leave()
        self._stream.drop()

    async def _open(self) -> None:
        if self._is_open:
            return
        self._leave()
        request = pb.OpenExecution(grant=self._grant, host_id=self._host_id)
        self._stream.open()
        try:
            await self._stream.send(pb.ExecuteRequest(open=request))
            opened = (await self._receive("opened")).opened
            if opened.HasField("local"):
                self._local = await self._join(opened.local)
        except BaseException:
            self._stream.drop()  # an open stream is always one whose execution was opened
            raise
        self.layers = list(opened.layers)

    async def _join(self, offer: local_pb2.LocalOffer) -> LocalConnection | None:
        """Accept an offer of shared memory. Returns None if that fails, as in some containers."""
        try:
            return await LocalConnection.join(offer)
        except (OSError, KvplaneError) as error:
            if self.target not in _NOT_JOINED:
                _NOT_JOINED.add(self.target)
                _LOGGER.info("no shared memory with %s, using gRPC: %s", self.target, error)
            return None

    async def _start(self, plan: pb.ExecuteRequest) -> pb.StartPlanResponse:
        await self._open()
        local, packet = self._local_for(plan)
        if local is None:
            await self._stream.send(plan)
            return _started(await self._receive("started"))
        local.send(packet)
        return _started(_expect("started", _parse(await local.receive_soon())))

    async def _begin(self, plan: SignedPayload, num_tokens: int, pass_index: int | None) -> None:
        await self._open()
        if not self.begin_local(plan, num_tokens, pass_index):
            request = _request(plan, pass_index)
            presented = _presented(request, _number_of(plan), num_tokens)
            await self._stream.send(request)
            self._plan, self._begun = presented, _Begun(None)

    async def _present(self, plan: _Presented) -> None:
        """Send the plan again on a new stream, if the earlier stream has ended."""
        if not self._is_open:
            self._begun = None
            started = await self._start(plan.request)
            self._check_number(started)
            self._note_receipt(started)

    async def _layer(
        self,
        index: int,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Send a layer over gRPC."""
        plan = self._started_plan()
        request = pb.RunLayerRequest(
            layer=index,
            plan_number=plan.number,
            pass_index=plan.pass_index,
            query=None if query is None else query.to_proto(),
            key=key.to_proto(),
            value=None if value is None else value.to_proto(),
            options=options.to_proto(),
        )
        if request.ByteSize() > MAX_LAYER_BYTES:
            raise InvalidRequestError(
                f"of layer {index} has {request.ByteSize():,} bytes with its key and value, must "
                f"have at most {MAX_LAYER_BYTES:,}: compute fewer tokens in one pass",
                field="query",
            )
        if self._begun is not None and self._begun.by is not None:
            self._check_begun(_parse(await self._begun.by.receive_soon()))
        await self._stream.send(pb.ExecuteRequest(layer=request))
        if self._begun is not None:
            self._check_begun(_parse(await self._stream.receive()))
        answer = (await self._receive("output")).output
        if answer.layer != index:
            self._stream.drop()
            raise InternalError(f"layer {index} was answered as {answer.layer}")
        self._note_receipt(answer)
        if query is None:
            return Tensor(key.dtype, (0,), b"")
        return _answered_tensor(answer.output, "output")

    async def _settle(self) -> None:
        """Receive the answer to a plan that was sent by ``begin``, if it is under way."""
        if self._begun is not None:
            by = self._begun.by
            began = await (self._stream.receive() if by is None else by.receive_soon())
            self._check_begun(_parse(began))

    def _check_begun(self, answer: pb.ExecuteResponse) -> None:
        """Receive the answer to a plan that was sent by ``begin``. Raises its error."""
        self._begun = None
        try:
            started = _started(_expect("started", answer))
            self._check_number(started)
            num_tokens, wanted = started.num_tokens, self._started_plan().num_tokens
            if num_tokens != wanted:
                raise InternalError(f"the plan computes {num_tokens} tokens, not {wanted}")
        except KvplaneError:
            self._drop()  # with the layer's answer
            raise

    def _check_number(self, started: pb.StartPlanResponse) -> None:
        number = self._started_plan().number
        if started.plan_number != number:
            raise InternalError(f"plan {number} was started as plan {started.plan_number}")

    async def _layer_in_region(
        self,
        index: int,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor | None:
        """Send a layer through the region. Returns None when the tensors do not fit it."""
        layer = self._place(index, query, key, value, options)
        if self.local is None or layer is None:
            return None
        memory = memoryview(self.local.memory)
        for tensor, there in ((query, layer.query), (key, layer.key), (value, layer.value)):
            if tensor is not None and there is not None:
                memory[there[0] : there[0] + tensor.num_bytes] = memoryview(tensor.data).cast("B")
        local, plan = self.local, self._started_plan()
        naming = pb.RunLayerRequest(plan_number=plan.number, pass_index=plan.pass_index)
        naming.MergeFrom(layer.request)
        local.send(pb.ExecuteRequest(layer=naming).SerializeToString())
        if self._begun is not None:
            self._check_begun(_parse(await local.receive_soon()))
        self._check_local(await local.receive_soon(), layer)
        if layer.output is None:
            return Tensor(layer.dtype, (0,), b"")
        first, shape = layer.output
        num_bytes = Tensor.size_bytes(layer.dtype, shape)
        return Tensor(layer.dtype, shape, bytes(memory[first : first + num_bytes]))

    def _place(
        self,
        index: int,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None,
        options: AttentionOptions,
    ) -> LocalLayer | None:
        if value is None:  # latents: their output's size is not known here
            return None
        if self.local is None or len({t.dtype for t in (query, key, value) if t is not None}) > 1:
            return None
        shape = None if query is None else query.shape
        return LocalLayer.make(self.local, index, key.dtype, shape, key.shape, value.shape, options)

    def _check_local(self, answer: bytes, layer: LocalLayer) -> None:
        """Check the answer to a layer that was sent by the local connection."""
        output = _expect("output", _parse(answer)).output
        self._note_receipt(output)
        output.ClearField("receipt")
        if output != layer.answer:
            self._leave()
            raise InternalError("a layer was answered as another one")

    def _note_receipt(self, answer: _Receipted) -> None:
        """Keep the receipt of the plan started last, if the answer has one."""
        if answer.HasField("receipt"):
            self.receipt = answer.receipt
            self._take_receipt(answer, self._started_plan().number)

    def _take_receipt(self, answer: _Receipted, number: int) -> None:
        """Pass the receipt of a plan on once, if the answer has one."""
        if self._take is not None and answer.HasField("receipt") and number != self._last_taken:
            self._last_taken = number
            self._take(answer.receipt)

    async def _receive(self, wanted: str) -> pb.ExecuteResponse:
        response = _parse(await self._stream.receive())
        if response.WhichOneof("message") not in (wanted, "error"):
            self._stream.drop()
        return _expect(wanted, response)


async def _tried(deadline: Deadline, attempt: Callable[[], Awaitable[T]]) -> T:
    return await retry_until(deadline, attempt, waits_for_quota=True)


def _blocks_of(
    encoded: bytes, kind: type[pb.ExecuteResponse] | type[pb.ReadBlocksResponse]
) -> tuple[pb.ReadBlocksResponse, Tensor]:
    """Return an answer with blocks, and these, of an encoding of this kind. Raises its error."""
    found = bulk.decode(encoded, _FIELDS if kind is pb.ExecuteResponse else _FIELDS[1:])
    if found is not None:
        (*_, answered, tensor), data = found
        message = _parse_as(pb.ReadBlocksResponse, answered)
        return message, _answered_tensor(_parse_as(types_pb2.Tensor, tensor), "blocks", data)
    parsed = _parse_as(kind, encoded)
    message = _expect("read", parsed).read if isinstance(parsed, pb.ExecuteResponse) else parsed
    return message, _answered_tensor(message.blocks, "blocks")


def _answered_tensor(
    message: types_pb2.Tensor, field: str, data: memoryview | None = None
) -> Tensor:
    """Parse a tensor in a data plane's answer. ``data``: as of ``Tensor.from_proto``. Raises
    InternalError when it is malformed.
    """
    try:
        return Tensor.from_proto(message, field=field, data=data)
    except InvalidRequestError as error:
        raise InternalError(f"the data plane's answer is malformed: {error}") from error


def _parse(answer: bytes) -> pb.ExecuteResponse:
    return _parse_as(pb.ExecuteResponse, answer)


def _parse_as(kind: type[MessageT], answer: bytes) -> MessageT:
    """Parse a data plane's answer. Raises InternalError when it is malformed."""
    try:
        return kind.FromString(answer)
    except DecodeError as error:
        raise InternalError(f"the data plane's answer is malformed: {error}") from error


def _expect(wanted: str, response: pb.ExecuteResponse) -> pb.ExecuteResponse:
    """Return the response if it is of the wanted kind. Raises its error, or InternalError."""
    kind = response.WhichOneof("message")
    if kind == "error":
        raise from_wire(response.error)
    if kind != wanted:
        raise InternalError(f"expected {wanted}, got {kind}")
    return response


def _request(plan: SignedPayload, pass_index: int | None) -> pb.ExecuteRequest:
    return pb.ExecuteRequest(plan=pb.StartPlanRequest(plan=plan, pass_index=pass_index))


def _presented(request: pb.ExecuteRequest, number: int, num_tokens: int) -> _Presented:
    pass_index = request.plan.pass_index if request.plan.HasField("pass_index") else None
    named = packets.named(number, pass_index)
    return _Presented(request, number, pass_index, num_tokens, named)


def _number_of(plan: SignedPayload) -> int:
    """Return the number in a plan whose start is not answered yet."""
    try:
        return Plan.FromString(plan.payload).number
    except DecodeError as error:
        raise InvalidRequestError("is not a Plan", field="plan.payload") from error


def _started(response: pb.ExecuteResponse) -> pb.StartPlanResponse:
    started = response.started
    if not started.HasField("receipt") and (started.finished or not started.num_tokens):
        raise InternalError("a plan that has run has no receipt")
    return started
