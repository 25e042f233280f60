"""The client over TLS: whom it trusts, and who it says it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from kvplane import ControlClient, Tls
from kvplane.errors import DeadlineExceededError, PlaneUnavailableError
from kvplane.serving.certificates import ServerTls
from tests.helpers.sdk_peers import WhoAmI, serving

TLS = Path(__file__).parent / "tls"
TRUSTING = Tls(ca_file=TLS / "ca.pem", server_name="kvplane.test")
TENANT_A = Tls(
    ca_file=TLS / "ca.pem",
    cert_file=TLS / "client.pem",
    key_file=TLS / "client.key",
    server_name="kvplane.test",
)


@pytest.fixture
async def open_to_known() -> AsyncIterator[str]:
    tls = ServerTls(TLS / "server.pem", TLS / "server.key", TLS / "ca.pem")
    async with serving(WhoAmI(), tls) as address:
        yield address


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
