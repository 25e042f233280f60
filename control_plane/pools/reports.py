"""Passes the block reports of a pool's shards to the native core, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvplane_blocks import ColumnError, LayerGroup, Rebuild

from control_plane.pools.publications import reported_root
from kvplane.errors import InvalidRequestError
from kvplane.layout import Layout
from kvplane.wire import columns
from kvplane.wire.columns import INT32
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import types_pb2 as tpb

TIERS: Final = (tpb.TIER_DEVICE, tpb.TIER_HOST)


class Reports:
    """Collects the block reports of all shards, from which the pool's metadata is rebuilt."""

    __slots__ = ("_fingerprint", "rebuilds")

    def __init__(self, layout: Layout, num_shards: int) -> None:
        self.rebuilds: list[Rebuild] = []  # by layer group
        for group in range(len(layout.groups)):
            whole = self.rebuilds[layout.whole_group] if group == layout.state_group else None
            self.rebuilds.append(Rebuild(layout.block_size_tokens, num_shards, whole))
        self._fingerprint = layout.fingerprint

    def start(self, shard_index: int, num_blocks: Sequence[dict[tpb.Tier, int]]) -> None:
        """Begin a shard's report, and drop its earlier one. ``num_blocks``: the shard's blocks of
        each layer group and tier.
        """
        for rebuild, of_group in zip(self.rebuilds, num_blocks, strict=True):
            rebuild.start_shard(shard_index, *(of_group[tier] for tier in TIERS))

    def take(self) -> list[LayerGroup]:
        """Return the native core of each layer group, built from the reports, which are dropped."""
        return [rebuild.take() for rebuild in self.rebuilds]

    def add(
        self,
        shard_index: int,
        num_blocks: Sequence[dict[tpb.Tier, int]],
        part: rpb.BlockReport,
    ) -> None:
        """Add a part of a shard's report. Raises InvalidRequestError naming the faulty field;
        the messages before the faulty one have then been added.
        """
        at = "report"
        try:
            for i, blocks in enumerate(part.blocks):
                at = f"report.blocks[{i}]"
                _check_group(blocks.group, num_blocks)
                _check_blocks(blocks, num_blocks[blocks.group])
                self.rebuilds[blocks.group].add_blocks(
                    shard_index, blocks.tier, blocks.indices, blocks.generations
                )
            for i, message in enumerate(part.publications):
                at = f"report.publications[{i}]"
                _check_group(message.group, num_blocks)
                root = reported_root(
                    message,
                    fingerprint=self._fingerprint,
                    num_blocks=num_blocks[message.group][tpb.TIER_DEVICE],
                )
                self.rebuilds[message.group].add_publications(
                    shard_index,
                    root,
                    message.indices,
                    message.generations,
                    message.parent_indices,
                    message.parent_generations,
                    message.hashes,
                    message.token_ids,
                )
        except ColumnError as error:
            column, index, text = error.args
            field = f"{at}.{column}" + (f"[{index}]" if index >= 0 else "")
            raise InvalidRequestError(text, field=field) from None
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, field=f"{at}.{error.field}") from None


def _check_group(group: int, num_blocks: Sequence[dict[tpb.Tier, int]]) -> None:
    last = len(num_blocks) - 1
    if not 0 <= group <= last:
        raise InvalidRequestError(f"must be from 0 to {last}, the layer groups", field="group")


def _check_blocks(message: tpb.Blocks, num_blocks: dict[tpb.Tier, int]) -> None:
    """Check the blocks of a report's message before its columns are read."""
    if message.tier not in TIERS:
        raise InvalidRequestError(
            f"must be TIER_DEVICE or TIER_HOST, not {message.tier}", field="tier"
        )
    num, most = columns.count(INT32, message.indices), num_blocks[message.tier]
    if num > most:
        raise InvalidRequestError(f"must be at most {most} blocks, not {num}", field="indices")
