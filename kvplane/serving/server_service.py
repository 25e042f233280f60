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
    """Describes the process."""

    def __init__(self, describe: Callable[[], pb.GetServerInfoResponse]) -> None:
        """``describe`` returns what the process is now."""
        self._describe = describe

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetServerInfoResponse:
        return self._describe()
