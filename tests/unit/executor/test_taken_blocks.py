"""A control plane may take a sequence away from a session: its blocks pass to another session by
that session's plan, before this session's next plan drops the table. Until then the table is there,
and nothing is read or written through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvplane.errors import StaleGenerationError
from tests.helpers.data.data_rig import LAYERS, Rig
from tests.helpers.data.plan_author import (
    HOST,
    drop,
    fork,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)

SPANS = "plan.spans.sequence_ids[0]"
BLOCKS = torch.ones(2, 1, 2, 2, 8, 16)


@pytest.fixture
def rig() -> Rig:
    """Session 1 wrote sequence 1 to blocks 0 and 1, and sequence 2 to blocks 2 and 3; a plan of
    session 2 has taken block 1, and has written to it.
    """
    rig = Rig()
    rig.open(2, tenant="bob")
    tables = set_blocks(1, [(0, 1), (1, 1)]), set_blocks(2, [(2, 1), (3, 1)])
    rig.run(1, *tables, span(1, 0, 12), span(2, 0, 12))
    take(rig)
    return rig


def take(rig: Rig) -> None:
    rig.run(1, set_blocks(1, [(1, 2)]), span(1, 0, 8), session_id=2, seed=7)


QUERY, KEY = tokens(24, 4), tokens(24)
USES: dict[str, tuple[Callable[[Rig], Any], str]] = {
    "its blocks are not read": (lambda r: r.executor.read_blocks(1, 1, range(2)), "sequence_id"),
    "not even one": (lambda r: r.executor.read_blocks(1, 1, [1]), "sequence_id"),
    "the last plan does not attend again": (lambda r: r.run_layer(0, QUERY, None, None), SPANS),
    "nor by its layers": (lambda r: r.run_layer(0, QUERY, KEY, KEY), SPANS),
    "no span computes it": (lambda r: r.start(2, span(1, 12, 1)), SPANS),
    "nor one before what was taken": (lambda r: r.start(2, span(1, 0, 1)), SPANS),
    "nor one of a fork": (lambda r: r.start(2, fork(3, 1, 2), span(3, 12, 1)), SPANS),
    "it is not copied": (
        lambda r: r.start(2, set_blocks(3, [(4, 1)]), transfer(ref(1), ref(4))),
        "plan.transfers.source_generations[0]",
    ),
    "nor set in another table": (
        lambda r: r.start(2, set_blocks(3, [(1, 1)], allocated=False)),
        "plan.changes.generations[0]",
    ),
}


@pytest.mark.parametrize("use", USES)
def test_of_a_sequence_that_was_taken(rig: Rig, use: str) -> None:
    command, field = USES[use]
    with rig.refuses(StaleGenerationError, field):
        command(rig)


def test_what_was_not_taken_stays_as_it_was(rig: Rig) -> None:
    blocks, _ = rig.executor.read_blocks(1, 1, [0])
    assert torch.equal(blocks[:, 0], rig.executor.pools.device_tier[0])
    rig.executor.read_blocks(1, 2, range(2))
    rig.run(2, fork(3, 1, 1), span(2, 12, 1))
    rig.run(3, span(2, 13, 1))
    rig.executor.read_blocks(1, 3, [0])


def test_who_took_a_block_reads_and_writes_it(rig: Rig) -> None:
    for layer in LAYERS:
        rig.layer(layer, 8, session_id=2, seed=7)
    rig.executor.read_blocks(2, 1, [0])
    assert rig.run(2, span(1, 7, 1), session_id=2).plan_number == 2


def test_a_plan_of_whole_tables_or_the_end_of_the_session_gets_rid_of_it(rig: Rig) -> None:
    rig.run(3, set_blocks(2, [(2, 1), (3, 1)], allocated=False), resync=True)
    rig.executor.check_integrity()
    rig.run(2, set_blocks(1, [(3, 2)], replace=True), session_id=2)
    rig.fence(1)
    assert rig.executor.num_sequences == 1


def test_a_plan_that_has_run_gives_its_receipt_as_before(rig: Rig) -> None:
    """Nothing is written then, so there is nothing to refuse."""
    before, receipt = rig.snapshot(), rig.executor.receipt(1)
    rig.run_layer(0, None, KEY, KEY)
    assert rig.executor.receipt(1) == receipt
    assert rig.executor.write_blocks(1, 1, 0, BLOCKS) == receipt
    assert rig.snapshot() == before


def test_blocks_of_the_host_tier_are_taken_too(rig: Rig) -> None:
    rig.run(
        2,
        drop(1),
        set_blocks(2, [(0, 1), (1, 1)], tier=HOST, replace=True),
        *[transfer(ref(i + 2), ref(i, 1, HOST)) for i in (0, 1)],
    )
    rig.run(2, set_blocks(2, [(1, 2)], tier=HOST), session_id=2)
    with rig.refuses(StaleGenerationError, "sequence_id"):
        rig.executor.read_blocks(1, 2, range(2))
    rig.executor.read_blocks(1, 2, [0])
    rig.run(3, drop(2))
