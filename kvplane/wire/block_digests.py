"""Digests of blocks: whether two processes know the same of a range, without telling it.

    block    generation   published   parent, its generation   scope   hash     tokens
    record   int64        uint8       int32, int64             16      16       int32 each
             └ of the host tier this alone                     └ zeros where it is not published

The records of 64 blocks, in their order, are hashed by BLAKE2b to 16 bytes, keyed with a salt that
the data plane chooses at random when it starts. So tokens that a tenant chooses, who knows neither
salt nor digests, cannot make two states look alike; nor could they if the salt were known and the
digest longer. The tokens are hashed too, not only the prefix's own hash, which is a fast one.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Final

RANGE_BLOCKS: Final = 64
DIGEST_BYTES: Final = 16
SALT_BYTES: Final = 16
# Of one message: what takes some milliseconds to compare.
MAX_DIGESTS: Final = 256
_GENERATION_BYTES: Final = 8
_PUBLICATION_BYTES: Final = 1 + 4 + 8 + DIGEST_BYTES + 16  # and its tokens


def num_ranges(num_blocks: int) -> int:
    """Ranges of a tier."""
    return -(-num_blocks // RANGE_BLOCKS)


def blocks_of(number: int, num_blocks: int) -> tuple[int, int]:
    """The first block of a range of a tier of ``num_blocks``, and the end of its blocks."""
    begin = number * RANGE_BLOCKS
    return begin, min(begin + RANGE_BLOCKS, num_blocks)


def record_bytes(block_size_tokens: int, *, is_device: bool) -> int:
    """Bytes of a block's record."""
    if not is_device:
        return _GENERATION_BYTES
    return _GENERATION_BYTES + _PUBLICATION_BYTES + 4 * block_size_tokens


def scope_of(tenant: str, namespace: str) -> bytes:
    """Stands for both in records."""
    names = [name.encode() for name in (tenant, namespace)]
    text = b"".join(len(name).to_bytes(4, "little") + name for name in names)
    return blake2b(text, digest_size=DIGEST_BYTES).digest()


def digests_of(records: bytes, block_bytes: int, salt: bytes) -> Iterator[bytes]:
    """The digest of each range of ``records``, which begin with the first block of a range and have
    ``block_bytes`` for each block.
    """
    view, size = memoryview(records), RANGE_BLOCKS * block_bytes
    for begin in range(0, len(view), size):
        yield digest_of(view[begin : begin + size], salt)


def digest_of(records: bytes | memoryview, salt: bytes) -> bytes:
    """The digest of the records of one range."""
    return blake2b(records, digest_size=DIGEST_BYTES, key=salt).digest()
