"""What the shards of a pool report of their blocks, column by column into the native core."""

from __future__ import annotations

from typing import Final

from kvplane_blocks import ColumnError, Rebuild

from control_plane.planning.pools.publications import reported_root
from kvplane import columns
from kvplane.columns import INT32
from kvplane.errors import InvalidRequestError
from kvplane.layout import Layout
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb

TIERS: Final = (tpb.TIER_DEVICE, tpb.TIER_HOST)


class Reports:
    """What all shards have reported so far, from which the pool is built."""

    __slots__ = ("_fingerprint", "rebuild")

    def __init__(self, layout: Layout, num_shards: int) -> None:
        self.rebuild = Rebuild(layout.block_size_tokens, num_shards)
        self._fingerprint = layout.fingerprint

    def start(self, shard_index: int, num_blocks: dict[tpb.Tier, int]) -> None:
        """A shard begins to report; what it reported before is dropped."""
        self.rebuild.start_shard(shard_index, *(num_blocks[tier] for tier in TIERS))

    def add(self, shard_index: int, num_blocks: dict[tpb.Tier, int], part: cpb.BlockReport) -> None:
        """Add a part of a shard's report. Raises InvalidRequestError naming a field of it; messages
        before the one at fault have been added then.
        """
        at = "report"
        try:
            for i, blocks in enumerate(part.blocks):
                at = f"report.blocks[{i}]"
                _check_blocks(blocks, num_blocks)
                self.rebuild.add_blocks(
                    shard_index, blocks.tier, blocks.indices, blocks.generations
                )
            for i, message in enumerate(part.publications):
                at = f"report.publications[{i}]"
                root = reported_root(
                    message,
                    fingerprint=self._fingerprint,
                    num_blocks=num_blocks[tpb.TIER_DEVICE],
                )
                self.rebuild.add_publications(
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


def _check_blocks(message: tpb.Blocks, num_blocks: dict[tpb.Tier, int]) -> None:
    """What can be checked before the columns are read."""
    if message.group != 0:
        raise InvalidRequestError("must be 0: one layer group is served", field="group")
    if message.tier not in TIERS:
        raise InvalidRequestError(
            f"must be TIER_DEVICE or TIER_HOST, not {message.tier}", field="tier"
        )
    num, most = columns.count(INT32, message.indices), num_blocks[message.tier]
    if num > most:
        raise InvalidRequestError(f"must be at most {most} blocks, not {num}", field="indices")
