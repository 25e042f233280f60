"""The prefix index: exact, whatever was published and evicted, and no root meets another."""

from __future__ import annotations

import struct
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from control_plane.blocks.prefix_index import (
    NO_BLOCK,
    PrefixIndex,
    chained_hash,
    root_hash,
)

SIZE = 2  # tokens of a block
NUM_BLOCKS = 64

Prefix = tuple[bytes, ...]


def block_of(token: int) -> bytes:
    return struct.pack("<2i", token, token)


def publish_all(index: PrefixIndex, root: bytes, prefix: Prefix, blocks: list[int]) -> list[int]:
    entered, _, _ = index.publish(root, NO_BLOCK, b"".join(prefix), blocks)
    return entered


PREFIXES = st.lists(st.integers(0, 2).map(block_of), min_size=1, max_size=4).map(tuple)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([b"ann", b"bob"]), PREFIXES),
        st.integers(0, NUM_BLOCKS - 1),
    ),
    max_size=16,
)


@given(actions=ACTIONS, sought=PREFIXES)
def test_it_finds_what_a_dict_of_whole_prefixes_finds(
    actions: list[tuple[bytes, Prefix] | int], sought: Prefix
) -> None:
    index = PrefixIndex(NUM_BLOCKS, SIZE)
    model: dict[tuple[bytes, Prefix], int] = {}
    new_block = count()
    for action in actions:
        if isinstance(action, int):
            held = action in model.values()
            assert index.evict([action]) == held
            model = {key: block for key, block in model.items() if block != action}
            continue
        root, prefix = action
        blocks = [next(new_block) for _ in prefix]
        entered = publish_all(index, root, prefix, blocks)
        for i, block in enumerate(blocks):
            model.setdefault((root, prefix[: i + 1]), block)
        assert entered == [block for block in blocks if block in model.values()]
    for root in (b"ann", b"bob"):
        found = []
        while (block := model.get((root, sought[: len(found) + 1]))) is not None and (
            len(found) < len(sought)
        ):
            found.append(block)
        tokens = b"".join(sought) + b"tail"
        assert index.match(root, tokens) == found
    assert sorted(index.published()) == sorted((root, b) for (root, _), b in model.items())


def test_a_prefix_goes_on_from_the_block_that_holds_its_parent() -> None:
    index = PrefixIndex(NUM_BLOCKS, SIZE)
    assert index.publish(b"ann", NO_BLOCK, block_of(1), [7]) == ([7], [], 7)
    assert index.publish(b"ann", NO_BLOCK, block_of(1), [8]) == ([], [], 7), "8 stays private"
    assert index.publish(b"ann", 7, block_of(2) + block_of(3), [9, 4]) == ([9, 4], [], 4)
    assert index.match(b"ann", block_of(1) + block_of(2) + block_of(3)) == [7, 9, 4]


def test_its_columns_tell_of_each_block_what_it_holds() -> None:
    index = PrefixIndex(NUM_BLOCKS, SIZE)
    publish_all(index, b"ann", (block_of(1), block_of(2)), [5, 6])
    first = chained_hash(root_hash(b"ann"), block_of(1))
    assert index.token_ids([6, 5]) == [block_of(2), block_of(1)]
    assert index.hashes([5, 6]) == [first, chained_hash(first, block_of(2))]
    assert index.parents([5, 6]) == [NO_BLOCK, 5]


def test_an_evicted_prefix_stays_while_a_descendant_has_a_block() -> None:
    index = PrefixIndex(NUM_BLOCKS, SIZE)
    prefix = (block_of(1), block_of(2), block_of(3))
    publish_all(index, b"ann", prefix, [0, 1, 2])
    index.evict([0])
    assert index.match(b"ann", b"".join(prefix)) == []
    assert publish_all(index, b"ann", prefix, [3, 4, 5]) == [3], "the others have their blocks"
    assert index.match(b"ann", b"".join(prefix)) == [3, 1, 2]
    index.evict([2, 1, 3])
    assert list(index.walk()) == []
