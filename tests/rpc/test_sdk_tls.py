"""The client over TLS: whom it trusts, and who it says it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvplane import ControlClient, Tls
from kvplane.errors import DeadlineExceededError, PlaneUnavailableError
from kvplane.serving import server as serving
from kvplane.serving.callers.identity import caller
from kvplane.wire.v1 import pool_pb2, pool_pb2_grpc
from tests.helpers.sdk_peers import interceptor

TLS = Path(__file__).parent / "tls"
TRUSTING = Tls(ca_file=TLS / "ca.pem", server_name="kvplane.test")
TENANT_A = Tls(
    ca_file=TLS / "ca.pem",
    cert_file=TLS / "client.pem",
    key_file=TLS / "client.key",
    server_name="kvplane.test",
)


class WhoAmI(pool_pb2_grpc.PoolServiceServicer):
    """Answers with the tenant that it takes the caller for."""

    async def ListPools(self, request: Any, context: Any) -> pool_pb2.ListPoolsResponse:
        return pool_pb2.ListPoolsResponse(pool_ids=[caller().tenant])


async def serve(tls: serving.ServerTls) -> serving.Server:
    server = serving.build(
        "127.0.0.1:0", tls=tls, max_message_bytes=1 << 20, interceptors=[interceptor()]
    )
    pool_pb2_grpc.add_PoolServiceServicer_to_server(WhoAmI(), server.grpc_server)
    await server.start([])
    return server


@pytest.fixture
async def open_to_known() -> AsyncIterator[str]:
    tls = serving.ServerTls(TLS / "server.pem", TLS / "server.key", TLS / "ca.pem")
    server = await serve(tls)
    yield server.address
    await server.stop(0)


async def test_a_client_with_a_certificate_is_who_it_names(open_to_known: str) -> None:
    async with ControlClient(open_to_known, tls=TENANT_A) as client:
        assert await client.list_pools() == ["tenant-a"]


@pytest.mark.parametrize(
    "tls",
    [
        None,
        Tls(ca_file=TLS / "ca.pem"),
        Tls(ca_file=TLS / "client.pem", server_name="kvplane.test"),
        TRUSTING,
    ],
    ids=["no TLS", "another name", "another authority", "no certificate"],
)
async def test_nothing_is_said_to_a_peer_that_is_not_trusted(
    open_to_known: str, tls: Tls | None
) -> None:
    async with ControlClient(open_to_known, tls=tls, timeout_s=0.5) as client:
        with pytest.raises((PlaneUnavailableError, DeadlineExceededError)):
            await client.list_pools()


async def test_a_channel_can_be_made_without_files() -> None:
    """The authorities that gRPC ships are the default; making the channel reaches nobody."""
    client = ControlClient("127.0.0.1:1", tls=Tls())
    assert isinstance(client._connection.channel, grpc.aio.Channel)
    await client.close()
