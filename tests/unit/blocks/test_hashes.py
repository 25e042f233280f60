"""Hashes of prefixes are xxh3-128, as the Python package of xxHash computes it."""

from __future__ import annotations

import random

import kvplane_blocks
import pytest
import xxhash

# xxh3 has other code for each of these ranges, and so does the join of two parts.
LENGTHS = (*range(300), 511, 512, 513, 1024, 2030, 2031, 2032, 2033, 2048, 4096, 100_000)


@pytest.mark.parametrize("num_bytes", LENGTHS)
def test_hashes_are_those_of_xxhash(num_bytes: int) -> None:
    data, parent = random.randbytes(num_bytes), random.randbytes(16)
    root = b"kvplane.v1.tenant\0" + data
    assert kvplane_blocks.root_hash(data) == xxhash.xxh3_128_digest(root)
    assert kvplane_blocks.chained_hash(parent, data) == xxhash.xxh3_128_digest(parent + data)


@pytest.mark.parametrize("num_bytes", [0, 15, 17, 1000])
def test_a_parent_that_is_no_hash_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"parent_hash must have 16 bytes, has {num_bytes}"):
        kvplane_blocks.chained_hash(bytes(num_bytes), bytes(64))


@pytest.mark.parametrize("block_size", [1, 16, 1024])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 2048, 2050])
def test_hashes_of_a_prompt_are_those_of_its_full_blocks(block_size: int, num_tokens: int) -> None:
    root, tokens = random.randbytes(40), random.randbytes(4 * num_tokens)
    hashes = [kvplane_blocks.root_hash(root)]
    for i in range(num_tokens // block_size):
        block = tokens[4 * block_size * i : 4 * block_size * (i + 1)]
        hashes.append(kvplane_blocks.chained_hash(hashes[-1], block))
    expected = b"".join(hashes[1:])
    assert kvplane_blocks.prompt_hashes(root, tokens, block_size) == expected


def test_blocks_of_no_tokens_have_no_hashes() -> None:
    with pytest.raises(ValueError, match="block_size_tokens must be at least 1"):
        kvplane_blocks.prompt_hashes(b"root", bytes(64), 0)


@pytest.mark.parametrize("block_size", [17, 2**61, 2**62, 2**62 + 1, 2**63 - 1])
def test_a_block_of_more_tokens_than_there_are_is_not_full(block_size: int) -> None:
    assert kvplane_blocks.prompt_hashes(b"root", bytes(64), block_size) == b""
