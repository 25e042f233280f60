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
