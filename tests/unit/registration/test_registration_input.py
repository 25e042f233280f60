"""Hellos and reports that can not be are refused whole, by the names of their fields.

Which columns can be read is the native core's: see ``tests/unit/blocks/test_rebuilding.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvplane import LayerGroup
from kvplane.errors import InvalidRequestError
from kvplane.wire import columns
from kvplane.wire.columns import INT32
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_model import World
from tests.helpers.planning.registration_messages import LAYOUT, chain, half, publications
from tests.helpers.refusals import refused


def columns_of(prefixes: Any, **changes: Any) -> rpb.BlockReport:
    return rpb.BlockReport(publications=[publications(prefixes, **changes)])


def device(**columns_: bytes) -> rpb.BlockReport:
    return rpb.BlockReport(blocks=[tpb.Blocks(tier=tpb.TIER_DEVICE, **columns_)])


PREFIXES = chain(range(24), [(4, 2), (5, 2)])
ONE = columns.pack(INT32, [1])
LONG = bytes(8)
HELD = tpb.Blocks(tier=tpb.TIER_HOST, indices=ONE, generations=b"\x09" + bytes(7))


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (rpb.BlockReport(blocks=[tpb.Blocks(indices=ONE)]), "blocks[0].tier"),
        (rpb.BlockReport(blocks=[tpb.Blocks(tier=9)]), "blocks[0].tier"),  # type: ignore[arg-type]
        (rpb.BlockReport(blocks=[tpb.Blocks(group=1, tier=tpb.TIER_HOST)]), "blocks[0].group"),
        (rpb.BlockReport(blocks=[HELD, tpb.Blocks()]), "blocks[1].tier"),
        (device(indices=ONE[:3]), "blocks[0].indices"),
        (
            device(indices=columns.pack(INT32, [1, 16]), generations=LONG * 2),
            "blocks[0].indices[1]",
        ),
        (device(indices=bytes(4 * 17)), "blocks[0].indices"),
        (device(indices=ONE, generations=LONG[:7]), "blocks[0].generations"),
        (columns_of(PREFIXES, group=1), "publications[0].group"),
        (columns_of(PREFIXES, hash_algorithm=""), "publications[0].hash_algorithm"),
        (columns_of(PREFIXES, namespace="x" * 129), "publications[0].namespace"),
        (columns_of(PREFIXES, indices=bytes(4 * 17)), "publications[0].indices"),
        (columns_of(PREFIXES, parent_generations=LONG), "publications[0].parent_generations"),
        (columns_of(PREFIXES, token_ids=b"\xff" * 64), "publications[0].token_ids[0]"),
    ],
)
def test_a_report_that_can_not_be_is_refused_whole_by_the_name_of_its_column(
    part: rpb.BlockReport, field: str
) -> None:
    world = World(0)
    plane = Plane(world)
    plane.register()
    part.blocks.append(HELD)
    part.last = True
    with refused(InvalidRequestError, f"report.{field}"):
        plane.report(part)
    plane.report()
    assert not any(world.generations(tpb.TIER_HOST)), "a part of the refused report counts"


TWO_GROUPS = replace(
    LAYOUT,
    groups=(LayerGroup("full", (0,), 2, 8), LayerGroup("window", (1,), 1, 16, 12)),
).to_proto()
GROUP = rpb.GroupBlocks(num_device_blocks=16, num_host_blocks=8)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"pool_id": ""}, "pool_id"),
        ({"pool_id": "x" * 129}, "pool_id"),
        ({"address": ""}, "address"),
        ({"address": "h" * 513}, "address"),
        ({"epoch": 0}, "epoch"),
        ({"key_id": b"short"}, "key_id"),
        ({"num_device_blocks": 0}, "num_device_blocks"),
        ({"num_device_blocks": 2**24 + 1}, "num_device_blocks"),
        ({"num_host_blocks": -1}, "num_host_blocks"),
        ({"layout": tpb.Layout()}, "layout.dtype"),
        ({"layout": tpb.Layout(dtype=1, kv_dtype=1, model_id="m")}, "layout.block_size_tokens"),
        ({"shard": tpb.Shard()}, "shard.num_shards"),
        ({"shard": tpb.Shard(num_shards=2000)}, "shard.num_shards"),
        ({"shard": half(2)}, "shard.index"),
        ({"shard": half(-1)}, "shard.index"),
        ({"version": ""}, "version"),
        ({"version": "x" * 129}, "version"),
        ({"oldest_payload_version": 0}, "oldest_payload_version"),
        ({"oldest_payload_version": 3, "newest_payload_version": 2}, "newest_payload_version"),
        ({"layout": TWO_GROUPS}, "groups"),
        ({"layout": TWO_GROUPS, "groups": [GROUP]}, "groups"),
        (
            {"layout": TWO_GROUPS, "groups": [GROUP, rpb.GroupBlocks()]},
            "groups[1].num_device_blocks",
        ),
        (
            {
                "layout": TWO_GROUPS,
                "groups": [GROUP, GROUP],
                "shard": tpb.Shard(num_shards=1, num_layers=1, num_kv_heads=2),
            },
            "shard.first_layer",
        ),
        ({"shard": tpb.Shard(num_shards=1, num_kv_heads=2)}, "shard.num_layers"),
        (
            {"shard": tpb.Shard(num_shards=1, first_layer=2, num_layers=1, num_kv_heads=2)},
            "shard.first_layer",
        ),
        ({"shard": tpb.Shard(num_shards=1, num_layers=2, num_kv_heads=3)}, "shard.num_kv_heads"),
        (
            {"shard": tpb.Shard(num_shards=1, num_layers=2, first_kv_head=-(2**31))},
            "shard.first_kv_head",
        ),
    ],
)
def test_a_hello_is_refused_by_the_name_of_its_field(fields: dict[str, Any], field: str) -> None:
    world = World(0)
    with refused(InvalidRequestError, f"hello.{field}"):
        Plane(world, **fields).register()
    assert world.core.pool_ids() == []


def unserved(**group: Any) -> tpb.Layout:
    layout = LAYOUT.to_proto()
    layout.groups[0].MergeFrom(tpb.LayerGroup(**group))
    return layout


def of_a_later_release() -> tpb.Layout:
    layout = tpb.Layout.FromString(LAYOUT.to_proto().SerializeToString() + b"\x98\x06\x01")
    assert layout.fingerprint == LAYOUT.fingerprint
    return layout


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (unserved(cache_kind=tpb.CACHE_KIND_STATE), "layout.groups[0]"),
        (unserved(cache_kind=tpb.CACHE_KIND_LATENT), "layout.groups[0].num_kv_heads"),
        (unserved(value_head_size=520), "layout.groups[0].value_head_size"),
        (of_a_later_release(), "layout"),
    ],
)
def test_a_layout_that_is_not_served_is_refused(layout: tpb.Layout, field: str) -> None:
    with refused(InvalidRequestError, f"hello.{field}"):
        Plane(World(0), layout=layout).register()
