"""The call that both planes answer."""

from __future__ import annotations

from kvplane.transport.connection import Connection
from kvplane.wire.v1 import pool_pb2 as pb
from kvplane.wire.v1 import pool_pb2_grpc


async def get_server_info(
    connection: Connection, timeout_s: float | None
) -> pb.GetServerInfoResponse:
    """Get what the plane at the connection's end says of itself."""
    stub = pool_pb2_grpc.ServerServiceStub(connection.channel)
    response: pb.GetServerInfoResponse = await connection.call(
        stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s
    )
    return response
