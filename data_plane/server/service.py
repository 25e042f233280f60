"""Executions: each call becomes commands of the executor, which does the work.

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
from data_plane.server.calls import Calls
from data_plane.server.execute_stream import SLICE_S, ExecuteStream
from data_plane.server.local.endpoint import LocalEndpoint
from data_plane.server.tensor_codec import tensor_to_message
from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    KvplaneError,
    PlaneUnavailableError,
)
from kvplane.serving.callers.identity import payer
from kvplane.serving.observability.metrics import Counts
from kvplane.serving.requests import Requests
from kvplane.serving.streams import RequestStreams
from kvplane.slices import Slices
from kvplane.v1 import execution_pb2 as contract
from kvplane.wire.error_codec import to_wire
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import execution_pb2_grpc, local_pb2

EXECUTIONS: Final = contract.DESCRIPTOR.services_by_name["ExecutionService"]
_LOGGER: Final = logging.getLogger(__name__)
# Upper bounds on a response's size without its tensor: in all, and for each block.
_OVERHEAD_BYTES: Final = 1024
_BLOCK_REF_BYTES: Final = 12

T = TypeVar("T")
_Context = grpc.aio.ServicerContext[Any, Any]


class ExecutionService(execution_pb2_grpc.ExecutionServiceServicer):
    """Serves one executor."""

    def __init__(
        self,
        calls: Calls,
        executor: Executor,
        *,
        rejected: Counts,
        local: LocalEndpoint | None = None,
    ) -> None:
        """``rejected`` counts the requests of streams that are refused, by the error's reason.
        ``local``: serves clients on this machine by shared memory; None for gRPC alone.
        """
        self._calls = calls
        self._executor = executor
        self._rejected = rejected
        self._local = local
        self._streams = RequestStreams("data plane")

    def stop(self) -> None:
        """End the streams that wait for a request, and every other one after its current answer."""
        self._streams.stop()

    async def Execute(
        self, request_iterator: Requests, context: _Context
    ) -> AsyncIterator[pb.ExecuteResponse]:
        stream = ExecuteStream(self._executor, self._calls.tenant())
        requests = self._streams.open(request_iterator)
        try:
            while True:
                try:
                    request = await requests.next()
                    if request is None:
                        return
                    command = partial(stream.answer, request)
                    answer = await self._calls.run_slices(command, stream.session_id)
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
        tenant = self._calls.tenant()

        def command() -> pb.ReshapeAndCacheResponse:
            key = self._calls.tensor(request.key, "key")
            value = (
                self._calls.tensor(request.value, "value") if request.HasField("value") else None
            )
            session_id, number = self._calls.start(request, tenant)
            receipt = self._executor.write_layer(
                session_id, request.layer, key, value, plan_number=number, pass_index=None
            )
            return pb.ReshapeAndCacheResponse(receipt=receipt)

        return await self._calls.run(command)

    async def PagedAttention(
        self, request: pb.PagedAttentionRequest, context: _Context
    ) -> pb.PagedAttentionResponse:
        tenant = self._calls.tenant()

        def command() -> Slices[pb.PagedAttentionResponse]:
            query = self._calls.tensor(request.query, "query")
            options = AttentionOptions.from_proto(request.options, field="options")
            session_id, number = self._calls.start(request, tenant)
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

        return await self._calls.run_slices(command)

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

    def _offer(
        self, stream: ExecuteStream, host_id: str, admit: Callable[[], None]
    ) -> local_pb2.LocalOffer | None:
        return None if self._local is None else self._local.offer(stream, host_id, admit, payer())

    async def _transfers(
        self, request: pb.CopyBlocksRequest | pb.SwapBlocksRequest, *, swaps: bool
    ) -> tuple[int, Any]:
        tenant = self._calls.tenant()

        def command() -> tuple[int, Any]:
            session_id = self._executor.open(request.grant, tenant=tenant)
            return self._executor.start_transfers(session_id, request.plan, swaps=swaps)

        return await self._calls.run(command)
