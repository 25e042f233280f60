"""The part of a pool that one data plane process holds: a range of layers and one of KV heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvplane.errors import InvalidRequestError
from kvplane.layout import ELEMENT_BYTES, LayerGroup, Layout
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
        group = only_group(layout)
        num_layers = group.layers[-1] + 1 - group.layers[0]
        return cls(0, 1, group.layers[0], num_layers, 0, group.num_kv_heads)

    def layers(self, layout: Layout) -> tuple[int, ...]:
        """The model layers held, ascending. Raises InvalidRequestError when the shard does not
        fit the layout.
        """
        group = only_group(layout)
        _require(self.num_shards >= 1 and 0 <= self.index < self.num_shards, "index")
        _require(self.num_layers >= 1, "num_layers")
        _require(
            self.first_kv_head >= 0
            and self.num_kv_heads >= 1
            and self.first_kv_head + self.num_kv_heads <= group.num_kv_heads,
            "num_kv_heads",
        )
        end = self.first_layer + self.num_layers
        held = tuple(layer for layer in group.layers if self.first_layer <= layer < end)
        _require(len(held) >= 1, "first_layer")
        return held

    def block_bytes(self, layout: Layout) -> int:
        """Bytes of one block of this shard: K and V of the layers and heads held."""
        page = only_group(layout).page_shape(self.num_kv_heads, layout.block_size_tokens)
        return len(self.layers(layout)) * math.prod(page) * ELEMENT_BYTES[layout.kv_dtype]

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


def only_group(layout: Layout) -> LayerGroup:
    """The layout's one layer group. Raises InvalidRequestError when there are more."""
    if len(layout.groups) != 1:
        raise InvalidRequestError("must be exactly one in this version", field="layout.groups")
    return layout.groups[0]


def _require(ok: bool, field: str) -> None:
    if not ok:
        raise InvalidRequestError("must fit the layout", field=f"shard.{field}")
