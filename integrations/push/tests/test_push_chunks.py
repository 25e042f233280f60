"""How blocks are cut into chunks for a push: everything once, in order, and not too large."""

from __future__ import annotations

from collections import Counter

import pytest

from kvplane.errors import ChecksumMismatchError
from kvplane.integrations.push import chunks
from kvplane.layout import LayerGroup, Layout
from kvplane.shard import Shard

FULL = LayerGroup("full", (0, 2, 4), num_kv_heads=4, head_size=64)
NARROW = LayerGroup("narrow", (1, 3), num_kv_heads=2, head_size=64, sliding_window_tokens=64)
LAYOUT = Layout("m", 16, "float32", "float32", (FULL, NARROW))
SHARDS = [Shard.whole(LAYOUT), Shard.of_heads(LAYOUT, 1, 2), Shard(0, 2, 0, 3, 0, 4)]
PAGE_BYTES = 2 * 4 * 16 * 64 * 4


@pytest.mark.parametrize("shard", SHARDS, ids=["whole", "by heads", "by layers"])
@pytest.mark.parametrize("chunk_bytes", [1, PAGE_BYTES, 2 * PAGE_BYTES, 10 * PAGE_BYTES, 1 << 30])
def test_each_block_of_each_layer_is_sent_once_and_no_gap_is_left(
    shard: Shard, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    seen: Counter[tuple[int, int]] = Counter()  # the next block of each group and layer
    sent_bytes = 0
    for place in chunks.cut(LAYOUT, shard, 7, range(3, 12)):
        assert place.sequence_id == 7
        held = shard.group_layers(LAYOUT, place.group)
        first = held.index(place.first_layer)
        layers = held[first : first + place.num_layers]
        assert len(layers) == place.num_layers >= 1
        for layer in layers:
            key = place.group, layer
            assert place.first_block == 3 + seen[key], "a gap, or a block twice"
            seen[key] += place.num_blocks
        layer_bytes = shard.block_bytes(LAYOUT, place.group) // len(held)
        chunk = layer_bytes * place.num_layers * place.num_blocks
        assert chunk <= chunks.max_chunk_bytes(LAYOUT, shard)
        sent_bytes += chunk
    groups = range(len(LAYOUT.groups))
    wanted = {(group, layer) for group in groups for layer in shard.group_layers(LAYOUT, group)}
    assert seen == dict.fromkeys(wanted, 9)
    assert sent_bytes == chunks.num_bytes(LAYOUT, shard, 9)


def test_a_checksum_covers_the_data_and_each_number_of_the_place() -> None:
    place = next(chunks.cut(LAYOUT, SHARDS[0], 7, range(3, 12)))
    chunk = chunks.chunk_of(place, b"some bytes")
    chunks.check(chunk)
    for name in ("group", "first_layer", "num_layers", "first_block", "num_blocks"):
        other = chunks.chunk_of(replace_field(place, name), b"some bytes")
        assert other.checksum != chunk.checksum, name
        setattr(other, name, getattr(chunk, name))
        with pytest.raises(ChecksumMismatchError):
            chunks.check(other)
    chunk.data = b"some Bytes"
    with pytest.raises(ChecksumMismatchError):
        chunks.check(chunk)


def replace_field(place: chunks.BlockRange, name: str) -> chunks.BlockRange:
    return place._replace(**{name: getattr(place, name) + 1})
