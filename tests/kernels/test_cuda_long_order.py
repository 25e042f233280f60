"""Blocks take the longest items of long sequences first: the plan puts the sequences in order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from backends import DeviceBackend
from kernel_cases import Batch, Case, build

GROUP = 2
LONGEST_ITEM = 256  # tokens: long contexts are cut into splits of four times 64
LENS = (
    *((40, 64), (1, 900), (33, 300), (0, 5), (70, 128), (16, 500)),
    *((40, 600), (40, 301), (90, 400), (40, 200), (3, 800)),
)
# Of the plan's memory, as csrc/cuda/attention has it.
SEQUENCE_BYTES, UNIT = 48, 256
SHORT_ENDS, LONG_ORDER, LONG_ENDS = range(3)


def batch_of(lens: Sequence[tuple[int, int]]) -> Batch:
    return build(Case(lens=tuple(lens), heads=(GROUP, 1), head_size=16, dtype=torch.bfloat16))


def planned(device: DeviceBackend, batch: Batch) -> list[list[int]]:
    """Three arrays of the plan: the items of short sequences up to each, the order of the long
    ones, and their items in it.
    """
    memory = device.kernels.plan(device._all_there(batch.with_lengths())).memory.cpu()
    device.kernels.check_faults()
    num_sequences = len(batch.context_lens)
    first = _rounded_up(SEQUENCE_BYTES * num_sequences)
    of_each = _rounded_up(4 * num_sequences)
    starts = [first + i * of_each for i in range(3)]
    numbers = (memory[start : start + 4 * num_sequences] for start in starts)
    return [part.view(torch.int32).tolist() for part in numbers]


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // UNIT) * UNIT


def in_order(lens: Sequence[tuple[int, int]]) -> list[int]:
    """The long sequences, by the length of their longest items in steps of 64 tokens, and by their
    places where they are equal.
    """
    long = [s for s, (query_len, _) in enumerate(lens) if query_len * GROUP > 32]
    return sorted(long, key=lambda s: (-(min(lens[s][1], LONGEST_ITEM) // 64), s))


def items_of(query_len: int, context_len: int) -> int:
    splits = -(-context_len // LONGEST_ITEM)
    return -(-query_len * GROUP // 64) * splits


def test_sequences_with_the_longest_items_come_first(device: DeviceBackend) -> None:
    arrays = planned(device, batch_of(LENS))
    order, ends = in_order(LENS), arrays[LONG_ENDS]
    assert order == [2, 6, 7, 8, 9, 4, 0]
    assert arrays[LONG_ORDER][: len(order)] == order
    items = [items_of(*LENS[s]) for s in order]
    totals = [sum(items[: i + 1]) for i in range(len(items))]
    assert ends == totals + [totals[-1]] * (len(LENS) - len(order))


@pytest.mark.parametrize("num_sequences", (31, 32, 33, 100))
def test_more_sequences_than_lanes_are_in_order_too(
    device: DeviceBackend, num_sequences: int
) -> None:
    rng = random.Random(num_sequences)
    lens = []
    for _ in range(num_sequences):
        query_len = rng.choice((1, 17, 20, 30))
        lens.append((query_len, query_len + rng.randrange(240)))
    arrays = planned(device, batch_of(lens))
    order = in_order(lens)
    assert arrays[LONG_ORDER][: len(order)] == order
    assert arrays[LONG_ENDS][-1] == sum(items_of(*lens[s]) for s in order)


@pytest.mark.parametrize("lens", (((1, 70), (2, 90)), ((40, 90),), ((0, 9), (1, 5))), ids=str)
def test_a_batch_may_have_no_long_sequence_or_no_other(
    device: DeviceBackend, lens: tuple[tuple[int, int], ...]
) -> None:
    arrays = planned(device, batch_of(lens))
    order = in_order(lens)
    assert arrays[LONG_ORDER][: len(order)] == order
    assert arrays[LONG_ENDS] == [sum(items_of(*lens[s]) for s in order)] * len(lens)
