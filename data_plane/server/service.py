"""Executions, and whole blocks: each call becomes commands of the executor, which does the work.

Commands run on the worker thread. A request of an execution stream that fails is answered in the
stream, which stays open.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final

import grpc.aio

from data_plane.execution.executor import Executor
from data_plane.execution.plan_runner import StartedPlan
from data_plane.server.block_requests import BlockRequests, encoded
from data_plane.server.calls import Calls, refuse_fields
from data_plane.server.execute_stream import ExecuteStream
from data_plane.server.fair_queue import Lane
from data_plane.server.file_tier import FileTier
from data_plane.server.local.endpoint import LocalEndpoint
from data_plane.server.local.region import no_region
from kvplane.errors import InvalidRequestError, KvplaneError, PlaneUnavailableError
from kvplane.serving.callers.identity import payer
from kvplane.serving.observability.metrics import Counts
from kvplane.serving.requests import Requests
from kvplane.serving.streams import RequestStreams
from kvplane.v1 import execution_pb2 as contract
from kvplane.wire.error_codec import to_wire
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import execution_pb2_grpc, local_pb2

EXECUTIONS: Final = contract.DESCRIPTOR.services_by_name["ExecutionService"]
_LOGGER: Final = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]
BLOCKS: Final = contract.DESCRIPTOR.services_by_name["BlockService"]


class ExecutionService(execution_pb2_grpc.ExecutionServiceServicer):
    """The gRPC service of executions: runs plans and layers on one executor."""

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
        """End streams that wait for a request now, the others after their current answer."""
        self._streams.stop()

    async def Execute(
        self, request_iterator: Requests, context: _Context
    ) -> AsyncIterator[pb.ExecuteResponse | bytes]:  # the interceptor passes bytes
        stream = ExecuteStream(self._executor, self._calls.tenant())
        try:
            while True:
                try:
                    request = await self._streams.next(request_iterator)
                    if request is None:
                        return
                    command = partial(stream.answer, request)
                    answer = await self._calls.run_slices(command, stream.session_id)
                    if isinstance(answer, pb.ExecuteResponse) and answer.HasField("opened"):
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
        self, request: pb.RunLayerRequest, context: _Context
    ) -> pb.RunLayerResponse:
        fields = ("query", "options", "output")
        refuse_fields(request, fields, "this call only writes: PagedAttention attends")
        return await self._run_layer(request, "key")

    async def PagedAttention(
        self, request: pb.RunLayerRequest, context: _Context
    ) -> pb.RunLayerResponse:
        refuse_fields(request, ("key", "value"), "this call only attends: ReshapeAndCache writes")
        return await self._run_layer(request, "query")

    async def CopyBlocks(
        self, request: pb.StartPlanRequest, context: _Context
    ) -> pb.StartPlanResponse:
        return await self._start_plan(request, swaps=False)

    async def SwapBlocks(
        self, request: pb.StartPlanRequest, context: _Context
    ) -> pb.StartPlanResponse:
        return await self._start_plan(request, swaps=True)

    def _offer(
        self, stream: ExecuteStream, host_id: str, admit: Callable[[], None]
    ) -> local_pb2.LocalOffer | None:
        return None if self._local is None else self._local.offer(stream, host_id, admit, payer())

    async def _run_layer(self, request: pb.RunLayerRequest, wanted: str) -> pb.RunLayerResponse:
        """Answer a unary call for one layer, whose request must have the tensor ``wanted``."""
        if not request.HasField(wanted):
            raise InvalidRequestError("must be given", field=wanted)
        stream = ExecuteStream(self._executor, self._calls.tenant())
        return await self._calls.run_slices(partial(stream.layer_alone, request))

    async def _start_plan(
        self, request: pb.StartPlanRequest, *, swaps: bool
    ) -> pb.StartPlanResponse:
        stream = ExecuteStream(self._executor, self._calls.tenant())
        return await self._calls.run(partial(stream.start_alone, request, swaps=swaps))


class BlockService(execution_pb2_grpc.BlockServiceServicer):
    """The gRPC service that reads, writes and loads whole blocks of one executor."""

    def __init__(self, calls: Calls, executor: Executor, *, files: FileTier | None) -> None:
        """``files``: the file tier; None where blocks are not kept in files."""
        self._calls = calls
        self._executor = executor
        self._requests = BlockRequests(executor)
        self._files = files

    # An answer is encoded already: the interceptor passes bytes.
    async def ReadBlocks(self, request: pb.ReadBlocksRequest, context: _Context) -> bytes:
        tenant = self._calls.tenant()

        def command() -> bytes:
            session_id = self._executor.open(request.grant, tenant=tenant)
            return self._requests.read(session_id, request, no_region, encoded)

        return await self._calls.run(command)

    async def WriteBlocks(
        self, request: pb.WriteBlocksRequest, context: _Context
    ) -> pb.WriteBlocksResponse:
        tenant = self._calls.tenant()

        def command() -> pb.WriteBlocksResponse:
            session_id = self._executor.open(request.grant, tenant=tenant)
            return self._requests.write(session_id, request, no_region)

        return await self._calls.run(command)

    async def LoadFileBlocks(
        self, request: pb.LoadFileBlocksRequest, context: _Context
    ) -> pb.LoadFileBlocksResponse:
        files, tenant = self._file_tier(), self._calls.tenant()
        if not request.HasField("plan") and request.sequence_id:
            raise InvalidRequestError("must be 0 without a plan", field="sequence_id")

        def command() -> tuple[int, StartedPlan | None]:
            session_id = self._executor.open(request.grant, tenant=tenant)
            if not request.HasField("plan"):
                return session_id, None
            return session_id, self._executor.start(session_id, request.plan)

        session_id, started = await self._calls.run(command)
        if started is None:
            num_blocks = await files.find(session_id, request.token_ids)
            return pb.LoadFileBlocksResponse(num_blocks=num_blocks)
        if started.receipt is not None:
            return pb.LoadFileBlocksResponse(receipt=started.receipt)
        return await files.load(session_id, started.number, request, Lane(payer(), session_id))

    def _file_tier(self) -> FileTier:
        if self._files is None:
            raise InvalidRequestError(
                "this data plane keeps no blocks in files: start it with --file-tier-dir"
            )
        return self._files
