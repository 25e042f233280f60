"""Which block holds which prefix: a trie of exact entries, one for each full block of tokens.

    root(tenant) ──[t0..t15]──► entry ──[t16..t31]──► entry ──[t32..t47]──► entry
                                block 7     │         block none (evicted)  block 3
                                            └[u16..u31]──► entry
                                                           block 9

An entry is (parent entry, the block's tokens): two prompts meet in an entry only if all their
tokens up to there are equal, so a hit can not be wrong. Each tenant has a root of its own, so
tenants never meet. An entry whose block was evicted keeps its tokens while a descendant lives, and
is filled again by the next block published for it.

The chained hash, xxh3-128 (Yann Collet's xxHash) over the parent's hash and the tokens, seeded by
the tenant's name at the root, travels in publications; look-ups never rely on it.

Invariant: an entry has a block, or a child, or is removed; ``entry.block`` and the allocator's
``entries[block]`` agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import xxhash

NO_BLOCK: Final = -1


class Entry:
    """One full block of one prefix. ``block`` is an index in the device tier, or NO_BLOCK."""

    __slots__ = ("block", "children", "hash", "parent", "tokens")

    def __init__(self, parent: Entry | None, tokens: bytes, hash_: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.hash = hash_
        self.block = NO_BLOCK
        self.children: dict[bytes, Entry] = {}


class PrefixIndex:
    """All published prefixes of one pool."""

    __slots__ = ("_block_bytes", "_roots")

    def __init__(self, block_size_tokens: int) -> None:
        self._block_bytes = block_size_tokens * 4
        self._roots: dict[str, Entry] = {}

    def match(self, tenant: str, token_ids: bytes) -> list[Entry]:
        """The longest run of entries with blocks, over the full blocks of ``token_ids``."""
        hits: list[Entry] = []
        entry = self._roots.get(tenant)
        size = self._block_bytes
        for start in range(0, len(token_ids) - size + 1, size):
            if entry is None:
                break
            entry = entry.children.get(token_ids[start : start + size])
            if entry is None or entry.block == NO_BLOCK:
                break
            hits.append(entry)
        return hits

    def root(self, tenant: str) -> Entry:
        """The tenant's root, made when it does not exist."""
        root = self._roots.get(tenant)
        if root is None:
            root = self._roots[tenant] = Entry(None, b"", root_hash(tenant))
        return root

    def child(self, parent: Entry, tokens: bytes) -> Entry:
        """The entry of ``tokens`` after ``parent``, made without a block when it does not exist."""
        entry = parent.children.get(tokens)
        if entry is None:
            entry = Entry(parent, tokens, chained_hash(parent.hash, tokens))
            parent.children[tokens] = entry
        return entry

    def evict(self, entry: Entry) -> None:
        """Take the block away, and with it every entry that now has neither block nor child."""
        entry.block = NO_BLOCK
        while entry.block == NO_BLOCK and not entry.children and entry.parent is not None:
            del entry.parent.children[entry.tokens]
            entry = entry.parent

    def published(self) -> Iterator[tuple[str, Entry]]:
        """(tenant, entry) of every entry with a block, parents before children."""
        for tenant, entry in self.entries():
            if entry.block != NO_BLOCK:
                yield tenant, entry

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """(tenant, entry) of every entry but the roots, parents before children."""
        for tenant, root in self._roots.items():
            stack = list(root.children.values())
            while stack:
                entry = stack.pop()
                yield tenant, entry
                stack.extend(entry.children.values())


def root_hash(tenant: str) -> bytes:
    """What the first entries of a tenant are chained to, 16 bytes."""
    return xxhash.xxh3_128_digest(b"kvplane.v1.tenant\0" + tenant.encode())


def chained_hash(parent_hash: bytes, tokens: bytes) -> bytes:
    """The 16-byte hash of ``tokens`` after the entry of ``parent_hash``."""
    return xxhash.xxh3_128_digest(parent_hash + tokens)
