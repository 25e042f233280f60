"""Pools of two layer groups: each operation is done in both groups or in neither."""

from __future__ import annotations

import grpc.aio
import pytest

from kvplane import LayerGroup, Layout, ops
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.operations_world import DEVICE, HOST, World, plan_of, prompt

WINDOW = 12
TWO_GROUPS = Layout(
    "test-model",
    8,
    "float32",
    "float32",
    (LayerGroup("full", (0,), 2, 8), LayerGroup("window", (1,), 1, 16, WINDOW)),
)
HELLO = {
    "shard": tpb.Shard(num_shards=1, num_layers=2, num_kv_heads=2),
    "groups": [
        rpb.GroupBlocks(num_device_blocks=16, num_host_blocks=8),
        rpb.GroupBlocks(num_device_blocks=8, num_host_blocks=6),
    ],
}


@pytest.fixture
async def world(start_world) -> World:
    return await start_world(TWO_GROUPS, hello=HELLO)


async def held(world: World, tier: int = DEVICE) -> list[int]:
    return [(await world.usage(tier, group))["held"] for group in (0, 1)]


async def test_each_group_has_tables_of_its_own(world, caller) -> None:
    result = await caller.do(ops.admit(1, prompt(3)))
    assert result.results[0].admit.num_blocks == 4
    assert plan_of(result).changes.groups == bytes([0, 1])
    assert await held(world) == [4, 4]
    tables = await caller.session.get_block_table(1)
    assert [table.group for table in tables] == [0, 1]


async def test_sequences_move_in_both_groups(world, caller) -> None:
    await caller.admit(1, prompt(3))
    moved = await caller.do(ops.swap([1], "host"))
    assert moved.results[0].num_swapped_blocks == 8
    assert plan_of(moved).transfers.groups == bytes([0] * 4 + [1] * 4)
    assert (await held(world), await held(world, HOST)) == ([0, 0], [4, 4])
    await caller.do(ops.swap([1], "device"))
    assert (await held(world), await held(world, HOST)) == ([4, 4], [0, 0])


@pytest.mark.parametrize(
    ("hello", "field"),
    [
        ({}, "groups"),
        ({"groups": HELLO["groups"][:1]}, "groups"),
        ({"groups": [HELLO["groups"][0], rpb.GroupBlocks()]}, "groups[1].num_device_blocks"),
        (
            {**HELLO, "shard": tpb.Shard(num_shards=1, num_layers=1, num_kv_heads=2)},
            "shard.first_layer",
        ),
    ],
)
async def test_a_data_plane_says_what_each_group_has(start_world, hello, field) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await start_world(TWO_GROUPS, hello=hello)
    assert from_rpc_error(refused.value).field == f"hello.{field}"
