"""Follows what one root of a prefix index holds."""

from __future__ import annotations

from collections.abc import Iterator

from kvplane_blocks import LayerGroup

STORED, REMOVED, CLEARED = 1, 2, 3


class Follower:
    """Knows what a root holds by a snapshot and the changes since: (hash, tier) -> (parent's hash,
    tokens).
    """

    def __init__(self, group: LayerGroup, root: bytes, block_tokens: int) -> None:
        self.group, self.root = group, root
        self.held: dict[tuple[bytes, int], tuple[bytes, bytes]] = {}
        self.revision = -1
        self.num_snapshots = 0
        self._token_bytes = 4 * block_tokens

    def take_snapshot(self, max_blocks: int) -> Iterator[None]:
        """Begin anew; pause after each piece."""
        self.held.clear()
        self.num_snapshots += 1
        cursor = 0
        self.revision = -1
        while cursor >= 0:
            cursor, revision, *columns = self.group.snapshot(self.root, cursor, max_blocks)
            if self.revision < 0:
                self.revision = revision
            self.held.update(self._rows(*columns))
            yield

    def follow(self, max_events: int = 1000) -> bool:
        """Apply the changes; return False if it has to start again."""
        while True:
            changes = self.group.changes_since(self.revision, self.root, max_events)
            if changes is None:
                return False
            self.revision, kinds, tiers, hashes, parents, tokens = changes
            at = 0
            for i, kind in enumerate(kinds):
                key = (hashes[16 * i : 16 * i + 16], tiers[i])
                if kind == STORED:
                    of_block = tokens[at : at + self._token_bytes]
                    self.held[key] = (parents[16 * i : 16 * i + 16], of_block)
                    at += self._token_bytes
                elif kind == REMOVED:
                    self.held.pop(key, None)
                else:
                    assert kind == CLEARED
                    self.held.clear()
            assert at == len(tokens)
            if len(kinds) < max_events:
                return True

    def _rows(
        self, tiers: bytes, hashes: bytes, parents: bytes, tokens: bytes
    ) -> Iterator[tuple[tuple[bytes, int], tuple[bytes, bytes]]]:
        size = self._token_bytes
        assert len(tiers) * 16 == len(hashes) == len(parents)
        assert len(tiers) * size == len(tokens)
        for i, tier in enumerate(tiers):
            part = slice(16 * i, 16 * i + 16)
            yield (hashes[part], tier), (parents[part], tokens[size * i : size * (i + 1)])


def held_now(group: LayerGroup, root: bytes, block_tokens: int, max_blocks: int) -> Follower:
    """Return a follower that has a snapshot, taken in pieces of so many blocks."""
    follower = Follower(group, root, block_tokens)
    for _ in follower.take_snapshot(max_blocks):
        pass
    return follower
