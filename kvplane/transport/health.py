"""Asks a server for its health, by gRPC's health protocol."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import wrappers_pb2

from kvplane.errors import InternalError
from kvplane.transport.connection import Connection
from kvplane.transport.tls import Tls

_STATES: Final = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}


async def check(
    target: str, *, service: str = "", tls: Tls | None = None, timeout_s: float = 5.0
) -> str:
    """Ask the server at ``target`` for the health of ``service`` (empty: of the whole server):
    "SERVING" etc.

    A server that cannot be reached is tried until ``timeout_s`` has passed. Raises KvplaneError:
    PlaneUnavailableError or DeadlineExceededError then, and NotFoundError for a service that the
    server does not have.
    """
    connection = Connection(target, tls=tls, timeout_s=timeout_s)
    try:
        # These messages have the same single fields as the protocol's, which would need a package.
        method: Any = connection.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=wrappers_pb2.StringValue.SerializeToString,
            response_deserializer=wrappers_pb2.Int32Value.FromString,
        )
        answer = await connection.call(method, wrappers_pb2.StringValue(value=service))
        if answer.value not in _STATES:
            raise InternalError(f"health state {answer.value} is not known")
        return _STATES[answer.value]
    finally:
        await connection.close()
