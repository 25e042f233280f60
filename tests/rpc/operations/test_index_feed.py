"""A follower of a pool's prefix index is told on its stream that it was overrun."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from control_plane import limits
from kvplane.errors import RevisionTooOldError
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.v1 import prefix_pb2 as pb
from tests.helpers.planning.operations_world import POOL, prompt


async def test_a_follower_that_is_overrun_is_told_so_on_its_stream(
    world, caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step changes more than is kept."""
    monkeypatch.setattr(limits, "NUM_KEPT_CHANGES", 4)
    call = world.stub.WatchPrefixes(pb.WatchPrefixesRequest(pool_id=POOL))
    while not (await asyncio.wait_for(call.read(), 10)).revision:
        pass
    await caller.admit(1, prompt(5))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await asyncio.wait_for(call.read(), 10)
    assert type(from_rpc_error(ended.value)) is RevisionTooOldError
