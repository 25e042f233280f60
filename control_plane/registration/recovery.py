"""How a pool is built from what its shards report.

Metadata is soft state: whoever holds the memory holds its metadata too. A new control plane learns
from reports which block holds which prefix, and an old one does when a shard has restarted.

- Generations go on from the highest that any shard or this control plane knows of a block, also for
  blocks that the smallest shard does not have: it may be replaced by a larger one.
- A publication is restored only if it is of the block's final generation and all shards report the
  same, since a block holds its prefix only where every shard holds its part of it.
- Its parent is exactly the block that it names, of that block's final generation, and restored too.
  Equal hashes never join blocks, and one whose hash does not follow from its tokens is left out.

The native core does this (``csrc/blocks/recovery/rebuild.h``), a piece at a time.
"""

from __future__ import annotations

from typing import Final

from control_plane.pools.pool import Pool
from control_plane.pools.shards import total_blocks

# Blocks of one piece of a build: a millisecond or two.
_PIECE_BLOCKS: Final = 4096
# Pools of shards that have no more blocks are built at once.
_SMALL_BLOCKS: Final = 4096


def begin_if_complete(pool: Pool) -> None:
    """Begin to build the pool once its shards hold everything, have reported, and fenced all
    sessions that ended; ``build_some`` goes on, until the pool is built. A small one is built now.
    """
    shards = pool.shards
    if pool.built or pool.is_building or shards.is_fencing or not shards.are_complete:
        return
    pool.begin_build()
    most = max(total_blocks(state.hello) for state in shards.states.values())
    while most <= _SMALL_BLOCKS and not build_some(pool):
        pass


def build_some(pool: Pool) -> bool:
    """Go on with a build for a few milliseconds; returns whether the pool is built now."""
    if all(rebuild.step(_PIECE_BLOCKS) for rebuild in pool.shards.reports.rebuilds):
        pool.end_build()
    return pool.built
