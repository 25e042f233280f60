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

import struct
from collections.abc import Iterable, Iterator
from typing import Final

import xxhash

NO_BLOCK: Final = -1


class Entry:
    """One full block of one prefix. ``block`` is an index in the device tier, or NO_BLOCK.

    Most have one child at most, so a dict is made for the second: half the memory, and half the
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
        """``entry`` is a child no more."""
        others = self.other_children
        if self.child is not entry:
            assert others is not None, "an entry is removed that is no child"
            del others[entry.tokens]
        else:
            self.child = others.popitem()[1] if others else None
        if not others:
            self.other_children = None


class PrefixIndex:
    """All published prefixes of one pool."""

    __slots__ = ("_block_bytes", "_cut", "_roots")

    def __init__(self, block_size_tokens: int) -> None:
        self._block_bytes = block_size_tokens * 4
        # Cuts token ids into blocks, each as a tuple of one.
        self._cut = struct.Struct(f"{self._block_bytes}s").iter_unpack
        self._roots: dict[str, Entry] = {}

    def match(self, tenant: str, token_ids: bytes) -> list[Entry]:
        """The longest run of entries with blocks, over the full blocks of ``token_ids``."""
        hits: list[Entry] = []
        entry = self._roots.get(tenant)
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
            hits.append(child)
            entry = child
        return hits

    def root(self, tenant: str) -> Entry:
        """The tenant's root, made when it does not exist."""
        root = self._roots.get(tenant)
        if root is None:
            root = self._roots[tenant] = Entry(None, b"", root_hash(tenant))
        return root

    def child(self, parent: Entry, tokens: bytes) -> Entry:
        """The entry of ``tokens`` after ``parent``, made without a block when it does not exist."""
        return self.extend(parent, tokens)[-1]

    def extend(self, parent: Entry, token_ids: bytes) -> list[Entry]:
        """The entries of whole blocks of tokens after ``parent``, made where they do not exist."""
        chain: list[Entry] = []
        for (tokens,) in self._cut(token_ids):
            entry = parent.child
            if entry is not None and entry.tokens != tokens:
                others = parent.other_children
                entry = others.get(tokens) if others is not None else None
            if entry is None:
                entry = Entry(parent, tokens, chained_hash(parent.hash, tokens))
                parent.add_child(entry)
            chain.append(entry)
            parent = entry
        return chain

    def evict(self, entries: Iterable[Entry]) -> None:
        """Take the blocks away, and with them every entry that now has neither block nor child."""
        for entry in entries:
            entry.block = NO_BLOCK
            while entry.block == NO_BLOCK and entry.child is None and entry.parent is not None:
                entry.parent.remove_child(entry)
                entry = entry.parent

    def published(self) -> Iterator[tuple[str, Entry]]:
        """(tenant, entry) of every entry with a block, parents before children."""
        for tenant, entry in self.entries():
            if entry.block != NO_BLOCK:
                yield tenant, entry

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """(tenant, entry) of every entry but the roots, parents before children."""
        for tenant, root in self._roots.items():
            stack = root.children
            while stack:
                entry = stack.pop()
                yield tenant, entry
                stack += entry.children


def root_hash(tenant: str) -> bytes:
    """What the first entries of a tenant are chained to, 16 bytes."""
    return xxhash.xxh3_128_digest(b"kvplane.v1.tenant\0" + tenant.encode())


def parent_hash(entry: Entry) -> bytes:
    """The hash that the entry is chained to, as it travels: empty for a tenant's first entries."""
    parent = entry.parent
    return b"" if parent is None or parent.parent is None else parent.hash


def chained_hash(parent_hash: bytes, tokens: bytes) -> bytes:
    """The 16-byte hash of ``tokens`` after the entry of ``parent_hash``."""
    return xxhash.xxh3_128_digest(parent_hash + tokens)
