"""The block tables: their integrity check finds what is wrong, and what fails is undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from data_plane.plans.tables.block_tables import BlockTables, Table
from kvplane.errors import InternalError
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import BLOCK_SIZE, DEVICE, HOST, publications


def table(tier: pb.Tier, *blocks: tuple[int, int]) -> Table:
    """Of (index, generation) pairs."""
    indices = np.array([index for index, _ in blocks], np.int32)
    return Table(tier, indices, np.array([generation for _, generation in blocks], np.int64))


def trimmed(*blocks: tuple[int, int], by: int) -> Table:
    return replace(table(DEVICE, *blocks), num_trimmed=by)


def put(tables: BlockTables, session_id: int, sequence_id: int, made: Table) -> None:
    tables.put(session_id, sequence_id, made)
    tables.add_references(made.tier_key, {made: 1})


def sound_tables() -> BlockTables:
    """Two sessions; block 1 is shared between two sequences of the first; block 0 is published."""
    made = BlockTables({DEVICE: 4, HOST: 2}, BLOCK_SIZE)
    made.allocate(DEVICE, np.arange(4), np.arange(1, 5))
    put(made, 1, 1, table(DEVICE, (0, 1), (1, 2)))
    put(made, 1, 2, table(DEVICE, (1, 2)))
    put(made, 2, 1, table(DEVICE, (3, 4)))
    present = made.generations[DEVICE]
    assert made.publications[0].keep(publications((0, 1)), present, "publications") == 1
    return made


def state_of(tables: BlockTables) -> list[object]:
    """All that is known, in a form that can be compared."""
    counts = [*tables.ref_counts.values(), *tables.stale_counts.values()]
    arrays = [*tables.generations.values(), *counts]
    published = [p.SerializeToString() for p in tables.publications[0].report(arrays[0], 9)]
    kept = {
        (session_id, sequence_id): (made.tier_key, made.blocks.tolist(), made.generations.tolist())
        for session_id in tables.session_ids()
        for sequence_id, made in tables.of_session(session_id).items()
    }
    return [*(array.tolist() for array in arrays), published, kept]


def test_sound_tables_pass() -> None:
    made = sound_tables()
    made.check_integrity()
    assert made.ref_counts[DEVICE].tolist() == [1, 2, 0, 1]
    made.drop_session(2)
    made.check_integrity()
    assert (made.num_sequences, made.ref_counts[DEVICE][3]) == (2, 0)
    made.drop_all()
    made.check_integrity()
    assert made.num_sequences == 0
    assert len(made.publications[0]) == 1


def test_an_entry_without_a_block_refers_to_none() -> None:
    made = BlockTables({DEVICE: 4, HOST: 2}, BLOCK_SIZE)
    made.allocate(DEVICE, np.arange(4), np.arange(1, 5))
    with_holes = replace(table(DEVICE, (0, 0), (2, 3), (0, 0)), has_holes=True)
    put(made, 1, 1, with_holes)
    assert made.ref_counts[DEVICE].tolist() == [0, 0, 1, 0]
    assert not made.stale_counts[DEVICE].any()
    assert made.first_stale([with_holes]) is None
    made.check_integrity()


SPOILERS: dict[str, Callable[[BlockTables], object]] = {
    "a block more": lambda t: t.put(1, 1, table(DEVICE, (0, 1), (1, 2), (2, 3))),
    "another block": lambda t: t.put(1, 1, table(DEVICE, (3, 4), (1, 2))),
    "no such block": lambda t: t.put(1, 1, table(DEVICE, (99, 1), (1, 2))),
    "another generation": lambda t: t.put(1, 1, table(DEVICE, (0, 7), (1, 2))),
    "another tier": lambda t: t.put(1, 2, table(HOST, (1, 2))),
    "a table less": lambda t: t.put(1, 2, None),
    "a session without tables": lambda t: t._tables.update({(3, 0): {}}),
    "columns of unequal length": lambda t: t.put(
        1, 2, Table(DEVICE, np.ones(1, np.int32), np.full(2, 2))
    ),
    "a reference too many": lambda t: t.add_references(DEVICE, {table(DEVICE, (2, 3)): 1}),
    "a generation to come": lambda t: t.generations[DEVICE].__setitem__(3, 3),
    "an entry that became stale unnoticed": lambda t: t.generations[DEVICE].__setitem__(3, 9),
    "a trimmed entry with a block": lambda t: t.put(1, 1, trimmed((0, 1), (1, 2), by=1)),
    "a table trimmed by too much": lambda t: t.put(1, 2, trimmed((0, 0), by=2)),
    "a publication of a block never allocated": lambda t: (
        t.put(1, 1, table(DEVICE, (1, 2))),
        t.add_references(DEVICE, {table(DEVICE, (0, 1)): -1}),
        t.generations[DEVICE].__setitem__(0, 0),
    ),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_the_check_finds(name: str) -> None:
    made = sound_tables()
    SPOILERS[name](made)
    with pytest.raises(InternalError):
        made.check_integrity()


def test_a_transaction_that_fails_is_undone_and_one_that_does_not_stays() -> None:
    made = sound_tables()
    before = state_of(made)
    with pytest.raises(ZeroDivisionError), made.transaction():
        made.allocate(DEVICE, np.array([0, 2, 2]), np.array([50, 51, 52]))
        made.add_references(DEVICE, {made.of_session(1)[1]: -1})
        made.put(1, 1, None)
        put(made, 3, 9, table(HOST, (1, 7)))
        put(made, 2, 1, table(DEVICE, (3, 4), (0, 50), (0, 50)))
        put(made, 2, 1, table(DEVICE, (3, 4)))
        raise ZeroDivisionError
    made.check_integrity()
    assert state_of(made) == before
    with made.transaction():
        made.add_references(DEVICE, {made.of_session(1)[1]: -1})
        made.put(1, 1, None)
        made.allocate(DEVICE, np.array([0]), np.array([50]))
    made.check_integrity()
    assert made.generations[DEVICE][0] == 50
    assert not len(made.publications[0])


def test_entries_of_a_block_allocated_again_are_stale_until_they_are_removed() -> None:
    made = sound_tables()
    first, second, other = *made.of_session(1).values(), made.of_session(2)[1]
    assert made.first_stale([first, second]) is None
    made.allocate(DEVICE, np.array([1]), np.array([7]))
    put(made, 3, 1, table(DEVICE, (1, 7)))
    made.check_integrity()
    assert (made.ref_counts[DEVICE][1], made.stale_counts[DEVICE][1]) == (1, 2)
    assert made.first_stale([made.of_session(3)[1], other, second, first]) == 2
    assert made.first_stale([first.part(0, 1), other]) is None
    made.drop_session(1)
    made.check_integrity()
    assert made.first_stale([first]) is None, "nothing is counted, so nothing is looked for"
    assert made.ref_counts[DEVICE].tolist() == [0, 1, 0, 1]


def test_a_trimmed_entry_refers_to_no_block() -> None:
    made = sound_tables()
    put(made, 4, 1, trimmed((0, 0), (0, 0), (2, 3), by=2))
    made.check_integrity()
    assert made.ref_counts[DEVICE].tolist() == [1, 2, 1, 1]
    made.allocate(DEVICE, np.array([0]), np.array([9]))
    assert made.first_stale([made.of_session(4)[1]]) is None
    made.drop_session(4)
    made.check_integrity()


def test_scopes_of_which_nothing_is_published_are_forgotten() -> None:
    made = sound_tables()
    present = made.generations[DEVICE]
    for tenant in range(1000):
        message = publications((1, 2))
        message.tenant = str(tenant)
        made.publications[0].keep(message, present, "publications")
    assert len(made.publications[0]._scopes) <= 65
    kept = {p.tenant for p in made.publications[0].report(present, 9)}
    assert kept == {"default", "999"}
