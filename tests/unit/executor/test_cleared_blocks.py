"""What one tenant has left in a block is never another's to read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvplane.errors import InvalidRequestError
from kvplane.layout import KV_BYTES
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.plan_author import (
    DEVICE,
    HOST,
    LAYOUT,
    PlanAuthor,
    drop,
    fork,
    moved,
    ref,
    set_blocks,
    span,
    tokens,
)


@pytest.fixture
def rig() -> Rig:
    """Ann's session 1 wrote 12 tokens to device blocks 0 and 1, swapped them out to host blocks 0
    and 1, and has ended. Bob's session 2 is open.
    """
    return left_by_ann()


def left_by_ann(**settings: Any) -> Rig:
    rig = Rig(**settings)
    rig.open(3, tenant="ann")
    dtype = getattr(torch, rig.executor.layout.dtype)
    rig.start(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12), session_id=3)
    for layer in (0, 1):
        part = tokens(12, seed=layer).to(dtype)
        rig.run_layer(layer, None, part, part, session_id=3)
    rig.run(2, *moved(1, [ref(0), ref(1)], [ref(0, 1, HOST), ref(1, 1, HOST)]), session_id=3)
    rig.fence(3)
    rig.open(2, tenant="bob")
    for tier in (rig.executor.pools.device_tier, rig.executor.pools.host_tier):
        assert bool(tier[:2].view(torch.uint8).any())
    return rig


def read(rig: Rig, session_id: int, sequence_id: int, num_blocks: int) -> torch.Tensor:
    return rig.stored(session_id, sequence_id, num_blocks).view(torch.uint8)


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_another_tenant_reads_zeros_before_it_has_written(rig: Rig, tier: Any) -> None:
    rig.run(1, set_blocks(1, [(1, 2), (0, 2), (3, 1)], tier=tier), session_id=2)
    assert not bool(read(rig, 2, 1, 3).any())
    assert rig.executor.counters.num_cleared_blocks == 2, "block 3 was nobody's"


@pytest.mark.parametrize("kv_dtype", KV_BYTES)
def test_numbers_of_any_type_are_cleared(kv_dtype: str) -> None:
    dtype = "float32" if KV_BYTES[kv_dtype] == 1 else kv_dtype
    rig = left_by_ann(layout=replace(LAYOUT, dtype=dtype, kv_dtype=kv_dtype))
    rig.run(1, set_blocks(1, [(1, 2), (0, 2)]), session_id=2)
    assert not bool(read(rig, 2, 1, 2).any())


def test_blocks_that_stay_with_a_tenant_are_not_cleared(rig: Rig) -> None:
    rig.open(4, tenant="ann")
    rig.run(1, set_blocks(1, [(0, 2), (1, 2)]), session_id=4)
    assert bool(read(rig, 4, 1, 2).any())
    rig.run(2, drop(1), set_blocks(2, [(0, 3)]), fork(3, 2, 1), session_id=4)
    assert rig.executor.counters.num_cleared_blocks == 0


def test_a_refused_plan_clears_nothing_and_its_blocks_stay_anothers(rig: Rig) -> None:
    with rig.refuses(InvalidRequestError):
        rig.start(1, set_blocks(1, [(0, 2)]), span(1, 0, 99), session_id=2)
    rig.run(1, set_blocks(1, [(0, 2)]), session_id=2)
    assert not bool(read(rig, 2, 1, 1).any())


def test_a_tenant_is_remembered_over_a_new_control_plane(rig: Rig) -> None:
    rig.author = PlanAuthor(rig.executor.epoch, incarnation=2)
    rig.executor.install(2, rig.author.key)
    rig.open(1, tenant="bob")
    rig.run(1, set_blocks(1, [(0, 2), (1, 2)]))
    assert not bool(read(rig, 1, 1, 2).any())
