"""An operation looks at as many blocks and index entries in a large pool as in a small one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kvplane_blocks import LayerGroup

from tests.helpers.native.index_writer import BLOCK_TOKENS, Writer
from tests.helpers.native.native_pool import OneGroup, i32

SMALL, LARGE = 1_000, 100_000
PROMPT_BLOCKS = 100
NUM_FREE = 250  # blocks, when a pool is not full


def prompt(seed: int, num_blocks: int = PROMPT_BLOCKS) -> list[int]:
    """Tokens that no prompt of another seed begins with."""
    first = 1 + seed * PROMPT_BLOCKS * BLOCK_TOKENS
    return list(range(first, first + num_blocks * BLOCK_TOKENS))


def filled(num_blocks: int, policy: str, num_free: int) -> Writer:
    """A session of a pool in which all but some blocks are cached."""
    writer = Writer(OneGroup(LayerGroup(BLOCK_TOKENS, num_blocks, 0, eviction_policy=policy)))
    num_cached = num_blocks - num_free
    for seed in range(num_cached // PROMPT_BLOCKS):
        writer.cache(prompt(seed))
    if rest := num_cached % PROMPT_BLOCKS:
        writer.cache(prompt(num_blocks, rest))
    return writer


def operations(writer: Writer) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is done, one after another."""
    pool, new = writer.pool, 10**6
    ids: list[int] = []

    def write(tokens: list[int]) -> None:
        ids.append(writer.write(tokens))

    yield "admit a prompt that is cached", lambda: write(prompt(1))
    yield "admit it once more", lambda: write(prompt(1))
    yield "admit a prompt that is not", lambda: write(prompt(new))
    yield "admit one that begins as another", lambda: write([*prompt(2, 50), *prompt(new + 1, 50)])
    length = PROMPT_BLOCKS * BLOCK_TOKENS
    yield "decode", lambda: writer.append(ids[2], length, [1])
    yield "decode in the same block", lambda: writer.append(ids[2], length + 1, [1])
    yield "fork", lambda: ids.append(writer.fork(ids[2]))
    yield "decode in a shared block", lambda: writer.append(ids[4], length + 2, [2])
    yield "free", lambda: writer.free(*ids)
    yield "forget", lambda: pool.forget(writer.root, i32(prompt(1)), False, 100)
    yield "take apart", lambda: pool.forget_some(10**6)
    writer.late = True
    yield "admit before an abort", lambda: write(prompt(new + 2))
    yield "abort", lambda: pool.abort(writer.handle, pool.last_plan(writer.handle) + 1)
    writer.late = False
    yield "send whole tables", lambda: writer.free(ids[-1])


def costs(num_blocks: int, policy: str, num_free: int) -> list[tuple[str, int]]:
    """How often each operation looks at a block or an entry."""
    writer = filled(num_blocks, policy, num_free)
    counted = []
    for name, operation in operations(writer):
        before = writer.pool.num_touched
        operation()
        counted.append((name, writer.pool.num_touched - before))
    writer.pool.check_integrity()
    return counted


@pytest.mark.parametrize(
    ("policy", "num_free"), [("lru", NUM_FREE), ("lru", 0), ("reuse-rate", NUM_FREE)]
)
def test_an_operation_touches_as_much_in_a_large_pool(policy: str, num_free: int) -> None:
    small = costs(SMALL, policy, num_free)
    assert costs(LARGE, policy, num_free) == small
    touched = dict(small)
    assert touched["decode in the same block"] <= 2
    assert PROMPT_BLOCKS <= touched["admit a prompt that is cached"] < 8 * PROMPT_BLOCKS


def test_so_it_does_where_the_policy_has_learned_from_more_prompts() -> None:
    """Other blocks are evicted then, of prompts with a few hashes more or less to compute."""
    large, small = (dict(costs(num_blocks, "reuse-rate", 0)) for num_blocks in (LARGE, SMALL))
    for name, num in small.items():
        assert abs(large[name] - num) <= 4, name
