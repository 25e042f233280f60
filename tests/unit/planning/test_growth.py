"""What growth takes at most, and what it is told where it cannot have it yet."""

from __future__ import annotations

import pytest
from core_messages import LAYOUT
from core_model import World
from kvplane_blocks import _native

from control_plane.planning.config import CoreConfig
from control_plane.planning.sharing.growth import lacking, most_growth
from kvplane import ops
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb


@pytest.mark.parametrize(("num_tokens", "most"), [(1, 2), (40, 12)])
def test_an_append_takes_at_most_two_blocks_and_those_of_its_slots(
    num_tokens: int, most: int
) -> None:
    message = cpb.Append()
    message.CopyFrom(ops.append(1, [5] * num_tokens, num_tokens, first_position=9).append)
    assert most_growth(message, block_size_tokens=4) == most


def test_growth_that_only_a_floor_hinders_says_so() -> None:
    world = World(num_host=0, config=CoreConfig(watermark=0.0))
    world.core.set_cached_shares({"ann": 0.5})
    ann, bob = world.engine("ann"), world.engine("bob")
    ann.admit(1, range(8 * LAYOUT.block_size_tokens))
    ann.send(ops.free([1]))
    ann.settle()
    world.pump()
    [pool] = world.core._pools.values()
    slot = world.core._sessions[bob.id].slot
    wanted = {9: _native.LATER_FLOOR, 20: _native.LATER}
    for num_needed, code in wanted.items():
        assert lacking(pool.native, slot, num_needed) == (code, num_needed, 8, tpb.TIER_DEVICE)
    world.core.check_integrity()
