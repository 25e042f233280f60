"""What routers know of pools, from a control plane on a socket."""

from __future__ import annotations

import pytest

from control_plane.server.server import ControlPlaneServer
from kvplane.clients.control_client import ControlClient
from kvplane.integrations.router.feeds import PoolFeeds
from kvplane.integrations.router.picker import Picker
from tests.helpers.planning.control_wire import PATIENCE_S, RawShard, Stub
from tests.helpers.waiting import until

pytestmark = pytest.mark.nightly


async def test_an_engine_whose_pool_is_lost_is_picked_when_there_is_no_other(
    stub: Stub, control_server: ControlPlaneServer
) -> None:
    """It answers its health checks, holds its requests, and looks idle."""
    picker = Picker({"held": "pool", "free": "other"})
    shards = [RawShard(stub), RawShard(stub, pool_id="other")]
    for shard in shards:
        await shard.register()
        await shard.report()
    async with ControlClient(control_server.address) as control:
        feeds = PoolFeeds(control, "", picker.indexes, picker.lost)
        try:
            feeds.follow(picker.pool_of.values())
            await feeds.wait(PATIENCE_S)
            shards[0].hang_up()
            await until_lost(picker, {"pool"})
            assert set(picker.indexes) == {"pool", "other"}, "the index may be right again"
            assert {picked(picker) for _ in range(4)} == {"free"}
            shards[1].hang_up()
            await until_lost(picker, {"pool", "other"})
            assert {picked(picker) for _ in range(4)} == {"held", "free"}
            for shard in (RawShard(stub, epoch=12), RawShard(stub, epoch=12, pool_id="other")):
                await shard.register()
                await shard.report()
            await until_lost(picker, set())
        finally:
            await feeds.stop()


async def until_lost(picker: Picker, pools: set[str]) -> None:
    await until(lambda: picker.lost == pools)


def picked(picker: Picker) -> str:
    pick = picker.pick([[1, 2, 3]], 0.0)
    assert pick is not None
    return pick.engine
