"""Copies that keep a prefix: blocks that a plan allocates for no table and fills by its transfers,
and that later plans read though no table refers to them.
"""

from __future__ import annotations

import pytest
import torch

from kvplane.errors import StaleGenerationError
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.plan_author import (
    HOST,
    drop,
    fork,
    publications,
    ref,
    set_blocks,
    span,
    transfer,
)


@pytest.fixture
def rig() -> Rig:
    """Ann's session 3 wrote 16 tokens to blocks 0 and 1, which are published, and has ended. Bob's
    session 2 and Ann's session 4 are open.
    """
    rig = Rig()
    rig.open(3, tenant="ann")
    rig.run(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 16), session_id=3)
    assert rig.executor.publish(publications((0, 1), (1, 1))) == 2
    rig.fence(3)
    rig.open(2, tenant="bob")
    rig.open(4, tenant="ann")
    return rig


def test_a_cached_block_is_kept_in_the_host_tier_and_comes_back(rig: Rig) -> None:
    device, host = rig.executor.pools.device_tier, rig.executor.pools.host_tier
    kept = device[:2].clone()
    saves = [transfer(ref(i), ref(i + 1, 1, HOST)) for i in (0, 1)]
    rig.run(1, ref(1, 1, HOST), ref(2, 1, HOST), *saves, session_id=2)
    assert torch.equal(host[1:3], kept)
    back = [transfer(ref(i + 1, 1, HOST), ref(i + 4)) for i in (0, 1)]
    rig.run(1, set_blocks(1, [(4, 1), (5, 1)]), *back, session_id=4)
    assert torch.equal(rig.stored(4, 1, 2), kept.transpose(0, 1))
    assert rig.executor.blocks.num_published == 2, "they are where they were as well"


def test_what_is_evicted_is_saved_by_the_plan_that_takes_its_block(rig: Rig) -> None:
    """The block is another tenant's, so it is cleared, but not before it was read."""
    kept = rig.executor.pools.device_tier[0].clone()
    rig.run(
        1, set_blocks(1, [(0, 2)]), ref(3, 1, HOST), transfer(ref(0), ref(3, 1, HOST)), session_id=2
    )
    assert torch.equal(rig.executor.pools.host_tier[3], kept)
    assert not bool(rig.stored(2, 1, 1).any())
    assert rig.executor.blocks.num_published == 1


def test_a_block_is_saved_filled_and_read_again_by_one_plan(rig: Rig) -> None:
    first, second = rig.executor.pools.device_tier[:2].clone()
    rig.run(
        1,
        set_blocks(1, [(0, 2), (4, 1)]),
        ref(3, 1, HOST),
        transfer(ref(0), ref(3, 1, HOST)),
        transfer(ref(1), ref(0, 2)),
        transfer(ref(0, 2), ref(4)),
        session_id=2,
    )
    assert torch.equal(rig.executor.pools.host_tier[3], first)
    assert torch.equal(rig.executor.pools.device_tier[4], second)
    assert torch.equal(rig.executor.pools.device_tier[0], second)


def test_what_is_allocated_for_no_table_forgets_its_publication_and_former_generation(
    rig: Rig,
) -> None:
    rig.run(1, ref(1, 2), session_id=2)
    assert rig.executor.blocks.num_published == 1
    assert rig.executor.publish(publications((1, 1))) == 0
    with rig.refuses(StaleGenerationError, "plan.changes.generations[1]"):
        rig.start(1, set_blocks(1, [(0, 1), (1, 1)], allocated=False), session_id=4)
    with rig.refuses(StaleGenerationError, "plan.allocations.generations[0]"):
        rig.start(2, ref(1, 2), session_id=2)
    assert rig.executor.publish(publications((0, 1), (1, 2))) == 2


def test_an_allocation_takes_a_block_from_another_sessions_table(rig: Rig) -> None:
    rig.run(1, set_blocks(1, [(0, 1), (1, 1)], allocated=False), fork(2, 1, 1), session_id=4)
    rig.run(1, ref(1, 2), transfer(ref(0), ref(1, 2)), session_id=2)
    with rig.refuses(StaleGenerationError, "sequence_id"):
        rig.executor.read_blocks(4, 1, range(2))
    rig.executor.read_blocks(4, 2, [0])
    rig.run(2, drop(1), session_id=4)
