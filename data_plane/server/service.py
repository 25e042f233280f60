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

from data_plane.execution.executor import Executor
from data_plane.execution.plan_runner import StartedPlan
from data_plane.server.execute_stream import SLICE_S, ExecuteStream
from data_plane.server.fair_queue import Lane
from data_plane.server.file_tier import FileTier
from data_plane.server.local.endpoint import LocalEndpoint
from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from data_plane.server.worker_thread import WorkerThread
from data_plane.tier_keys import tier_key_of
from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    KvplaneError,
    LayoutMismatchError,
    PlaneUnavailableError,
)
from kvplane.serving.callers.identity import caller, payer
from kvplane.serving.observability.metrics import Counts
from kvplane.serving.requests import Requests
from kvplane.serving.streams import RequestStreams
from kvplane.slices import Slices, whole
from kvplane.v1 import data_pb2 as contract
from kvplane.wire.error_codec import to_wire
from kvplane.wire.v1 import data_pb2 as pb
from kvplane.wire.v1 import data_pb2_grpc
from kvplane.wire.v1 import types_pb2 as tpb

SERVICE: Final = contract.DESCRIPTOR.services_by_name["DataPlaneService"]
_LOGGER: Final = logging.getLogger(__name__)
# Upper bounds on a response's size without its tensor: in all, and for each block.
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
        max_message_bytes: int,
        rejected: Counts,
        local: LocalEndpoint | None = None,
        files: FileTier | None = None,
        knows_callers: bool = False,
    ) -> None:
        """``rejected`` counts the requests of streams that are refused, by the error's reason.
        ``local``: serves clients on this machine by shared memory; None for gRPC alone. ``files``:
        None where blocks are not kept in files. ``knows_callers``: callers are authenticated, so
        their grants must be their own.
        """
        self._executor = executor
        self._worker = worker
        self._max_message_bytes = max_message_bytes
        self._rejected = rejected
        self._local = local
        self._files = files
        self._knows_callers = knows_callers
        self._streams = RequestStreams("data plane")

    def stop(self) -> None:
        """End the streams that wait for a request, and every other one after its current answer."""
        self._streams.stop()

    async def Execute(
        self, request_iterator: Requests, context: _Context
    ) -> AsyncIterator[pb.ExecuteResponse]:
        stream = ExecuteStream(self._executor, self._tenant())
        requests = self._streams.open(request_iterator)
        try:
            while True:
                try:
                    request = await requests.next()
                    if request is None:
                        return
                    command = partial(stream.answer, request)
                    answer = await self._run_slices(command, stream.session_id)
                    if answer.HasField("opened"):
                        admit = request_iterator.check_caller
                        offer = self._offer(stream, request.open.host_id, admit)
                        answer.opened.MergeFrom(pb.ExecutionOpened(local=offer))
                except PlaneUnavailableError:
                    raise
                except KvplaneError as error:
                    self._rejected.inc(error.reason)
                    answer = pb.ExecuteResponse(error=to_wire(error))
                yield answer
        finally:
            if self._local is not None:
                self._local.withdraw(stream)

    async def ReshapeAndCache(
        self, request: pb.ReshapeAndCacheRequest, context: _Context
    ) -> pb.ReshapeAndCacheResponse:
        tenant = self._tenant()

        def command() -> pb.ReshapeAndCacheResponse:
            key = self._tensor(request.key, "key")
            value = self._tensor(request.value, "value") if request.HasField("value") else None
            session_id, number = self._start(request, tenant)
            receipt = self._executor.write_layer(
                session_id, request.layer, key, value, plan_number=number, pass_index=None
            )
            return pb.ReshapeAndCacheResponse(receipt=receipt)

        return await self._run(command)

    async def PagedAttention(
        self, request: pb.PagedAttentionRequest, context: _Context
    ) -> pb.PagedAttentionResponse:
        tenant = self._tenant()

        def command() -> Slices[pb.PagedAttentionResponse]:
            query = self._tensor(request.query, "query")
            options = AttentionOptions.from_proto(request.options, field="options")
            session_id, number = self._start(request, tenant)
            output = yield from self._executor.attend(
                session_id,
                request.layer,
                query,
                options=options,
                plan_number=number,
                pass_index=None,
                slice_s=SLICE_S,
            )
            return pb.PagedAttentionResponse(output=tensor_to_message(output))

        return await self._run_slices(command)

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

    async def FindFileBlocks(
        self, request: pb.FindFileBlocksRequest, context: _Context
    ) -> pb.FindFileBlocksResponse:
        files, tenant = self._file_tier(), self._tenant()
        session_id = await self._run(lambda: self._executor.open(request.grant, tenant=tenant))
        num_blocks = await files.find(session_id, request.token_ids)
        return pb.FindFileBlocksResponse(num_blocks=num_blocks)

    async def LoadFileBlocks(
        self, request: pb.LoadFileBlocksRequest, context: _Context
    ) -> pb.LoadFileBlocksResponse:
        files, tenant = self._file_tier(), self._tenant()

        def command() -> tuple[int, StartedPlan]:
            session_id = self._executor.open(request.grant, tenant=tenant)
            return session_id, self._executor.start(session_id, request.plan)

        session_id, started = await self._run(command)
        if started.receipt is not None:
            return pb.LoadFileBlocksResponse(receipt=started.receipt)
        return await files.load(session_id, started.number, request, Lane(payer(), session_id))

    def _file_tier(self) -> FileTier:
        if self._files is None:
            raise InvalidRequestError(
                "this data plane keeps no blocks in files: start it with --file-tier-dir"
            )
        return self._files

    async def _run(self, command: Callable[[], T]) -> T:
        """Run ``command`` on the worker thread in the caller's turn, and return its result."""
        return await self._run_slices(lambda: whole(command))

    async def _run_slices(self, command: Callable[[], Slices[T]], session_id: int = 0) -> T:
        """Do as ``_run`` does, by slices. ``session_id``: 0 where it is not known yet. Copies of
        tensors to and from a device are not commands of the executor, so their failures are checked
        here.
        """
        try:
            return await self._worker.run_slices(command, Lane(payer(), session_id))
        except InternalError:
            await self._worker.run(self._executor.device_watch.check)
            raise

    def _offer(
        self, stream: ExecuteStream, host_id: str, admit: Callable[[], None]
    ) -> pb.LocalOffer | None:
        return None if self._local is None else self._local.offer(stream, host_id, admit, payer())

    def _tenant(self) -> str | None:
        """Return the caller's tenant; None where callers are not authenticated."""
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
        pool = self._executor.pools.tier(tier_key_of(group, tpb.TIER_DEVICE))
        num_layers = request.num_layers if 0 < request.num_layers < pool.shape[1] else pool.shape[1]
        block_bytes = pool[0, 0].nbytes * num_layers + _BLOCK_REF_BYTES
        most = (self._max_message_bytes - _OVERHEAD_BYTES) // block_bytes
        if request.num_blocks > most:
            raise InvalidRequestError(
                f"a message has room for {most} blocks of {num_layers} layers: read fewer blocks "
                "or layers at a time",
                field="num_blocks",
            )
