"""Where blocks may be pushed: a host, and nothing else that gRPC takes for an address."""

from __future__ import annotations

from typing import Any

import pytest

from data_plane.server.fair_queue import Lane
from data_plane.server.push.counts import PushCounts
from data_plane.server.push.sender import ANY_HOST, BlockSender
from kvplane.errors import InvalidRequestError, NotPermittedError
from kvplane.v1 import data_pb2


async def send(address: str) -> None:
    """To an address, of which no entry is named."""
    nothing: Any = None
    sender = BlockSender(*(nothing, nothing, nothing), PushCounts(), hosts=[ANY_HOST], max_pushes=1)
    request = data_pb2.SendBlocksRequest(ticket=data_pb2.PushTicket(address=address))
    await sender.send(1, request, Lane("a", 1))


@pytest.mark.parametrize("address", ["host:1", "10.0.0.1:1", "[::1]:1"])
async def test_any_host_is_sent_to_where_all_are_allowed(address: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await send(address)
    assert caught.value.field == "ticket.num_blocks", "the next check"


@pytest.mark.parametrize(
    "address",
    ["", ":1", "unix:/run/a:1", "unix:a:1", "unix-abstract:a:1", "vsock:2:1", "dns://a/b:1"],
)
async def test_only_hosts_are_sent_to(address: str) -> None:
    with pytest.raises(NotPermittedError) as caught:
        await send(address)
    assert caught.value.field == "ticket.address"
