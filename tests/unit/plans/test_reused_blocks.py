"""Which prefixes sequences find, as the changes of plans say it."""

from __future__ import annotations

import pytest

from data_plane.plans.batches.transfers import Transfers
from data_plane.plans.contents import reused_blocks
from data_plane.plans.contents.reused_blocks import ReusedBlocks
from data_plane.plans.tables.block_tables import BlockTables
from data_plane.tier_keys import tier_key_of
from kvplane.wire import columns
from kvplane.wire.plane.v1 import plan_pb2
from tests.helpers.data.plan_author import (
    BLOCK_SIZE,
    DEVICE,
    HOST,
    Change,
    Transfer,
    fork,
    pack_changes,
    pack_transfers,
    publications,
    ref,
    set_blocks,
    transfer,
)

NUM_BLOCKS = {DEVICE: 16, HOST: 8}
A, B, C, D = (1, 1), (2, 1), (3, 1), (4, 1)


class Rig:
    """Blocks 1 to 4 of the device tier have generation 1."""

    def __init__(
        self,
        *published: tuple[int, int],
        num_blocks: dict[int, int] = NUM_BLOCKS,
        state_group: int | None = None,
        num_uses: int = 2,
    ) -> None:
        self.num_calls = 0
        self.tables = BlockTables(num_blocks, BLOCK_SIZE, state_group)
        self.tables.generations[DEVICE][1:5] = 1
        self.reused = ReusedBlocks(self.tables, self._call, num_uses)
        self.publish(*published)

    def publish(self, *blocks: tuple[int, int]) -> None:
        present = self.tables.generations[DEVICE]
        self.tables.publications[0].keep(publications(*blocks), present, "publications")
        self.reused.published()

    def note(self, *changes: Change, transfers: tuple[Transfer, ...] = (), resync=False) -> None:
        packed = pack_transfers(transfers)
        plan = plan_pb2.Plan(changes=pack_changes(changes), transfers=packed, resync=resync)
        self.reused.note(plan, Transfers.read(NUM_BLOCKS, packed))

    def take(self) -> list[list[tuple[int, int]]]:
        return [
            list(zip(each.blocks.tolist(), each.generations.tolist(), strict=True))
            for each in self.reused.take()
        ]

    def _call(self) -> None:
        self.num_calls += 1


def found(sequence_id: int, *blocks: tuple[int, int], new: int = 0) -> Change:
    """A table of which the last ``new`` blocks are allocated."""
    flags = [False] * (len(blocks) - new) + [True] * new
    return set_blocks(sequence_id, blocks, allocated=flags)


def test_what_a_new_sequence_finds_is_told_once_with_its_tokens() -> None:
    rig = Rig(A, B)
    rig.note(set_blocks(7, [(9, 1)]), found(1, A, B, D, new=1), found(2, A))
    assert rig.num_calls == 2
    prefix, other = rig.reused.take()
    assert (prefix.tenant, prefix.namespace) == ("default", "")
    assert prefix.token_ids == columns.pack(columns.INT32, [1] * BLOCK_SIZE + [2] * BLOCK_SIZE)
    assert (prefix.blocks.tolist(), other.blocks.tolist()) == ([1, 2], [1])
    assert rig.take() == []


def test_what_is_computed_or_moved_is_not_told() -> None:
    rig = Rig(A, B, C)
    rig.note(set_blocks(1, [A, B]))  # allocated
    rig.note(set_blocks(1, [C], first_block=2, allocated=False))  # a table grows
    rig.note(set_blocks(1, [A, B], allocated=False, replace=True))  # swapped in
    rig.note(set_blocks(1, [(0, 1)], allocated=False, tier=HOST))
    rig.note(found(1, A), resync=True)  # whole tables after an abort
    rig.note(fork(3, 1, 2))
    rig.note()
    assert (rig.num_calls, rig.take()) == (0, [])


def test_what_is_not_published_yet_is_waited_for() -> None:
    rig = Rig(A)
    rig.note(found(1, A, B))
    assert rig.take() == []
    calls = rig.num_calls
    rig.publish(A, B)
    assert rig.num_calls == calls + 1
    assert rig.take() == [[A, B]]


def test_what_comes_from_the_host_tier_is_told_when_it_is_published_again() -> None:
    rig = Rig(A)
    up = transfer(ref(3, tier=HOST), ref(2))
    rig.note(found(1, A, B, C, new=2), transfers=(up,))
    assert rig.take() == []
    rig.publish(A, B)
    assert rig.take() == [[A, B]]


def test_what_was_allocated_again_ends_the_prefix() -> None:
    rig = Rig(A, B)
    rig.note(found(1, A, B))
    rig.tables.generations[DEVICE][2] = 5
    assert rig.take() == [[A]]
    rig.note(found(1, A))
    rig.tables.generations[DEVICE][1] = 5
    assert rig.take() == []


def test_what_a_tenant_forgets_drops_what_it_reused_alone() -> None:
    rig = Rig(A, B)
    rig.note(found(1, A, B), found(2, A, D))
    calls = rig.num_calls
    rig.reused.drop("another")
    assert rig.num_calls > calls
    assert rig.take() == [[A, B]]  # the other one waits as before
    for tenant in ("default", None):
        rig.note(found(3, A))
        rig.reused.drop(tenant)
        assert rig.take() == []


@pytest.mark.parametrize("num_uses", [1, 2])
def test_where_states_are_kept_a_prefix_ends_at_its_deepest_checkpoint(num_uses: int) -> None:
    device = tier_key_of(1, DEVICE)
    rig = Rig(A, B, C, num_blocks={**NUM_BLOCKS, device: 8}, state_group=1, num_uses=num_uses)
    present = rig.tables.generations[device]
    present[:] = 6

    def keep(block: int, *parent: int) -> None:
        """Publish a checkpoint in a block."""
        message = publications((block, 6))
        message.group = 1
        message.parent_indices = columns.pack(columns.INT32, parent[:1])
        message.parent_generations = columns.pack(columns.INT64, parent[1:])
        rig.tables.publications[1].keep(message, present, "publications")

    def note() -> None:
        states = set_blocks(1, [(0, 0), (5, 6)], allocated=False, group=1)
        rig.note(found(1, A, B, C), states)

    note()
    keep(7, 3, 2)  # of a block that was there before C
    assert rig.reused.take() == []
    keep(4, *B)
    note()
    taken = [each for _ in range(8) for each in rig.reused.take()]
    assert [each.blocks.tolist() for each in taken] == [[1, 2]] * 2
    assert [each.checkpoints for each in taken] == [{1: (4, 6)}] * 2
    keep(5, *C)
    note()
    (whole,) = rig.reused.take()
    assert (whole.blocks.tolist(), whole.checkpoints) == ([1, 2, 3], {1: (4, 6), 2: (5, 6)})


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reused_blocks, "MAX_NOTED", 2)
    monkeypatch.setattr(reused_blocks, "_MOST_LOOKS", 3)
    rig = Rig(A, B)
    rig.note(found(1, A), found(2, B), found(3, A, B))
    assert rig.reused.num_dropped == 1
    assert rig.take() == [[B], [A, B]]
    rig.note(found(1, A, D))  # never published, as after an abort
    assert [rig.take() for _ in range(4)] == [[], [], [[A]], []]
