"""The format of a file: a header that identifies the block, and the block's bytes.

    magic 8 │ part, tenant, root, parent, name: 32 each │ generation 8 │ length 8
            │ XXH3-128 of the data │ XXH3-64 of the header so far │ data

Integers are little-endian. ``parent`` is the root's name for a prompt's first block.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from data_plane.files.names import NAME_BYTES

_MAGIC: Final = b"kvpfile1"
_FIELDS: Final = struct.Struct("<8s32s32s32s32s32sqq16s")
_CHECKSUM: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _FIELDS.size + _CHECKSUM.size


class FileMissError(Exception):
    """Raised when a block cannot be read from its file. ``reason``: "GONE", "TORN" (of another
    length than the header says), "DAMAGED" (a checksum is wrong), "MISMATCH" (another block's) or
    "UNREADABLE".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Identifies the block that a file holds. All fields except the generation must match when it
    is read.

    ``generation``: the block's in the pool when it was read there. ``length``: of the data, in
    bytes.
    """

    part: bytes
    tenant: bytes
    root: bytes
    parent: bytes
    name: bytes
    length: int
    generation: int = 0


def encode_header(key: BlockKey, data: bytes) -> bytes:
    """Return the header of a file for a block with this key and data."""
    fields = _FIELDS.pack(
        _MAGIC,
        *(key.part, key.tenant, key.root, key.parent, key.name),
        key.generation,
        key.length,
        xxhash.xxh3_128_digest(data),
    )
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def read_header(header: bytes | memoryview) -> tuple[BlockKey, bytes]:
    """Parse a header; returns the key and the data's checksum. Raises FileMissError."""
    if len(header) < HEADER_BYTES:
        raise FileMissError("TORN")
    fields = header[: _FIELDS.size]
    magic, part, tenant, root, parent, name, generation, length, checksum = _FIELDS.unpack(fields)
    (said,) = _CHECKSUM.unpack_from(header, _FIELDS.size)
    if xxhash.xxh3_64_intdigest(fields) != said:
        raise FileMissError("DAMAGED")
    if magic != _MAGIC:
        raise FileMissError("MISMATCH")
    assert len(name) == NAME_BYTES
    return BlockKey(part, tenant, root, parent, name, length, generation), checksum


def read_data(content: memoryview, wanted: BlockKey) -> memoryview:
    """Return a file's data if the file is of the block ``wanted``; else raise FileMissError."""
    has, checksum = read_header(content[:HEADER_BYTES])
    if (has.part, has.tenant, has.root, has.parent, has.name, has.length) != (
        *(wanted.part, wanted.tenant, wanted.root, wanted.parent, wanted.name),
        wanted.length,
    ):
        raise FileMissError("MISMATCH")
    data = content[HEADER_BYTES:]
    if len(data) != has.length:
        raise FileMissError("TORN")
    if xxhash.xxh3_128_digest(data) != checksum:
        raise FileMissError("DAMAGED")
    return data
