"""Tables that one plan makes may share the blocks that it computes."""

from __future__ import annotations

import torch

from kvplane.errors import BlockNotWritableError
from tests.helpers.data.data_rig import LAYERS, Rig
from tests.helpers.data.plan_author import fork, set_blocks, span, tokens

FIRST = [set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12)]
"""Sequence 1 computes 8 tokens of block 0 and 4 of block 1."""
SECOND = [
    set_blocks(2, [(0, 1)], allocated=False),
    set_blocks(2, [(2, 1)], first_block=1),
    span(2, 8, 4),
]
"""Sequence 2 begins with the same 8 and computes 4 of its block 2."""


def test_equal_prompts_of_one_plan_are_computed_once() -> None:
    """The second sequence reads what the first writes in the same plan: the same bits as when the
    first had been computed by an earlier plan.
    """
    together, apart = Rig(), Rig()
    together.start(1, *FIRST, *SECOND)
    query, key, value = tokens(16, 4, seed=1), tokens(16, seed=2), tokens(16, seed=3)
    for layer in LAYERS:
        output = together.run_layer(layer, query, key, value)
        if layer == LAYERS[-1]:
            last = output
    receipt = together.author.read_receipt(together.executor.receipt(1))
    assert receipt.plan_number == 1
    apart.start(1, *FIRST)
    for layer in LAYERS:
        apart.run_layer(layer, query[:12], key[:12], value[:12])
    apart.start(2, *SECOND)
    for layer in LAYERS:
        output = apart.run_layer(layer, query[12:], key[12:], value[12:])
    assert torch.equal(last[12:], output)


def test_forks_of_a_prompt_share_it_while_it_is_computed() -> None:
    rig = Rig()
    assert rig.run(1, *FIRST, fork(2, 1, 2), fork(3, 1, 2)).plan_number == 1
    with rig.refuses(BlockNotWritableError, "plan.spans.sequence_ids[0]"):
        rig.start(2, span(1, 12, 1))


def test_a_table_that_was_there_before_shares_no_writes() -> None:
    rig = Rig()
    rig.admit(1)
    rig.run(2, fork(2, 1, 2))
    # Sequence 3 is new and may share, but sequence 2 is not.
    with rig.refuses(BlockNotWritableError, "plan.spans.sequence_ids[0]"):
        rig.start(3, fork(3, 1, 2), span(1, 12, 1))
    own = [set_blocks(2, [(2, 1)], first_block=1), fork(3, 1, 2)]
    assert rig.run(3, *own, span(1, 12, 1), span(2, 12, 1)).plan_number == 3


def test_two_spans_do_not_write_one_block() -> None:
    rig = Rig()
    with rig.refuses(BlockNotWritableError, "plan.spans.sequence_ids[1]"):
        rig.start(
            1,
            set_blocks(1, [(0, 1)]),
            set_blocks(2, [(0, 1)], allocated=False),
            span(1, 0, 4),
            span(2, 4, 4),
        )
