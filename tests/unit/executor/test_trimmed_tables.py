"""Tables that lost their first entries behind the attention window: what is left is attended as if
nothing was missing, and what is missing cannot be read, whatever lies in its place.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data_plane.execution.plan_runner import PlanLayer
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from tests.helpers.data.data_rig import LAYERS, Rig
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import (
    BLOCK_SIZE,
    LAYOUT,
    dense_attention,
    drop,
    fork,
    set_blocks,
    span,
    tokens,
    trim,
    truncate,
)

WINDOW = 11


@pytest.fixture
def rig() -> Rig:
    """A layout with a window."""
    group = replace(LAYOUT.groups[0], sliding_window_tokens=WINDOW)
    return Rig(layout=replace(LAYOUT, groups=(group,)), num_device_blocks=6)


def poison(rig: Rig, but: list[int]) -> None:
    """All blocks but these hold NaN, which no weight of 0 would hide."""
    for block in range(len(rig.executor.pools.device_tier)):
        if block not in but:
            rig.executor.pools.device_tier[block] = float("nan")


@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_attention_within_the_window_sees_nothing_of_what_was_trimmed(rig: Rig, chunk: int) -> None:
    """96 tokens through six blocks, of which at most four are in the table at a time. Block 0 is
    never in it after the first trim, and kernels find its id in the trimmed entries.
    """
    num_tokens = 96
    keys, values = tokens(num_tokens, seed=1), tokens(num_tokens, seed=2)
    queries = tokens(num_tokens, 4, seed=3)
    table: list[int] = []
    generations, free = [0] * 6, [0, 1, 2, 3, 4, 5]
    for number, begin in enumerate(range(0, num_tokens, chunk), 1):
        end = min(begin + chunk, num_tokens)
        changes = []
        num_trimmed = max(0, begin + 1 - WINDOW) // BLOCK_SIZE
        free += [block for block in table[:num_trimmed] if block > 0]
        table[:num_trimmed] = [-1] * num_trimmed
        if num_trimmed:
            changes.append(trim(1, num_trimmed))
        while len(table) * BLOCK_SIZE < end:
            block = free.pop(0)
            generations[block] += 1
            entry = (block, generations[block])
            changes.append(set_blocks(1, [entry], first_block=len(table)))
            table.append(block)
        rig.start(number, *changes, span(1, begin, end - begin))
        poison(rig, table)
        for layer in LAYERS:
            part = slice(begin, end)
            output = rig.run_layer(layer, queries[part], keys[part], values[part])
            assert output is not None
            want = dense_attention(queries[part], keys[:end], values[:end], WINDOW)
            torch.testing.assert_close(output, want, atol=1e-5, rtol=1e-5)
    assert table[:9] == [-1] * 9


def trimmed(rig: Rig) -> None:
    """Plan 1 wrote 24 tokens to blocks 1, 2 and 3; plan 2 trimmed the first."""
    rig.run(1, set_blocks(1, [(1, 1), (2, 1), (3, 1)]), span(1, 0, 20))
    rig.run(2, trim(1, 1), fork(2, 1, 3))


def test_a_span_that_needs_a_trimmed_position_is_refused(rig: Rig) -> None:
    trimmed(rig)
    for first in (0, 7):
        with rig.refuses(InvalidRequestError, "plan.spans.first_positions[0]"):
            rig.start(3, span(1, first, 1))
    with rig.refuses(InvalidRequestError, "plan.spans.first_positions[1]"):
        rig.start(3, fork(3, 1, 2), span(1, 20, 1), span(3, 5, 1))


def test_a_window_that_reaches_a_trimmed_position_is_refused(rig: Rig) -> None:
    trimmed(rig)
    rig.run(3, drop(2), span(1, 20, 2))
    most = 20 + 1 - BLOCK_SIZE
    query, key = tokens(2, 4), tokens(2)
    for window in (most + 1, 2**31 - 1):
        options = AttentionOptions(sliding_window_tokens=window)
        with rig.refuses(InvalidRequestError, "options.sliding_window_tokens"):
            rig.run_layer(0, query, None, None, options=options)
        with rig.refuses(InvalidRequestError, "in.options.sliding_window_tokens"):
            rig.executor.layer_runner.run(
                PlanLayer(1, 0, **of_latest(rig.executor), field="in."), (query, key, key), options
            )
    poison(rig, [2, 3])
    options = AttentionOptions(sliding_window_tokens=most)
    named = of_latest(rig.executor)
    output = rig.executor.layer(1, 0, query, None, None, options=options, **named)
    assert output is not None
    assert bool(output.isfinite().all())


def test_without_a_window_no_span_of_a_trimmed_table_is_attended() -> None:
    rig = Rig()
    trimmed(rig)
    rig.start(3, drop(2), span(1, 20, 1))
    with rig.refuses(InvalidRequestError, "options.sliding_window_tokens"):
        rig.layer(0, 1)
    options = AttentionOptions(sliding_window_tokens=5)
    key = tokens(1)
    assert rig.run_layer(0, tokens(1, 4), key, key, options=options) is not None


def test_the_narrowest_of_all_tables_bounds_the_window(rig: Rig) -> None:
    trimmed(rig)
    own = set_blocks(3, [(4, 1), (5, 1)])
    rig.start(3, drop(2), own, span(3, 0, 10), span(1, 20, 1))
    query, key = tokens(11, 4), tokens(11)
    with rig.refuses(InvalidRequestError, "options.sliding_window_tokens"):
        options = AttentionOptions(sliding_window_tokens=14)
        rig.run_layer(0, query, key, key, options=options)
    assert rig.run_layer(0, query, key, key) is not None


def test_trimmed_entries_are_not_read(rig: Rig) -> None:
    trimmed(rig)
    for sequence_id in (1, 2):
        with rig.refuses(InvalidRequestError, "entries[0]"):
            rig.executor.read_blocks(1, sequence_id, range(3))
        blocks, refs = rig.executor.read_blocks(1, sequence_id, range(1, 3))
        assert refs.indices == b"\2\0\0\0\3\0\0\0"
        assert torch.equal(blocks[:, 0], rig.executor.pools.device_tier[2])


def test_blocks_that_are_given_for_trimmed_entries_are_not_written(rig: Rig) -> None:
    """Blocks may be given from before the span on; only the span's slots are written."""
    trimmed(rig)
    rig.start(3, drop(2), span(1, 20, 4))
    before = rig.executor.pools.device_tier.clone()
    given = torch.ones(2, 3, 2, 2, 8, 16)
    assert rig.executor.write_blocks(1, 1, 0, given) is not None
    before[3, :, :, :, 4:] = 1
    assert torch.equal(rig.executor.pools.device_tier, before)


def test_a_table_that_is_moved_or_set_anew_may_lack_its_first_entries(rig: Rig) -> None:
    trimmed(rig)
    whole = set_blocks(1, [(2, 1), (3, 1)], first_block=1, allocated=False, replace=True)
    rig.run(3, whole, span(1, 20, 1), resync=True)
    with rig.refuses(InvalidRequestError, "entries[0]"):
        rig.executor.read_blocks(1, 1, [0])
    assert rig.executor.num_sequences == 1


def test_a_truncated_table_has_no_slots_behind_its_end(rig: Rig) -> None:
    rig.run(1, set_blocks(1, [(1, 1), (2, 1), (3, 1)]), span(1, 0, 20))
    rig.run(2, truncate(1, 2), set_blocks(2, [(3, 2)]))
    with rig.refuses(InvalidRequestError, "plan.spans.first_positions[0]"):
        rig.start(3, span(1, 16, 1))
    with rig.refuses(InvalidRequestError, "entries[2]"):
        rig.executor.read_blocks(1, 1, range(3))
    assert rig.run(3, span(1, 15, 1)).plan_number == 3
