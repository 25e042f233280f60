"""The call that both planes answer."""

from __future__ import annotations

from kvplane.results import ServerInfo, ShardInfo
from kvplane.transport.connection import Connection
from kvplane.wire.v1 import pool_pb2 as pb
from kvplane.wire.v1 import pool_pb2_grpc


async def get_server_info(connection: Connection, timeout_s: float | None) -> ServerInfo:
    """Ask the plane at the other end of the connection for its release and identity."""
    stub = pool_pb2_grpc.ServerServiceStub(connection.channel)
    response: pb.GetServerInfoResponse = await connection.call(
        stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s
    )
    shard = ShardInfo.from_proto(response.shard) if response.HasField("shard") else None
    return ServerInfo(
        response.version, response.incarnation, response.pool_id, shard, response.device
    )
