"""What a session may read of its blocks: the slots that it wrote or found cached, and no others."""

from __future__ import annotations

import pytest
import torch

from data_plane.plans.batches.transfers import Transfers
from data_plane.plans.contents.written_slots import WrittenSlots
from data_plane.plans.tables.block_tables import BlockTables
from kvplane.errors import BlockNotWrittenError
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.plan_author import (
    DEVICE,
    HOST,
    forked,
    pack_transfers,
    publications,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)


def test_transfers_count_in_the_order_in_which_they_run() -> None:
    tables = BlockTables({DEVICE: 4, HOST: 0}, 8)
    tables.num_written[DEVICE][:] = 1, 2, 3, 4
    moves = [transfer(ref(0), ref(1)), transfer(ref(1), ref(2)), transfer(ref(3), ref(0))]
    transfers = Transfers.read(tables.num_blocks, pack_transfers(moves))
    written = WrittenSlots(tables)
    written.copy(transfers, written.of_sources(transfers))
    assert tables.num_written[DEVICE].tolist() == [4, 1, 1, 4]


@pytest.fixture
def rig() -> Rig:
    """Every slot of the pools has something in it that was left behind."""
    rig = Rig()
    for tier in (rig.executor.pools.device_tier, rig.executor.pools.host_tier):
        tier.fill_(1.0)
    return rig


def num_read(rig: Rig, sequence_id: int, num_blocks: int, session_id: int = 1) -> list[int]:
    """Of each block of a table, the slots that reading it shows; 0 where it is refused."""
    slots = []
    for i in range(num_blocks):
        try:
            blocks, _ = rig.executor.read_blocks(session_id, sequence_id, [i])
        except BlockNotWrittenError as error:
            assert error.field == "entries[0]"
            slots.append(0)
        else:
            shown = (blocks != 0).any(-1).flatten(0, 3)  # [layers * 2 * heads, block_size]
            assert torch.equal(shown, shown[:1].expand_as(shown))
            slots.append(int(shown[0].sum()))
    return slots


def test_only_written_slots_are_shown(rig: Rig) -> None:
    rig.run(1, set_blocks(1, [(0, 1), (1, 1), (2, 1)]), span(1, 0, 12))
    assert num_read(rig, 1, 3) == [8, 4, 0]
    rig.run(2, span(1, 12, 1))
    assert num_read(rig, 1, 3) == [8, 5, 0]


def test_entries_are_shown_as_far_as_written_in_any_order(rig: Rig) -> None:
    rig.start(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12))
    rig.layer(0, 12)
    blocks, _ = rig.executor.read_blocks(1, 1, [1, 0], first_layer=0, num_layers=1)
    shown = (blocks != 0).any(-1)[0, :, 0, 0]  # [entries, block_size]
    assert shown.sum(-1).tolist() == [4, 8]


def test_a_running_plan_shows_the_layers_that_it_has_written(rig: Rig) -> None:
    rig.start(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12))
    assert num_read(rig, 1, 2) == [0, 0]
    rig.layer(0, 12)
    rig.executor.read_blocks(1, 1, range(2), first_layer=0, num_layers=1)
    assert num_read(rig, 1, 2) == [0, 0], "the other layer is not written"
    rig.layer(1, 12)
    assert num_read(rig, 1, 2) == [8, 4]


def test_what_an_aborted_plan_wrote_is_not_shown(rig: Rig) -> None:
    rig.start(1, set_blocks(1, [(0, 1)]), span(1, 0, 3))
    rig.layer(0, 3)
    rig.run(2, set_blocks(1, [(0, 1)], allocated=False), previous=0, resync=True)
    assert num_read(rig, 1, 1) == [0]


def test_copies_and_swaps_show_what_their_sources_do(rig: Rig) -> None:
    rig.admit(1)
    rig.run(2, *forked(2, 1, 1, 1, 2))
    assert num_read(rig, 2, 2) == [8, 4]
    out = [transfer(ref(0), ref(3, 1, HOST)), transfer(ref(1), ref(0, 1, HOST))]
    moved = set_blocks(1, [(3, 1), (0, 1), (1, 1)], tier=HOST, replace=True)
    rig.run(3, moved, *out)
    assert num_read(rig, 1, 3) == [8, 4, 0]


def test_one_plan_may_save_fill_and_copy_a_block(rig: Rig) -> None:
    rig.admit(1)
    rig.run(
        2,
        set_blocks(1, [(0, 2)], replace=True),
        set_blocks(2, [(4, 1), (5, 1)]),
        ref(3, 1, HOST),
        transfer(ref(0), ref(3, 1, HOST)),
        transfer(ref(1), ref(0, 2)),
        transfer(ref(0, 2), ref(4)),
    )
    assert num_read(rig, 1, 1) == [4]
    assert num_read(rig, 2, 2) == [4, 0]


def test_a_block_that_was_taken_meanwhile_shows_nothing_to_its_next_owner(rig: Rig) -> None:
    rig.start(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12))
    for layer in (0, 1):
        rig.run_layer(layer, tokens(12, 4), tokens(12), tokens(12))
    rig.open(2)
    rig.run(1, set_blocks(1, [(1, 2)]), session_id=2)  # before the receipt of the other
    assert rig.executor.receipt(1) is not None
    assert num_read(rig, 1, 1, session_id=2) == [0]


def test_a_cached_block_is_shown_whole(rig: Rig) -> None:
    rig.admit(1, num_tokens=16)
    assert rig.executor.publish(publications((0, 1))) == 1
    rig.fence(1)
    rig.open(2)
    rig.run(1, set_blocks(1, [(0, 1)], allocated=False), set_blocks(2, [(1, 2)]), session_id=2)
    assert num_read(rig, 1, 1, session_id=2) == [8]
    assert num_read(rig, 2, 1, session_id=2) == [0]
