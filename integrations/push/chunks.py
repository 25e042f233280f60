"""Blocks of a sequence cut into chunks, and what a chunk's checksum covers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import xxhash

from data_plane.blocks_from_outside import BlockRange
from kvplane.errors import ChecksumMismatchError
from kvplane.layout import Layout
from kvplane.shard import Shard

from . import push_pb2 as pb

CHUNK_BYTES: Final = 2 * 1024 * 1024
_PLACE: Final = struct.Struct("<5q")


def cut(layout: Layout, shard: Shard, sequence_id: int, blocks: range) -> Iterator[BlockRange]:
    """The table entries ``blocks`` of a sequence, in all groups and layers of a shard, in pieces of
    about ``CHUNK_BYTES``. In each layer, blocks ascend without a gap.
    """
    for group in range(len(layout.groups)):
        layers = shard.group_layers(layout, group)
        layer_bytes = shard.block_bytes(layout, group) // len(layers)
        num_layers = min(len(layers), max(1, CHUNK_BYTES // layer_bytes))
        num_blocks = max(1, CHUNK_BYTES // (layer_bytes * len(layers)))
        for first in range(blocks.start, blocks.stop, num_blocks):
            num = min(num_blocks, blocks.stop - first)
            for i in range(0, len(layers), num_layers):
                some = len(layers[i : i + num_layers])
                yield BlockRange(sequence_id, first, num, group, layers[i], some)


def num_bytes(layout: Layout, shard: Shard, num_blocks: int) -> int:
    """Bytes of table entries in all groups and layers of a shard."""
    groups = range(len(layout.groups))
    return num_blocks * sum(shard.block_bytes(layout, group) for group in groups)


def max_chunk_bytes(layout: Layout, shard: Shard) -> int:
    """An upper bound on the data of a chunk: one block of one layer may be more than the usual."""
    of_layers = (
        shard.block_bytes(layout, group) // len(shard.group_layers(layout, group))
        for group in range(len(layout.groups))
    )
    return max(CHUNK_BYTES, *of_layers)


def chunk_of(blocks: BlockRange, data: bytes | memoryview) -> pb.BlockChunk:
    """A chunk as it is sent."""
    chunk = pb.BlockChunk(
        group=blocks.group,
        first_layer=blocks.first_layer,
        num_layers=blocks.num_layers,
        first_block=blocks.first_block,
        num_blocks=blocks.num_blocks,
        data=bytes(data),
    )
    chunk.checksum = _checksum(chunk, chunk.data)
    return chunk


def check(chunk: pb.BlockChunk) -> None:
    """Raise ChecksumMismatchError unless the chunk is what its sender made."""
    if _checksum(chunk, chunk.data) != chunk.checksum:
        raise ChecksumMismatchError(
            f"blocks {chunk.first_block} to {chunk.first_block + chunk.num_blocks - 1} changed on "
            "the way: send them again, by another ticket",
            field="chunk.checksum",
        )


def _checksum(chunk: pb.BlockChunk, data: bytes) -> int:
    place = (
        *(chunk.group, chunk.first_layer, chunk.num_layers),
        *(chunk.first_block, chunk.num_blocks),
    )
    digest = xxhash.xxh3_64(_PLACE.pack(*place))
    digest.update(data)
    return digest.intdigest()
