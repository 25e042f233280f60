"""The executor runs plans: tables, transfers, layers, receipts."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplane.errors import (
    InvalidRequestError,
)
from kvplane.wire import signing
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.plan_author import (
    BLOCK_SIZE,
    HOST,
    blocks_of,
    dense_attention,
    drop,
    forked,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)


def test_a_batch_of_ragged_spans_gives_each_sequence_its_own_answer(rig: Rig) -> None:
    lens = {1: 9, 2: 1, 3: 13}
    changes = [
        set_blocks(1, [(7, 1), (0, 1)]),
        set_blocks(2, [(3, 1)]),
        set_blocks(3, [(1, 1), (5, 1)]),
    ]
    spans = [span(sequence, 0, num) for sequence, num in lens.items()]
    rig.start(1, *changes, *spans)
    total = sum(lens.values())
    key, value, query = tokens(total, seed=1), tokens(total, seed=2), tokens(total, 4, seed=3)
    output = rig.run_layer(0, query, key, value)
    assert output is not None
    begin = 0
    for num in lens.values():
        own = slice(begin, begin + num)
        want = dense_attention(query[own], key[own], value[own])
        torch.testing.assert_close(output[own], want, atol=1e-5, rtol=1e-5)
        begin += num


def test_the_receipt_names_the_plan_by_its_digest(rig: Rig) -> None:
    plan = rig.plan(1, set_blocks(1, [(0, 1)]), span(1, 0, 3))
    rig.executor.start(1, plan)
    rig.run_layers(3)
    receipt = rig.author.read_receipt(rig.executor.receipt(1))
    assert receipt.plan_digest == signing.digest(plan.payload)
    assert (receipt.version, receipt.session) == (NEWEST_PAYLOAD_VERSION, rig.author.session(1))
    assert (receipt.epoch, receipt.plan_number) == (rig.executor.epoch, 1)


def test_a_copy_on_write_leaves_the_parent_alone(rig: Rig) -> None:
    rig.admit(1)
    before, _ = rig.executor.read_blocks(1, 1, range(2))
    rig.run(2, *forked(2, 1, 1, 1, 2), span(2, 12, 1), seed=10)
    after, _ = rig.executor.read_blocks(1, 1, range(2))
    child, names = rig.executor.read_blocks(1, 2, [1])
    assert torch.equal(before, after)
    assert blocks_of(names) == [(2, 1)]
    assert torch.equal(child[:, :, :, :, :4], before[:, 1:, :, :, :4]), "the tokens before the fork"
    assert not torch.equal(child[:, :, :, :, 4], before[:, 1:, :, :, 4]), "the child's own token"


@given(st.integers(0, 23), st.integers(1, 24), st.integers(-1, 3), st.integers(1, 3))
def test_blocks_are_written_to_the_slots_of_the_span_and_to_no_other(
    first: int, num: int, first_block: int, num_blocks: int
) -> None:
    rig, table, num = Rig(), (3, 0, 5), min(num, 24 - first)
    rig.start(1, set_blocks(1, [(i, 1) for i in table]), span(1, first, num))
    device = rig.executor.pools.device_tier
    blocks = torch.rand(2, num_blocks, *device.shape[2:]) + 1
    given_positions = range(first_block * BLOCK_SIZE, (first_block + num_blocks) * BLOCK_SIZE)
    inside = [p for p in range(first, first + num) if p in given_positions]
    if first_block < 0 or inside[:1] != [first]:  # a gap is left before them, or all are outside
        with rig.refuses(InvalidRequestError, "entries"):
            rig.executor.write_blocks(1, 1, first_block, blocks)
        return
    receipt = rig.executor.write_blocks(1, 1, first_block, blocks)
    assert (receipt is None) == (len(inside) < num)
    want = torch.zeros_like(device)
    for p in inside:
        given = blocks[:, p // BLOCK_SIZE - first_block, :, :, p % BLOCK_SIZE]
        want[table[p // BLOCK_SIZE], :, :, :, p % BLOCK_SIZE] = given
    assert torch.equal(device, want)
    assert rig.executor.counters.num_written_tokens == 2 * len(inside)


def test_a_plan_of_two_spans_is_receipted_after_the_blocks_of_both(rig: Rig) -> None:
    changes = [set_blocks(1, [(0, 1)]), set_blocks(2, [(1, 1)])]
    rig.start(1, *changes, span(1, 0, 3), span(2, 0, 8))
    blocks = torch.ones(2, 1, 2, 2, BLOCK_SIZE, 16)
    assert rig.executor.write_blocks(1, 2, 0, blocks) is None
    assert rig.executor.write_blocks(1, 1, 0, blocks) is not None


def test_transfers_alone_are_started_by_their_kind(rig: Rig) -> None:
    rig.admit(1)
    plan = rig.plan(2, set_blocks(2, [(2, 1)]), transfer(ref(1), ref(2)))
    with rig.refuses(InvalidRequestError, "plan.transfers.destination_tiers[0]"):
        rig.executor.start(1, plan, swaps=True)
    for had_run in (False, True):
        started = rig.executor.start(1, plan, swaps=False)
        assert (started.num_copied_blocks, started.num_swapped_blocks) == (1, 0)
        assert started.had_run == had_run
        assert rig.author.read_receipt(started.receipt).plan_number == 2


def test_a_block_allocated_twice_in_one_plan_is_of_the_last_generation(rig: Rig) -> None:
    """A sequence admitted, swapped out and freed, and others in its blocks, all in one step."""
    rig.admit(1)
    rig.run(
        2,
        set_blocks(2, [(0, 1), (4, 1)], allocated=[False, True]),
        drop(2),
        set_blocks(3, [(2, 1)], tier=HOST),
        drop(3),
        set_blocks(4, [(2, 2)], tier=HOST),
        drop(1),
        set_blocks(5, [(4, 3), (0, 2)]),
        transfer(ref(1), ref(2, 1, HOST)),
        transfer(ref(1), ref(4, 1)),
        transfer(ref(4, 1), ref(2, 2, HOST)),
        span(5, 0, 9),
    )
    host = rig.executor.pools.host_tier
    assert bool(host[2].any())
    _, table = rig.executor.read_blocks(1, 5, range(2))
    assert blocks_of(table) == [(4, 3), (0, 2)]
    assert rig.executor.num_sequences == 2


def test_blocks_are_read_and_written_in_ranges_of_blocks_and_layers(rig: Rig) -> None:
    rig.admit(1)
    whole, _ = rig.executor.read_blocks(1, 1, range(2))
    rig.start(2, set_blocks(2, [(4, 1), (5, 1)]), span(2, 0, 12))
    for layer in (0, 1):
        for block in (0, 1):
            part, table = rig.executor.read_blocks(1, 1, [block], first_layer=layer, num_layers=1)
            assert torch.equal(part, whole[layer : layer + 1, block : block + 1])
            assert blocks_of(table) == [(block, 1)]
            assert rig.executor.receipt(1) is None
            receipt = rig.executor.write_blocks(1, 2, block, part, first_layer=layer, num_layers=1)
    assert rig.author.read_receipt(receipt).plan_number == 2
    copied, _ = rig.executor.read_blocks(1, 2, range(2))
    assert torch.equal(copied, whole)
