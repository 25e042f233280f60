"""Which blocks are cleared before another tenant gets them, against a dict of last tenants."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from data_plane.plans.batches.transfers import TransferEnds, Transfers
from data_plane.plans.contents.last_tenants import LastTenants
from data_plane.plans.tables.allocations import Allocated, AllocatedBlocks
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import DEVICE, HOST

NUM_BLOCKS = {DEVICE: 4, HOST: 2}
Block = tuple["pb.Tier", int]
BLOCKS = [(tier, block) for tier, num in NUM_BLOCKS.items() for block in range(num)]
PLANS = st.tuples(
    st.sampled_from(["ann", "bob", ""]),
    st.lists(st.sampled_from(BLOCKS), unique=True, max_size=4),
    st.lists(
        st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS), st.booleans()), max_size=4
    ),
)


class Move(NamedTuple):
    """A transfer. ``is_former``: it reads its source as it was before the plan allocated it."""

    source: Block
    destination: Block
    is_former: bool


def int64(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def allocated_of(blocks: list[Block]) -> AllocatedBlocks:
    """As a plan allocates them: their generations were 1 and are 2."""
    of_tier = {tier: sorted(b for t, b in blocks if t == tier) for tier in NUM_BLOCKS}
    return {
        tier: Allocated(int64(new), int64([2] * len(new)), int64([1] * len(new)))
        for tier, new in of_tier.items()
        if new
    }


def transfers_of(moves: list[Move], blocks: list[Block]) -> Transfers:
    generations = [1 if m.is_former or m.source not in blocks else 2 for m in moves]
    sources = int64([m.source[0] for m in moves]), int64([m.source[1] for m in moves])
    ends = int64([m.destination[0] for m in moves]), int64([m.destination[1] for m in moves])
    return Transfers(
        TransferEnds(*sources, int64(generations)), TransferEnds(*ends, int64([2] * len(moves)))
    )


def moves_of(blocks: list[Block], drawn: list[tuple[Block, Block, bool]]) -> list[Move]:
    """Those of the drawn ones that a plan may have, which allocates ``blocks``."""
    moves: list[Move] = []
    for source, destination, is_former in drawn:
        was_written = any(m.destination == source for m in moves)
        was_saved = any(m.source == source and m.is_former for m in moves)
        is_former &= source in blocks
        if destination not in blocks or source == destination:
            continue
        if was_written if is_former else was_saved and not was_written:
            continue
        moves.append(Move(source, destination, is_former))
    saved = {m.source for m in moves if m.is_former}
    return [
        m
        for i, m in enumerate(moves)
        if m.is_former
        or m.source not in saved
        or any(before.destination == m.source for before in moves[:i])
    ]


FIRST, SECOND, THIRD = ((DEVICE, block) for block in range(3))
# Ann's plan reads a block of Bob's before it fills it.
READ_FIRST = [(FIRST, SECOND, False), (THIRD, FIRST, False)]
ON_HOST = HOST, 1
COPIED_TWICE = [(FIRST, ON_HOST, False), (ON_HOST, SECOND, False)]
SAVED = [(FIRST, ON_HOST, True)]


@given(st.lists(PLANS, max_size=8))
@example([("bob", [FIRST], []), ("ann", [FIRST, SECOND], READ_FIRST)])
@example(
    [
        ("ann", [FIRST], []),
        ("bob", [ON_HOST, SECOND, THIRD], COPIED_TWICE),
        ("bob", [ON_HOST, SECOND, THIRD], []),
    ]
)
@example([("ann", [FIRST], []), ("bob", [FIRST, ON_HOST], SAVED)])
def test_no_tenant_is_given_what_another_left_and_copies_stay_their_tenants(
    plans: list[tuple[str, list[Block], list[tuple[Block, Block, bool]]]],
) -> None:
    """``data``: whose data each block really holds."""
    tenants, data = LastTenants(NUM_BLOCKS), dict[Block, str]()
    for tenant, blocks, drawn in plans:
        moves = moves_of(blocks, drawn)
        allocated, transfers = allocated_of(blocks), transfers_of(moves, blocks)
        before, after = tenants.to_clear(tenant, allocated, transfers)
        was = dict(data)
        for clear in (before, after):
            cleared = [(tier, int(b)) for tier, of_tier in clear.items() for b in of_tier]
            assert all(len(of_tier) for of_tier in clear.values())
            assert all(data.get(block, tenant) != tenant for block in cleared), "for nothing"
            for block in cleared:
                data.pop(block)
            if clear is before:
                for i, (source, destination, is_former) in enumerate(moves):
                    assert not is_former or data.get(source) == was.get(source), "lost"
                    is_own = source not in blocks or is_former
                    assert (
                        is_own
                        or data.get(source, tenant) == tenant
                        or any(m.destination == source for m in moves[:i])
                    ), "another's data was copied as the tenant's"
                    data[destination] = data.get(source, tenant)
        filled = {m.destination for m in moves}
        for block in blocks:
            if block not in filled:
                assert data.get(block, tenant) == tenant
                data[block] = tenant
        tenants.take_over(tenant, allocated, transfers)


def test_two_processes_know_a_tenant_by_two_digests() -> None:
    """So that nobody can look for tenants that collide."""
    first, second = (LastTenants(NUM_BLOCKS)._digest("ann") for _ in range(2))
    assert first != second
