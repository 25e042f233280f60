"""The service about pools: passes requests to the core and returns its answers."""

from __future__ import annotations

from typing import Any, Final

import grpc.aio

from control_plane.core import ControlPlane
from control_plane.server.metrics import counters_of
from kvplane.serving.callers.identity import caller
from kvplane.v1 import pool_pb2 as contract
from kvplane.wire.v1 import pool_pb2 as pb
from kvplane.wire.v1 import pool_pb2_grpc

POOLS: Final = contract.DESCRIPTOR.services_by_name["PoolService"]

_Context = grpc.aio.ServicerContext[Any, Any]


class PoolService(pool_pb2_grpc.PoolServiceServicer):
    """The gRPC service that lists pools and sessions of one core."""

    def __init__(self, core: ControlPlane) -> None:
        self._core = core

    async def ListPools(
        self, request: pb.ListPoolsRequest, context: _Context
    ) -> pb.ListPoolsResponse:
        return self._core.list_pools(request)

    async def GetPool(self, request: pb.GetPoolRequest, context: _Context) -> pb.GetPoolResponse:
        return self._core.get_pool(request.pool_id)

    async def GetPoolCounters(
        self, request: pb.GetPoolCountersRequest, context: _Context
    ) -> pb.GetPoolCountersResponse:
        observed = self._core.observe_pool(request.pool_id)
        return pb.GetPoolCountersResponse(counters=counters_of(observed))

    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: _Context
    ) -> pb.ListSessionsResponse:
        return self._core.list_sessions(request, caller().tenant)
