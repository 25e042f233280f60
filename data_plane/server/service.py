"""The data plane's gRPC service: each call becomes commands of the executor, which does the work.

Commands run on the worker thread. A request of an execution stream that fails is answered in the
stream, which stays open.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final, TypeVar

import grpc.aio

from data_plane.executor import Executor
from data_plane.pieces import Pieces, whole
from data_plane.places import place_of
from data_plane.server.fair_queue import Lane
from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from data_plane.server.worker_thread import WorkerThread
from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    KvplaneError,
    LayoutMismatchError,
    PlaneUnavailableError,
)
from kvplane.serving.identity import caller, payer
from kvplane.serving.metrics import Counts
from kvplane.serving.streams import RequestStreams
from kvplane.v1 import data_pb2 as pb
from kvplane.v1 import data_pb2_grpc
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import protocol
from kvplane.wire.error_codec import to_wire

SERVICE: Final = pb.DESCRIPTOR.services_by_name["DataPlaneService"].full_name
_LOGGER: Final = logging.getLogger(__name__)
# How long a long layer keeps the thread at a time.
_PIECE_S: Final = 0.01
# Upper bounds on what a response takes beside its tensor: in all, and for each block.
_OVERHEAD_BYTES: Final = 1024
_BLOCK_REF_BYTES: Final = 12

T = TypeVar("T")
_Context = grpc.aio.ServicerContext[Any, Any]


class DataPlaneService(data_pb2_grpc.DataPlaneServiceServicer):
    """Serves one executor."""

    def __init__(
        self,
        executor: Executor,
        worker: WorkerThread,
        *,
        version: str,
        max_message_bytes: int,
        rejected: Counts,
        knows_callers: bool = False,
    ) -> None:
        """``rejected`` counts the requests of streams that are refused, by the error's reason.
        ``knows_callers``: callers have to say who they are, so their grants must be theirs.
        """
        self._executor = executor
        self._worker = worker
        self._version = version
        self._max_message_bytes = max_message_bytes
        self._rejected = rejected
        self._knows_callers = knows_callers
        self._streams = RequestStreams("data plane")

    def stop(self) -> None:
        """End the streams that wait for a request, and every other one after its current answer."""
        self._streams.stop()

    async def DescribeDataPlane(
        self, request: pb.DescribeDataPlaneRequest, context: _Context
    ) -> pb.DescribeDataPlaneResponse:
        executor = self._executor
        return pb.DescribeDataPlaneResponse(
            protocol=protocol.supported(),
            version=self._version,
            pool_id=executor.pool_id,
            shard=executor.shard.to_proto(),
            epoch=executor.epoch,
            incarnation=executor.incarnation,
            layout=executor.layout.to_proto(),
            num_device_blocks=executor.pools.device_tier.shape[0],
            num_host_blocks=executor.pools.host_tier.shape[0],
            device=str(executor.device),
        )

    async def Execute(
        self, request_iterator: AsyncIterator[pb.ExecuteRequest], context: _Context
    ) -> AsyncIterator[pb.ExecuteResponse]:
        stream = _ExecuteStream(self._executor, self._tenant())
        while True:
            try:
                request = await self._streams.next(request_iterator)
                if request is None:
                    return
                answers = await self._run_pieces(partial(stream.answer, request), stream.session_id)
            except PlaneUnavailableError:
                raise
            except KvplaneError as error:
                self._rejected.inc(error.reason)
                answers = [pb.ExecuteResponse(error=to_wire(error))]
            for answer in answers:
                yield answer

    async def ReshapeAndCache(
        self, request: pb.ReshapeAndCacheRequest, context: _Context
    ) -> pb.ReshapeAndCacheResponse:
        tenant = self._tenant()

        def command() -> pb.ReshapeAndCacheResponse:
            key = self._tensor(request.key, "key")
            value = self._tensor(request.value, "value") if request.HasField("value") else None
            session_id, number = self._start(request, tenant)
            receipt = self._executor.write_layer(
                session_id, request.layer, key, value, plan_number=number
            )
            return pb.ReshapeAndCacheResponse(receipt=receipt)

        return await self._run(command)

    async def PagedAttention(
        self, request: pb.PagedAttentionRequest, context: _Context
    ) -> pb.PagedAttentionResponse:
        tenant = self._tenant()

        def command() -> Pieces[pb.PagedAttentionResponse]:
            query = self._tensor(request.query, "query")
            options = _options(request.options, "options")
            session_id, number = self._start(request, tenant)
            output = yield from self._executor.attend(
                session_id,
                request.layer,
                query,
                options=options,
                plan_number=number,
                piece_s=_PIECE_S,
            )
            return pb.PagedAttentionResponse(output=tensor_to_message(output))

        return await self._run_pieces(command)

    async def CopyBlocks(
        self, request: pb.CopyBlocksRequest, context: _Context
    ) -> pb.CopyBlocksResponse:
        num_blocks, receipt = await self._transfers(request, swaps=False)
        return pb.CopyBlocksResponse(num_blocks=num_blocks, receipt=receipt)

    async def SwapBlocks(
        self, request: pb.SwapBlocksRequest, context: _Context
    ) -> pb.SwapBlocksResponse:
        num_blocks, receipt = await self._transfers(request, swaps=True)
        return pb.SwapBlocksResponse(num_blocks=num_blocks, receipt=receipt)

    async def ReadBlocks(
        self, request: pb.ReadBlocksRequest, context: _Context
    ) -> pb.ReadBlocksResponse:
        self._check_answer_fits(request)

        tenant = self._tenant()

        def command() -> pb.ReadBlocksResponse:
            session_id = self._executor.open(request.grant, tenant=tenant)
            blocks, table = self._executor.read_blocks(
                session_id,
                request.sequence_id,
                request.first_block,
                request.num_blocks,
                group=request.group,
                first_layer=request.first_layer,
                num_layers=request.num_layers,
            )
            return pb.ReadBlocksResponse(
                blocks=tensor_to_message(blocks), table=table, source=self._executor.block_source()
            )

        return await self._run(command)

    async def WriteBlocks(
        self, request: pb.WriteBlocksRequest, context: _Context
    ) -> pb.WriteBlocksResponse:
        source, layout = request.source, self._executor.layout
        if request.HasField("source") and source.layout_fingerprint != layout.fingerprint:
            raise LayoutMismatchError(
                f"the blocks were read in pool {source.pool_id!r}, whose layout differs from this "
                "pool's",
                field="source.layout_fingerprint",
            )

        tenant = self._tenant()

        def command() -> pb.WriteBlocksResponse:
            blocks = self._tensor(request.blocks, "blocks")
            session_id, number = self._start(request, tenant)
            receipt = self._executor.write_blocks(
                session_id,
                request.sequence_id,
                request.first_block,
                blocks,
                group=request.group,
                first_layer=request.first_layer,
                num_layers=request.num_layers,
                plan_number=number,
            )
            return pb.WriteBlocksResponse(receipt=receipt)

        return await self._run(command)

    async def _run(self, command: Callable[[], T]) -> T:
        """What ``command`` returns, run on the worker thread in the caller's turn."""
        return await self._run_pieces(lambda: whole(command))

    async def _run_pieces(self, command: Callable[[], Pieces[T]], session_id: int = 0) -> T:
        """As ``_run``, by pieces. ``session_id``: 0 where it is not known yet. The command's copies
        of tensors to and from a device are not commands of the executor, so their failures are
        checked here.
        """
        try:
            return await self._worker.run_pieces(command, Lane(payer(), session_id))
        except InternalError:
            await self._worker.run(self._executor.device_watch.check)
            raise

    def _tenant(self) -> str | None:
        """The caller's tenant; None where callers do not say who they are."""
        return caller().tenant if self._knows_callers else None

    async def _transfers(
        self, request: pb.CopyBlocksRequest | pb.SwapBlocksRequest, *, swaps: bool
    ) -> tuple[int, Any]:
        tenant = self._tenant()

        def command() -> tuple[int, Any]:
            session_id = self._executor.open(request.grant, tenant=tenant)
            return self._executor.start_transfers(session_id, request.plan, swaps=swaps)

        return await self._run(command)

    def _start(
        self,
        request: pb.ReshapeAndCacheRequest | pb.PagedAttentionRequest | pb.WriteBlocksRequest,
        tenant: str | None,
    ) -> tuple[int, int]:
        """Open the request's session and start its plan. Returns the session's id and the plan's
        number.
        """
        session_id = self._executor.open(request.grant, tenant=tenant)
        return session_id, self._executor.start(session_id, request.plan).number

    def _tensor(self, message: Any, field: str) -> Any:
        return tensor_from_message(message, self._executor.device, field=field)

    def _check_answer_fits(self, request: pb.ReadBlocksRequest) -> None:
        group = request.group if 0 < request.group < len(self._executor.layout.groups) else 0
        pool = self._executor.pools.tier(place_of(group, tpb.TIER_DEVICE))
        num_layers = request.num_layers if 0 < request.num_layers < pool.shape[1] else pool.shape[1]
        block_bytes = pool[0, 0].nbytes * num_layers + _BLOCK_REF_BYTES
        most = (self._max_message_bytes - _OVERHEAD_BYTES) // block_bytes
        if request.num_blocks > most:
            raise InvalidRequestError(
                f"a message has room for {most} blocks of {num_layers} layers: read fewer blocks "
                "or layers at a time",
                field="num_blocks",
            )


