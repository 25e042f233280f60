"""Which cached block is evicted next when free ones run short.

A policy sees only cached blocks: no table refers to them, no unfinished plan may touch them, and
each holds a published prefix. Every operation is O(1). Invariant, kept by the order of the block
store's calls: a block is evicted before any cached ancestor of its prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """The order in which cached blocks are evicted."""

    def add(self, block: int) -> None:
        """``block`` became cached just now. It must not be in the policy."""

    def touch(self, block: int) -> None:
        """``block``, which is cached, must be evicted after all that are cached now."""

    def remove(self, block: int) -> None:
        """``block`` is no longer cached."""

    def pop(self) -> int:
        """Remove and return the block to evict. The policy must not be empty."""

    def __len__(self) -> int:
        """How many blocks are cached."""

    def __iter__(self) -> Iterator[int]:
        """Cached blocks in the order of eviction."""


class LeastRecentlyUsed:
    """Evicts the block that became cached, or was touched, longest ago."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self._blocks[block] = None

    def touch(self, block: int) -> None:
        self._blocks.move_to_end(block)

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)
