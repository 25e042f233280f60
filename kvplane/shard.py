"""The part of a pool that one data plane process holds: a range of layers and one of KV heads.

A pool of several layer groups has one shard, which holds all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvplane.errors import InvalidRequestError
from kvplane.layout import ELEMENT_BYTES, Layout
from kvplane.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class Shard:
    """What one process holds; see the message of the same name. ``whole`` is the usual one."""

    index: int
    num_shards: int
    first_layer: int
    num_layers: int
    first_kv_head: int
    num_kv_heads: int

    @classmethod
    def whole(cls, layout: Layout) -> Shard:
        """The only shard of an undivided pool."""
        first = min(group.layers[0] for group in layout.groups)
        num_layers = max(group.layers[-1] for group in layout.groups) + 1 - first
        return cls(0, 1, first, num_layers, 0, max(g.num_kv_heads for g in layout.groups))

    def layers(self, layout: Layout) -> tuple[int, ...]:
        """The model layers held, ascending, over all groups. Raises InvalidRequestError when the
        shard does not fit the layout.
        """
        _require(self.num_shards >= 1 and 0 <= self.index < self.num_shards, "index")
        _require(self.num_layers >= 1, "num_layers")
        if len(layout.groups) > 1:
            _require(self == Shard.whole(layout), "num_shards")
        _require(
            self.first_kv_head >= 0
            and self.num_kv_heads >= 1
            and self.first_kv_head + self.num_kv_heads
            <= max(group.num_kv_heads for group in layout.groups),
            "num_kv_heads",
        )
        groups = range(len(layout.groups))
        held = sorted(layer for group in groups for layer in self.group_layers(layout, group))
        _require(len(held) >= 1, "first_layer")
        return tuple(held)

    def group_layers(self, layout: Layout, group: int) -> tuple[int, ...]:
        """The model layers of a group that are held, ascending."""
        end = self.first_layer + self.num_layers
        return tuple(x for x in layout.groups[group].layers if self.first_layer <= x < end)

    def kv_heads(self, layout: Layout, group: int) -> range:
        """The KV heads of a group's layers that are held."""
        end = self.first_kv_head + self.num_kv_heads
        return range(self.first_kv_head, min(end, layout.groups[group].num_kv_heads))

    def block_bytes(self, layout: Layout, group: int = 0) -> int:
        """Bytes of one block of a group in this shard: K and V of the layers and heads held."""
        num_heads = len(self.kv_heads(layout, group))
        page = layout.groups[group].page_shape(num_heads, layout.block_size_tokens)
        num_layers = len(self.group_layers(layout, group))
        return num_layers * math.prod(page) * ELEMENT_BYTES[layout.kv_dtype]

    @classmethod
    def from_proto(cls, message: pb.Shard) -> Shard:
        """From a message; ``layers`` checks that it fits a layout."""
        return cls(
            index=message.index,
            num_shards=message.num_shards,
            first_layer=message.first_layer,
            num_layers=message.num_layers,
            first_kv_head=message.first_kv_head,
            num_kv_heads=message.num_kv_heads,
        )

    def to_proto(self) -> pb.Shard:
        """As a message."""
        return pb.Shard(
            index=self.index,
            num_shards=self.num_shards,
            first_layer=self.first_layer,
            num_layers=self.num_layers,
            first_kv_head=self.first_kv_head,
            num_kv_heads=self.num_kv_heads,
        )


def _require(ok: bool, field: str) -> None:
    if not ok:
        raise InvalidRequestError("must fit the layout", field=f"shard.{field}")
