"""The service that both planes have: it says which process answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc.aio

from kvplane.v1 import pool_pb2 as contract
from kvplane.wire.v1 import pool_pb2 as pb
from kvplane.wire.v1 import pool_pb2_grpc

SERVER: Final = contract.DESCRIPTOR.services_by_name["ServerService"]


class ServerService(pool_pb2_grpc.ServerServiceServicer):
    """The gRPC service that says which plane, release and run this process is."""

    def __init__(self, describe: Callable[[], pb.GetServerInfoResponse]) -> None:
        """``describe`` returns the present description of the process."""
        self._describe = describe

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetServerInfoResponse:
        return self._describe()
