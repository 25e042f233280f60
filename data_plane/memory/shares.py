"""How many blocks each layer group of a pool gets.

A sequence holds blocks for all its tokens in a group without a window. In one with a window it
holds those that the next tokens see, and those that a step computes. So groups get blocks in the
proportion in which a sequence of the expected length holds them, and one with a window never fewer
than the tokens of one step need.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Final

from kvplane.layout import LayerGroup, Layout

STEP_TOKENS: Final = 2048
"""Tokens of one sequence that a step is expected to compute at most."""
_MAX_BLOCKS: Final = 2**24


def share_blocks(layout: Layout, num_blocks: int, expected_tokens: int) -> tuple[int, ...]:
    """Blocks of each layer group of a pool whose groups without a window have ``num_blocks``.
    ``expected_tokens``: of a sequence, in the middle of the traffic.
    """
    block_size = layout.block_size_tokens
    whole = -(-expected_tokens // block_size)

    def share(group: LayerGroup) -> int:
        if not group.sliding_window_tokens or num_blocks == 0 or len(layout.groups) == 1:
            return num_blocks
        least = -(-(group.sliding_window_tokens + STEP_TOKENS) // block_size) + 1
        held = min(whole, least)
        return min(num_blocks, max(-(-num_blocks * held // whole), least))

    return tuple(share(group) for group in layout.groups)


def fit_blocks(
    layout: Layout, usable_bytes: int, expected_tokens: int, block_bytes: Callable[[int], int]
) -> int:
    """The largest ``num_blocks`` whose ``share_blocks`` take at most ``usable_bytes``; 0 where none
    do. ``block_bytes``: of a block of each group.
    """
    sizes = [block_bytes(group) for group in range(len(layout.groups))]

    def num_bytes(num_blocks: int) -> int:
        shares = share_blocks(layout, num_blocks, expected_tokens)
        return sum(num * size for num, size in zip(shares, sizes, strict=True))

    return bisect_right(range(1, _MAX_BLOCKS + 1), usable_bytes, key=num_bytes)
