"""The resident tables: their integrity check finds what is wrong, and what fails is undone."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from plan_author import BLOCK_SIZE, DEVICE, HOST, publication

from data_plane.plans.block_tables import ResidentTables, Table
from kvplane.errors import InternalError


def tables() -> ResidentTables:
    """Two sessions; block 1 is shared between two sequences of the first; block 0 is published."""
    made = ResidentTables({DEVICE: 4, HOST: 2}, BLOCK_SIZE)
    for index in range(4):
        made.hand_out(DEVICE, index, index + 1)
    made.put(1, 1, Table(DEVICE, array("q", [0, 1]), array("q", [1, 2])))
    made.put(1, 2, Table(DEVICE, array("q", [1]), array("q", [2])))
    made.put(2, 1, Table(DEVICE, array("q", [3]), array("q", [4])))
    assert made.publish(publication(0, 1), "publication")
    return made


def test_sound_tables_pass() -> None:
    made = tables()
    made.check_integrity()
    assert made.num_names(DEVICE, 1) == 2
    made.drop(1, 2)
    assert made.num_names(DEVICE, 1) == 1
    made.drop_session(2)
    made.check_integrity()
    assert (made.num_sequences, made.num_names(DEVICE, 3)) == (1, 0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t._tables[1][1].blocks.append(2),
        lambda t: t._tables[1][1].blocks.__setitem__(0, 3),
        lambda t: t._tables[1][1].blocks.__setitem__(0, 99),
        lambda t: t._tables[1][1].generations.__setitem__(0, 7),
        lambda t: t._tables[1].pop(2),
        lambda t: t._names[DEVICE, 1].update({2: 1}),
        lambda t: t._generations[DEVICE].__setitem__(3, 9),
        lambda t: t._generations[DEVICE].__setitem__(0, 0),
        lambda t: t.publications.update({2: publication(1, 2)}),
    ],
)
def test_the_check_finds(spoil: Callable[[ResidentTables], object]) -> None:
    made = tables()
    spoil(made)
    with pytest.raises(InternalError):
        made.check_integrity()


def test_a_transaction_that_fails_is_undone_and_one_that_does_not_stays() -> None:
    made = tables()
    before = list(made.report())
    with pytest.raises(ZeroDivisionError), made.transaction():
        made.hand_out(DEVICE, 0, 50)
        made.drop(1, 1)
        made.put(3, 9, Table(HOST))
        made.splice(2, 1, 1, array("q", [0]), array("q", [50]))
        raise ZeroDivisionError
    made.check_integrity()
    assert list(made.report()) == before
    assert made.find(3, 9) is None
    assert list(made.get(2, 1, "").blocks) == [3]
    with made.transaction():
        made.drop(1, 1)
        made.hand_out(DEVICE, 0, 50)
    made.check_integrity()
    assert made.generation(DEVICE, 0) == 50
    assert not made.publications
