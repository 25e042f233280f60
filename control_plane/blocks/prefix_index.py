"""Which block holds which prefix: a trie of exact entries, one for each full block of tokens.

    root ──[t0..t15]──► entry ──[t16..t31]──► entry ──[t32..t47]──► entry
                        block 7     │         no block (evicted)    block 3
                                    └[u16..u31]──► entry
                                                   block 9

An entry is (parent entry, the block's tokens): two prompts share an entry only if all their tokens
up to there are equal, so a hit cannot be wrong. Different roots share no entries; a root is
identified by bytes that the caller chooses. An entry whose block was evicted keeps its tokens
while a descendant lives, and takes the next block that is published for it.

The chained hash, xxh3-128 (Yann Collet's xxHash) over the parent's hash and the tokens, starting
from a hash of the root's bytes, is computed for callers; no look-up here relies on it.

Callers pass and get block indices and token bytes, entries stay inside. Invariant: an entry has a
block, or a child, or is removed; ``entries[b].block == b`` for every published block b.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

import xxhash

NO_BLOCK: Final = -1


class Entry:
    """One full block of one prefix. ``block`` is the block that holds it, or NO_BLOCK.

    Most have at most one child, so a dict is made only for a second: half the memory, and half the
    objects that the garbage collector must visit.
    """

    __slots__ = ("block", "child", "hash", "other_children", "parent", "tokens")

    def __init__(self, parent: Entry | None, tokens: bytes, hash_: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.hash = hash_
        self.block = NO_BLOCK
        self.child: Entry | None = None
        self.other_children: dict[bytes, Entry] | None = None

    @property
    def children(self) -> list[Entry]:
        """All children, in no order."""
        if self.child is None:
            return []
        return [self.child, *(self.other_children or {}).values()]

    def add_child(self, entry: Entry) -> None:
        """``entry`` has tokens that no child has yet."""
        if self.child is None:
            self.child = entry
        elif self.other_children is None:
            self.other_children = {entry.tokens: entry}
        else:
            self.other_children[entry.tokens] = entry

    def remove_child(self, entry: Entry) -> None:
        """Remove ``entry``, which is a child."""
        others = self.other_children
        if self.child is not entry:
            assert others is not None, "the entry to remove is not a child"
            del others[entry.tokens]
        else:
            self.child = others.popitem()[1] if others else None
        if not others:
            self.other_children = None


class PrefixIndex:
    """All published prefixes of one block store."""

    __slots__ = ("_block_bytes", "_cut", "_roots", "entries")

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.entries: list[Entry | None] = [None] * num_blocks  # what each block holds
        self._block_bytes = block_size_tokens * 4
        # Splits token ids into blocks, each a tuple of one bytes object.
        self._cut = struct.Struct(f"{self._block_bytes}s").iter_unpack
        self._roots: dict[bytes, Entry] = {}

    def match(self, root: bytes, token_ids: bytes) -> list[int]:
        """The blocks that hold the longest cached run of the full blocks of ``token_ids``."""
        hits: list[int] = []
        entry = self._roots.get(root)
        if entry is None:
            return hits
        num_bytes = len(token_ids) - len(token_ids) % self._block_bytes
        for (tokens,) in self._cut(memoryview(token_ids)[:num_bytes]):
            child = entry.child
            if child is None:
                break
            if child.tokens != tokens:
                others = entry.other_children
                child = others.get(tokens) if others is not None else None
                if child is None:
                    break
            if child.block == NO_BLOCK:
                break
            hits.append(child.block)
            entry = child
        return hits

    def publish(
        self, root: bytes, parent: int, token_ids: bytes, blocks: list[int]
    ) -> tuple[list[int], list[int], int]:
        """Enter ``blocks``, which hold ``token_ids`` after the prefix of ``parent``.

        ``parent`` is a published block, or NO_BLOCK for the root; no block may be entered under
        another prefix. Where a prefix has a block already, the new one stays private. Returns the
        blocks that were entered; those of them that took the place of evicted ones, see ``below``;
        and the block that holds the last prefix now: the parent of what follows.
        """
        entry = self._root(root) if parent == NO_BLOCK else self.entries[parent]
        assert entry is not None, "a prefix follows a block that is not published"
        entries = self.entries
        entered: list[int] = []
        refilled: list[int] = []
        for (tokens,), block in zip(self._cut(token_ids), blocks, strict=True):
            child = entry.child
            if child is not None and child.tokens != tokens:
                others = entry.other_children
                child = others.get(tokens) if others is not None else None
            if child is None:
                child = Entry(entry, tokens, chained_hash(entry.hash, tokens))
                entry.add_child(child)
            elif child.block == NO_BLOCK:
                refilled.append(block)
            if child.block == NO_BLOCK:
                child.block = block
                entries[block] = child
                entered.append(block)
            entry = child
        return entered, refilled, entry.block

    def evict(self, blocks: Iterable[int]) -> int:
        """Take the blocks out of the index; returns how many of them were in it.

        Entries that are left with neither block nor child are removed.
        """
        entries = self.entries
        num_evicted = 0
        for block in blocks:
            entry = entries[block]
            if entry is None:
                continue
            entries[block] = None
            num_evicted += 1
            entry.block = NO_BLOCK
            while entry.block == NO_BLOCK and entry.child is None and entry.parent is not None:
                entry.parent.remove_child(entry)
                entry = entry.parent
        return num_evicted

    def below(self, blocks: Iterable[int]) -> list[int]:
        """The published blocks that can be found again now that ``blocks`` took the places of
        evicted ones, parents before children.
        """
        found: dict[int, None] = {}
        queue = deque(self._held(blocks))
        while queue:
            for child in queue.popleft().children:
                if child.block != NO_BLOCK and child.block not in found:
                    found[child.block] = None
                    queue.append(child)
        return list(found)

    # Columns of published blocks

    def hashes(self, blocks: Iterable[int]) -> list[bytes]:
        """The 16-byte chained hash of each block's prefix."""
        return [entry.hash for entry in self._held(blocks)]

    def parents(self, blocks: Iterable[int]) -> list[int]:
        """The block that holds the prefix before each; NO_BLOCK for the first block of a prompt."""
        return [
            parent.block if (parent := entry.parent) is not None else NO_BLOCK
            for entry in self._held(blocks)
        ]

    def token_ids(self, blocks: Iterable[int]) -> list[bytes]:
        """The tokens of each block."""
        return [entry.tokens for entry in self._held(blocks)]

    # Everything in the index

    def published(self) -> Iterator[tuple[bytes, int]]:
        """(root, block) of every published block, parents before children."""
        for root, entry in self.walk():
            if entry.block != NO_BLOCK:
                yield root, entry.block

    def findable(self) -> Iterator[tuple[bytes, int]]:
        """(root, block) of what ``match`` can find, parents before children: a published block
        cannot be found while the block of a prefix before it is evicted.
        """
        for name, root in self._roots.items():
            stack = root.children
            while stack:
                entry = stack.pop()
                if entry.block != NO_BLOCK:
                    yield name, entry.block
                    stack += entry.children

    def walk(self) -> Iterator[tuple[bytes, Entry]]:
        """(root, entry) of every entry but the roots, parents before children."""
        for name, root in self._roots.items():
            stack = root.children
            while stack:
                entry = stack.pop()
                yield name, entry
                stack += entry.children

    def _root(self, name: bytes) -> Entry:
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Entry(None, b"", root_hash(name))
        return root

    def _held(self, blocks: Iterable[int]) -> list[Entry]:
        """The entry of each block."""
        entries = list(map(self.entries.__getitem__, blocks))
        held = [entry for entry in entries if entry is not None]
        assert len(held) == len(entries), "a block is not published"
        return held


def root_hash(root: bytes) -> bytes:
    """The 16-byte hash that the first block of each of the root's prefixes is chained to."""
    return xxhash.xxh3_128_digest(b"kvplane.v1.tenant\0" + root)


def chained_hash(parent_hash: bytes, tokens: bytes) -> bytes:
    """The 16-byte hash of ``tokens`` after the prefix of ``parent_hash``."""
    return xxhash.xxh3_128_digest(parent_hash + tokens)
