"""Which blocks are cleared before another tenant gets them, against a dict of last tenants."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from plan_author import DEVICE, HOST

from data_plane.plans.last_tenants import LastTenants
from data_plane.plans.table_changes import Allocated, AllocatedBlocks
from data_plane.plans.transfers import TransferEnds, Transfers
from kvplane.v1 import types_pb2 as pb

NUM_BLOCKS = {DEVICE: 4, HOST: 2}
Block = tuple["pb.Tier", int]
BLOCKS = [(tier, block) for tier, num in NUM_BLOCKS.items() for block in range(num)]
PLANS = st.tuples(
    st.sampled_from(["ann", "bob", ""]),
    st.lists(st.sampled_from(BLOCKS), max_size=4),
    st.lists(st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS)), max_size=3),
)


def int64(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def allocated_of(blocks: list[Block]) -> AllocatedBlocks:
    """As a plan's changes allocate them; one may come twice."""
    of_tier = {tier: [b for t, b in blocks if t == tier] for tier in NUM_BLOCKS}
    return {
        tier: Allocated(int64(new), int64([1] * len(new)), int64([0] * len(new)))
        for tier, new in of_tier.items()
        if new
    }


def transfers_of(pairs: list[tuple[Block, Block]]) -> Transfers:
    ends = [
        TransferEnds(
            int64([pair[end][0] for pair in pairs]),
            int64([pair[end][1] for pair in pairs]),
            int64([1] * len(pairs)),
        )
        for end in (0, 1)
    ]
    return Transfers(*ends)


@given(st.lists(PLANS, max_size=8))
def test_what_another_tenant_had_last_is_cleared_unless_a_transfer_fills_it(
    plans: list[tuple[str, list[Block], list[tuple[Block, Block]]]],
) -> None:
    tenants, last = LastTenants(NUM_BLOCKS), dict[Block, str]()
    for tenant, blocks, pairs in plans:
        allocated = allocated_of(blocks)
        found = tenants.to_clear(tenant, allocated, transfers_of(pairs))
        read, filled = ({pair[end] for pair in pairs} for end in (0, 1))
        want = {
            block
            for block in blocks
            if last.get(block, tenant) != tenant and (block not in filled or block in read)
        }
        got = [(tier, int(block)) for tier, of_tier in found.items() for block in of_tier]
        assert sorted(got) == sorted(want)
        assert all(len(of_tier) for of_tier in found.values())
        tenants.take_over(tenant, allocated)
        last |= dict.fromkeys(blocks, tenant)


def test_blocks_are_anothers_until_they_are_taken_over() -> None:
    tenants, blocks = LastTenants(NUM_BLOCKS), allocated_of([(DEVICE, 3)])
    tenants.take_over("ann", blocks)
    for _ in range(2):
        assert list(tenants.to_clear("bob", blocks, transfers_of([]))) == [DEVICE]
    tenants.take_over("bob", blocks)
    assert tenants.to_clear("bob", blocks, transfers_of([])) == {}


def test_two_processes_know_a_tenant_by_two_digests() -> None:
    """So that nobody can look for tenants that collide."""
    first, second = (LastTenants(NUM_BLOCKS)._digest("ann") for _ in range(2))
    assert first != second
