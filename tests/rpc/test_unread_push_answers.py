"""A sender that does not read its answers keeps no thread of the receiver."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from two_pools import PROMPT, SEQUENCE, push, two_pools

from data_plane.server.push import receiver
from kvplane import ops
from kvplane.errors import NotPermittedError, PlaneUnavailableError, QuotaExceededError
from kvplane.v1 import push_pb2_grpc
from kvplane.v1.data_pb2 import PushTicket
from kvplane.v1.push_pb2 import PushStagedBlocksRequest

# What the sender takes without reading: the answers to its chunks, and less than the receipt.
WINDOW = [("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0)]
PATIENCE_S = 60.0


async def test_who_never_reads_the_last_answer_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "_MOST_CALLS", 1)
    monkeypatch.setattr(receiver, "STALL_S", 2.0)
    async with two_pools(tmp_path) as pools:
        there = pools.there
        assert there.plane.push is not None
        counts = there.plane.push.counts
        admit = ops.admit(SEQUENCE, PROMPT, max_total_tokens=64)
        ticket = await there.receive((await there.session.step([admit])).raise_for_status().plan)
        requests = await pools.chunks()
        requests[0].open.secret = ticket.secret
        forged = PushTicket(address=ticket.address, secret=bytes(32))
        async with grpc.aio.insecure_channel(ticket.address, WINDOW) as channel:
            call: Any = push_pb2_grpc.BlockPushServiceStub(channel).PushStagedBlocks()
            for each in requests:
                await call.write(PushStagedBlocksRequest.FromString(each.SerializeToString()))
            await call.done_writing()
            async with asyncio.timeout(PATIENCE_S):
                while not counts.num_pushes["received", "OK"]:
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(PATIENCE_S):  # the one thread waits for the reader
                while not await has_room(forged, requests):
                    await asyncio.sleep(0.1)
        assert counts.num_pushes["received", "OK"] == 1
        assert not counts.num_pushes["received", "CANCELLED"]


async def has_room(forged: PushTicket, requests: Any) -> bool:
    """Whether the receiver has a thread to refuse a ticket with."""
    try:
        await push(forged, requests[:1])
    except (QuotaExceededError, PlaneUnavailableError):  # the second, where it broke off a write
        return False
    except NotPermittedError:
        return True
    raise AssertionError("a forged ticket was taken")