class _ExecuteStream:
    """The session and plan of one execution stream. Used on the worker thread."""

    def __init__(self, executor: Executor, tenant: str | None) -> None:
        self._executor = executor
        self._tenant = tenant
        self._session_id: int | None = None
        self._plan_number: int | None = None

    @property
    def session_id(self) -> int:
        """The session that it was opened for; 0 before."""
        return self._session_id or 0

    def answer(self, request: pb.ExecuteRequest) -> Pieces[list[pb.ExecuteResponse]]:
        """The answers to one request. Raises KvplaneError."""
        kind = request.WhichOneof("message")
        if kind == "open":
            return self._open(request.open)
        if kind == "plan":
            return self._start(request)
        if kind == "layer":
            return (yield from self._layer(request.layer))
        raise InvalidRequestError(
            "must be open, plan or layer: other messages are unknown to this data plane",
            field="message",
        )

    def _open(self, request: pb.OpenExecution) -> list[pb.ExecuteResponse]:
        version = protocol.negotiate(request.protocol, field="open.protocol")
        session_id = self._executor.open(request.grant, tenant=self._tenant)
        self._session_id, self._plan_number = session_id, None
        opened = pb.ExecutionOpened(protocol_version=version, layers=self._executor.layers)
        return [pb.ExecuteResponse(opened=opened)]

    def _start(self, request: pb.ExecuteRequest) -> list[pb.ExecuteResponse]:
        self._plan_number = None
        if self._session_id is None:
            raise InvalidRequestError(
                "the stream is not open: send an open message first", field="open"
            )
        started = self._executor.start(self._session_id, request.plan)
        self._plan_number = started.number
        answer = pb.PlanStarted(
            plan_number=started.number, num_tokens=started.num_tokens, finished=started.had_run
        )
        answers = [pb.ExecuteResponse(started=answer)]
        if started.receipt is not None:
            answers.append(pb.ExecuteResponse(receipt=started.receipt))
        return answers

    def _layer(self, request: pb.LayerInput) -> Pieces[list[pb.ExecuteResponse]]:
        if self._session_id is None or self._plan_number is None:
            raise InvalidRequestError(
                "no plan was started on this stream: send a plan before its layers", field="layer"
            )
        executor = self._executor
        query, value = (
            tensor_from_message(getattr(request, name), executor.device, field=f"layer.{name}")
            if request.HasField(name)
            else None
            for name in ("query", "value")
        )
        key = tensor_from_message(request.key, executor.device, field="layer.key")
        output = yield from executor.layer_pieces(
            self._session_id,
            request.layer,
            (query, key, value),
            _options(request.options, "layer.options"),
            self._plan_number,
            "layer.",
            _PIECE_S,
        )
        answer = pb.LayerOutput(layer=request.layer)
        if output is not None:
            answer.output.CopyFrom(tensor_to_message(output))
        answers = [pb.ExecuteResponse(output=answer)]
        receipt = executor.receipt(self._session_id)
        if receipt is not None:
            answers.append(pb.ExecuteResponse(receipt=receipt))
        return answers


def _options(message: pb.AttentionOptions, field: str) -> AttentionOptions:
    protocol.refuse_unknown_fields(message, field=field)
    return AttentionOptions.from_proto(message, field=field)
