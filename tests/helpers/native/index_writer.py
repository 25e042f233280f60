"""Fills the index of a native pool: sequences that are computed at once, by sessions of a root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvplane_blocks import LayerGroup, chained_hash, root_hash

from tests.helpers.native.native_pool import OneGroup, i32, i64

BLOCK_TOKENS = 4


def blocks(*firsts: int) -> list[int]:
    """Return tokens of full blocks, each known by its first token."""
    return [first * 10 + i for first in firsts for i in range(BLOCK_TOKENS)]


def hashes_of(root: bytes, tokens: list[int]) -> list[bytes]:
    """Return the chained hashes of the tokens' full blocks."""
    found, last = [], root_hash(root)
    for i in range(0, len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
        last = chained_hash(last, i32(tokens[i : i + BLOCK_TOKENS]))
        found.append(last)
    return found


@contextmanager
def checked_pool(
    num_device: int, num_host: int = 0, *, policy: str = "lru", seed: int = 0
) -> Iterator[OneGroup]:
    """Make a pool, whose integrity is checked in the end."""
    pool = OneGroup(
        LayerGroup(BLOCK_TOKENS, num_device, num_host, eviction_policy=policy, seed=seed)
    )
    yield pool
    pool.check_integrity()


class Writer:
    """A session whose plans run as soon as they are made, unless ``late``."""

    def __init__(self, pool: OneGroup, root: bytes = b"root", owner: int = 1) -> None:
        self.pool, self.root, self.owner = pool, root, owner
        self.handle = pool.open_session(root, owner)
        self.late = False
        self._number = self._last_id = 0

    @contextmanager
    def step(self) -> Iterator[int]:
        """Run a step, given its number."""
        self._number += 1
        self.pool.begin(self.handle, self._number)
        yield self._number
        self.pool.finish(self.handle, b"")
        if not self.late:
            self.catch_up()

    def catch_up(self) -> None:
        """Run all plans so far."""
        self.pool.receipted(self.handle, self.pool.last_plan(self.handle))

    def write(self, tokens: list[int], *, num_compute: int = -1) -> int:
        """Write a new sequence of these tokens; return its id."""
        self._last_id += 1
        with self.step():
            answer = self.pool.admit(
                self.handle, self._last_id, i32(tokens), b"", num_compute, 0, False, 0
            )
        assert len(answer) == 3, answer
        return self._last_id

    def fork(self, parent: int) -> int:
        """Fork a sequence; return the new id."""
        self._last_id += 1
        with self.step():
            answer = self.pool.fork(self.handle, i64([parent]), i64([self._last_id]))
        assert answer[1] is None, answer
        return self._last_id

    def append(self, sequence_id: int, first: int, tokens: list[int]) -> None:
        """Write further slots, whose tokens are known."""
        num = i32([len(tokens)])
        with self.step():
            answer = self.pool.append(
                self.handle, i64([sequence_id]), i32([first]), num, num, i32(tokens), b""
            )
        assert answer[1] is None, answer

    def free(self, *sequence_ids: int) -> None:
        """Free sequences in the order given."""
        with self.step():
            assert self.pool.free(self.handle, i64(sequence_ids))[1] is None

    def cache(self, tokens: list[int]) -> None:
        """Leave the tokens' blocks cached and idle."""
        self.free(self.write(tokens))

    def end(self) -> None:
        """End the session: others may use its blocks at once."""
        self.pool.end_session(self.handle)
        self.pool.session_fenced(self.handle)

    def num_cached(self, tokens: list[int]) -> tuple[int, int]:
        """Return the leading blocks cached on the device, and in the host tier after those."""
        num_device, num_host, _ = self.pool.match(self.root, i32(tokens))
        return num_device, num_host

    def priorities(self, tokens: list[int]) -> list[int]:
        """Return the priorities of the leading cached blocks."""
        return list(self.pool.explain(self.root, i32(tokens))[8])
