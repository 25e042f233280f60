"""Whole blocks: read, written, and loaded from files."""

from __future__ import annotations

from typing import Any, Final

import grpc.aio

from data_plane.execution.executor import Executor
from data_plane.execution.plan_runner import StartedPlan
from data_plane.server.block_requests import BlockRequests, encoded
from data_plane.server.calls import Calls
from data_plane.server.fair_queue import Lane
from data_plane.server.file_tier import FileTier
from data_plane.server.local.region import no_region
from kvplane.errors import InvalidRequestError
from kvplane.serving.callers.identity import payer
from kvplane.v1 import execution_pb2 as contract
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import execution_pb2_grpc

BLOCKS: Final = contract.DESCRIPTOR.services_by_name["BlockService"]

_Context = grpc.aio.ServicerContext[Any, Any]


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
