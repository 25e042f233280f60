"""Blocks take the longest items of long sequences first: the plan puts the sequences in order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from backends import DeviceBackend
from kernel_cases import Batch, Case, build

Lens = Sequence[tuple[int, int]]
"""Query and context tokens of each sequence."""
GROUP = 2
LONGEST_ITEM = 256  # tokens: long contexts are cut into splits of four times 64
LENS = (
    *((40, 64), (1, 900), (33, 300), (0, 5), (70, 128), (16, 500)),
    *((40, 600), (40, 301), (90, 400), (40, 200), (3, 800)),
)
# Of the plan's memory, as csrc/cuda/attention has it.
SEQUENCE_BYTES, UNIT = 48, 256
SHORT_ENDS, LONG_ORDER, LONG_ENDS = range(3)


def batch_of(lens: Lens) -> Batch:
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


def in_order(lens: Lens) -> list[int]:
    """The long sequences, by the length of their longest items in steps of 64 tokens, and by their
    places where they are equal.
    """
    long = [s for s, (query_len, _) in enumerate(lens) if query_len * GROUP > 32]
    return sorted(long, key=lambda s: (-(min(lens[s][1], LONGEST_ITEM) // 64), s))


def items_of(query_len: int, context_len: int) -> int:
    splits = -(-context_len // LONGEST_ITEM)
    return -(-query_len * GROUP // 64) * splits


def batches() -> Iterator[Lens]:
    """Yield batches with long and short sequences, those with one kind alone, and large ones."""
    yield LENS
    yield from (((1, 70), (2, 90)), ((40, 90),), ((0, 9), (1, 5)))
    for num_sequences in (31, 32, 33, 100):  # a warp has 32 lanes
        rng = random.Random(num_sequences)
        query_lens = [rng.choice((1, 17, 20, 30)) for _ in range(num_sequences)]
        yield tuple((query_len, query_len + rng.randrange(240)) for query_len in query_lens)


@pytest.mark.parametrize("lens", [*batches()], ids=lambda lens: f"{len(lens)}: {lens[0]}")
def test_sequences_with_the_longest_items_come_first(device: DeviceBackend, lens: Lens) -> None:
    arrays, order = planned(device, batch_of(lens)), in_order(lens)
    assert lens is not LENS or order == [2, 6, 7, 8, 9, 4, 0]
    assert arrays[LONG_ORDER][: len(order)] == order
    ends = [*itertools.accumulate(items_of(*lens[s]) for s in order)]
    assert arrays[LONG_ENDS] == ends + (ends[-1:] or [0]) * (len(lens) - len(order))
