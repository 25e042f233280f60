"""Tests a router's index of a pool: the prefixes that its feed reported, and nothing else."""

from __future__ import annotations

import random
from array import array

from benchmarks.replay.cache import BLOCK_SIZE_TOKENS, Cache, Prompts
from kvplane.integrations.router.pool_index import PoolIndex
from kvplane.prefixes import BlocksRemoved, BlocksStored, IndexCleared, StoredBlock

DEVICE, HOST = 1, 2


def block(name: bytes, parent: bytes, tokens: list[int], tier: int = DEVICE) -> StoredBlock:
    return StoredBlock(name * 16, parent * 16, array("i", tokens), tier)


def index_of_two() -> PoolIndex:
    index = PoolIndex(2)
    index.apply(BlocksStored((block(b"a", b"\0", [1, 2]), block(b"b", b"a", [3, 4]))))
    return index


def test_whole_blocks_at_the_beginning_are_found() -> None:
    index = index_of_two()
    assert index.num_cached_tokens([1, 2, 3, 4, 5]) == 4
    assert index.num_cached_tokens([1, 2, 3, 5, 5]) == 2
    assert index.num_cached_tokens([3, 4, 5]) == 0
    assert index.num_cached_tokens([]) == 0


def test_the_last_token_is_computed_whatever_is_cached() -> None:
    assert index_of_two().num_cached_tokens([1, 2, 3, 4]) == 2


def test_a_block_is_found_until_it_has_left_every_tier() -> None:
    index = index_of_two()
    index.apply(BlocksStored((block(b"b", b"a", [3, 4], HOST),)))
    index.apply(BlocksRemoved(((b"b" * 16, DEVICE),)))
    assert index.num_cached_tokens([1, 2, 3, 4, 5]) == 4
    index.apply(BlocksRemoved(((b"b" * 16, HOST), (b"x" * 16, HOST))))
    assert index.num_cached_tokens([1, 2, 3, 4, 5]) == 2
    index.apply(IndexCleared())
    assert index.num_cached_tokens([1, 2, 3, 4, 5]) == 0
    assert index.num_blocks == 0


def test_it_finds_what_the_control_plane_finds() -> None:
    draw, prompts, index = random.Random(3), Prompts(), PoolIndex(BLOCK_SIZE_TOKENS)
    pool = Cache(24, "lru", prompts)
    pool.follow()
    num_found = 0
    for i in range(600):
        for event in pool.changes():
            index.apply(event)
        ids = [draw.randint(1, 3) * 100 + depth for depth in range(draw.randint(1, 9))]
        found = index.num_cached_tokens(array("i", prompts.tokens(ids)))
        assert found == BLOCK_SIZE_TOKENS * pool.run(float(i), ids)
        num_found += found
    assert num_found
    assert index.num_blocks <= 24
