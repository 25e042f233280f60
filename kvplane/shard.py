"""The part of a pool that one data plane process holds: a range of layers and one of KV heads.

Shards are copies of each other where they hold the same part: a model on more processes than it has
KV heads. Copies are numbered, and each computes its own query heads (``QueryHeads``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvplane.errors import InvalidRequestError
from kvplane.layout import ELEMENT_BYTES, Layout
from kvplane.wire.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a pool's layers and KV heads that one process holds; see the message of the same
    name. ``whole`` is the usual one.

    KV heads are counted in the layer group that has most of them; of a group with fewer a shard
    holds the same share.
    """

    index: int
    num_shards: int
    first_layer: int
    num_layers: int
    first_kv_head: int
    num_kv_heads: int
    copy: int = 0

    @classmethod
    def whole(cls, layout: Layout) -> Shard:
        """Return the only shard of an undivided pool."""
        first = min(group.layers[0] for group in layout.groups)
        num_layers = max(group.layers[-1] for group in layout.groups) + 1 - first
        return cls(0, 1, first, num_layers, 0, most_kv_heads(layout))

    @classmethod
    def of_heads(cls, layout: Layout, index: int, num_shards: int) -> Shard:
        """Return one of ``num_shards`` that divide the KV heads evenly (tensor parallel). Where
        there are more shards than heads, neighbouring shards hold copies of one head.

        Raises InvalidRequestError when neither number divides the other.
        """
        whole, num_heads = cls.whole(layout), most_kv_heads(layout)
        if num_shards < 1 or (num_heads % num_shards and num_shards % num_heads):
            raise InvalidRequestError(
                f"must divide the model's {num_heads} KV heads, or be a multiple of them",
                field="num_shards",
            )
        num_held = max(1, num_heads // num_shards)
        num_copies = max(1, num_shards // num_heads)
        first = index // num_copies * num_held
        return cls(
            index,
            num_shards,
            whole.first_layer,
            whole.num_layers,
            first,
            num_held,
            index % num_copies,
        )

    @property
    def part(self) -> tuple[int, int, int, int]:
        """Return a tuple that identifies the part: equal for copies of each other, and no
        others.
        """
        return self.first_layer, self.num_layers, self.first_kv_head, self.num_kv_heads

    def layers(self, layout: Layout) -> tuple[int, ...]:
        """Return the model's layers that the shard runs, ascending, over all groups. Raises
        InvalidRequestError naming a field of ``shard`` when it does not fit the layout.
        """
        _require(self.num_shards >= 1 and 0 <= self.index < self.num_shards, "index")
        _require(self.num_layers >= 1, "num_layers")
        _require(
            self.first_kv_head >= 0
            and self.num_kv_heads >= 1
            and self.first_kv_head + self.num_kv_heads <= most_kv_heads(layout),
            "num_kv_heads",
        )
        _require(0 <= self.copy < self.num_shards, "copy")
        held: list[int] = []
        for i, group in enumerate(layout.groups):
            # A group without layers here would have empty blocks and tables that nobody reads.
            _require(len(self.group_layers(layout, i)) >= 1, "first_layer")
            ends = (self.first_kv_head, self.first_kv_head + self.num_kv_heads)
            remainders = [end * group.num_kv_heads % most_kv_heads(layout) for end in ends]
            _require(not any(remainders), "num_kv_heads")
            if i != layout.state_group:
                held += self.group_layers(layout, i)
        return tuple(sorted(held))

    def group_layers(self, layout: Layout, group: int) -> tuple[int, ...]:
        """Return the model's layers of a group that the shard holds, ascending."""
        end = self.first_layer + self.num_layers
        return tuple(x for x in layout.groups[group].layers if self.first_layer <= x < end)

    def state_layers(self, layout: Layout) -> tuple[int, ...]:
        """Return the model's layers whose states the shard keeps, ascending."""
        return () if layout.state_group is None else self.group_layers(layout, layout.state_group)

    def kv_heads(self, layout: Layout, group: int) -> range:
        """Return the KV heads of a group's layers that the shard holds."""
        num_heads, most = layout.groups[group].num_kv_heads, most_kv_heads(layout)
        end = self.first_kv_head + self.num_kv_heads
        return range(self.first_kv_head * num_heads // most, end * num_heads // most)

    def block_bytes(self, layout: Layout, group: int = 0) -> int:
        """Return the bytes of a group's block in this shard: pages of its layers and heads."""
        num_heads = len(self.kv_heads(layout, group))
        page = layout.groups[group].page_shape(num_heads, layout.block_size_tokens)
        num_layers = len(self.group_layers(layout, group))
        return num_layers * math.prod(page) * ELEMENT_BYTES[layout.stored_dtype(group)]

    @classmethod
    def from_proto(cls, message: pb.Shard) -> Shard:
        """Parse a message; ``layers`` checks that it fits a layout."""
        return cls(
            index=message.index,
            num_shards=message.num_shards,
            first_layer=message.first_layer,
            num_layers=message.num_layers,
            first_kv_head=message.first_kv_head,
            num_kv_heads=message.num_kv_heads,
            copy=message.copy,
        )

    def to_proto(self) -> pb.Shard:
        """Convert the shard to its message."""
        return pb.Shard(
            index=self.index,
            num_shards=self.num_shards,
            first_layer=self.first_layer,
            num_layers=self.num_layers,
            first_kv_head=self.first_kv_head,
            num_kv_heads=self.num_kv_heads,
            copy=self.copy,
        )


def most_kv_heads(layout: Layout) -> int:
    """Return the number of KV heads, or of parts of a state, in the layer group with most; opaque
    pages count as one.
    """
    return max(1, *(group.num_kv_heads for group in layout.groups))


@dataclass(frozen=True, slots=True)
class QueryHeads:
    """Which query heads of a layer a shard computes: those of its KV heads, or a part of each
    where the shard has copies.

    A KV head's query heads follow each other, as everywhere in grouped attention. Shards keep the
    model's order.
    """

    kv_heads: range
    num_model_kv_heads: int
    copy: int
    num_copies: int

    @classmethod
    def of(cls, shard: Shard, shards: Sequence[Shard], layout: Layout, group: int) -> QueryHeads:
        """Return the query heads of ``shard``, one of the pool's ``shards``, in a group's
        layers.
        """
        num_copies = sum(other.part == shard.part for other in shards)
        num_kv_heads = layout.groups[group].num_kv_heads
        return cls(shard.kv_heads(layout, group), num_kv_heads, shard.copy, num_copies)

    def ranges(self, num_heads: int) -> list[range]:
        """Return the query heads to compute, of the model's ``num_heads``, ascending. Raises
        InvalidRequestError when some copy would have none.
        """
        of_kv_head, rest = divmod(num_heads, self.num_model_kv_heads)
        if rest or of_kv_head < self.num_copies:
            raise InvalidRequestError(
                f"has {num_heads} heads: must be a multiple of the {self.num_model_kv_heads} KV "
                f"heads, of at least the {self.num_copies} copies of each",
                field="query",
            )
        first = self.copy * of_kv_head // self.num_copies
        last = (self.copy + 1) * of_kv_head // self.num_copies
        if self.num_copies == 1:  # all of neighbouring KV heads
            return [range(self.kv_heads.start * of_kv_head, self.kv_heads.stop * of_kv_head)]
        return [range(x * of_kv_head + first, x * of_kv_head + last) for x in self.kv_heads]


def _require(ok: bool, field: str) -> None:
    if not ok:
        raise InvalidRequestError("must fit the layout", field=f"shard.{field}")
