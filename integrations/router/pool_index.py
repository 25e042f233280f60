"""The cached prefixes of a pool, as its feed reports them.

prompt  [block 0][block 1][block 2]
           │        │        │
(zeros, tokens) ─► hash ─► (hash, tokens) ─► hash ─► ...   until nothing is found
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from kvplane.prefixes import (
    BlocksRemoved,
    BlocksStored,
    CaughtUp,
    IndexCleared,
    PrefixEvent,
    StoredBlock,
)
from kvplane.results import HASH_BYTES

_NO_PARENT: Final = bytes(HASH_BYTES)
_Link = tuple[bytes, bytes]  # the hash before a block, and its tokens


class PoolIndex:
    """The cached prefixes of one pool. ``block_size_tokens``: of the pool's layout."""

    def __init__(self, block_size_tokens: int) -> None:
        self.block_size_tokens = block_size_tokens
        self._next: dict[_Link, bytes] = {}
        self._links: dict[bytes, _Link] = {}
        self._tiers: dict[bytes, set[int]] = {}

    @property
    def num_blocks(self) -> int:
        """The number of cached blocks that can be found, in any tier."""
        return len(self._tiers)

    def apply(self, event: PrefixEvent) -> None:
        """Apply the next event of the feed."""
        match event:
            case BlocksStored(blocks):
                for block in blocks:
                    self._store(block)
            case BlocksRemoved(blocks):
                for block_hash, tier in blocks:
                    self._remove(block_hash, tier)
            case IndexCleared():
                self._next.clear()
                self._links.clear()
                self._tiers.clear()
            case CaughtUp():
                pass

    def num_cached_tokens(self, prompt: Sequence[int]) -> int:
        """Return the number of leading tokens of ``prompt`` that are cached, in whole blocks. The
        last token never counts: an engine computes at least one.
        """
        at, found = _NO_PARENT, 0
        for tokens in self._blocks(prompt):
            following = self._next.get((at, tokens))
            if following is None:
                break
            at = following
            found += self.block_size_tokens
        return found

    def _blocks(self, prompt: Sequence[int]) -> Iterator[bytes]:
        """Yield the tokens of each block in the index's form; made only as far as needed."""
        size = self.block_size_tokens
        for first in range(0, len(prompt) - size, size):
            yield array("i", prompt[first : first + size]).tobytes()

    def _store(self, block: StoredBlock) -> None:
        tiers = self._tiers.setdefault(block.block_hash, set())
        tiers.add(block.tier)
        link = (block.parent_hash, block.token_ids.tobytes())
        self._links[block.block_hash] = link
        self._next[link] = block.block_hash

    def _remove(self, block_hash: bytes, tier: int) -> None:
        tiers = self._tiers.get(block_hash)
        if tiers is None:
            return
        tiers.discard(tier)
        if not tiers:
            del self._tiers[block_hash]
            del self._next[self._links.pop(block_hash)]
