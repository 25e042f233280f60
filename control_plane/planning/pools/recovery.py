"""How a pool is built from what its shards report.

Metadata is soft state: whoever holds the memory holds its metadata too. A new control plane learns
from reports which block holds which prefix, and an old one does when a shard has restarted.

- Generations go on from the highest that any shard or this control plane knows of a block, also for
  blocks that the smallest shard does not have: it may be replaced by a larger one.
- A publication is restored only if it is of the block's final generation and all shards report the
  same, since a block holds its prefix only where every shard holds its part of it.
- Its parent is exactly the block that it names, of that block's final generation, and restored too.
  Equal hashes never join blocks, and one whose hash does not follow from its tokens is left out.
"""

from __future__ import annotations

from control_plane.blocks.block_store import BlockStore
from control_plane.blocks.prefix_index import NO_BLOCK, PrefixIndex
from control_plane.planning.pools.pool import Pool
from control_plane.planning.pools.publications import Published
from control_plane.planning.pools.shards import TIERS, Report
from kvplane.v1 import types_pb2 as tpb


def build_if_complete(pool: Pool) -> None:
    """Build the pool once its shards hold everything, have reported, and fenced all sessions that
    ended.
    """
    shards = pool.shards
    if pool.built or shards.is_fencing or not shards.are_complete:
        return
    reports = [shards.states[i].report for i in range(shards.num_shards)]
    for tier in TIERS:
        for report in reports:
            _learn(pool.generations[tier], report.generations[tier])
    pool.set_tiers({tier: shards.num_blocks(tier) for tier in TIERS})
    _restore(pool.device, _agreed(pool.device, reports))
    for state in shards.states.values():
        state.drop_report()
    pool.built = True


def _learn(known: list[int], reported: dict[int, int]) -> None:
    """Raise ``known`` to the highest generation of each block."""
    known += [0] * (max(reported, default=-1) + 1 - len(known))
    for block, generation in reported.items():
        if generation > known[block]:
            known[block] = generation


def _agreed(device: BlockStore, reports: list[Report]) -> dict[int, Published]:
    """The publications that are of their blocks' final generation in every shard."""
    first, *others = reports
    present = first.generations[tpb.TIER_DEVICE]
    return {
        block: published
        for block, published in first.published.items()
        if block < device.num_blocks
        and published.generation == device.generation[block] == present.get(block)
        and all(other.published.get(block) == published for other in others)
    }


def _restore(device: BlockStore, agreed: dict[int, Published]) -> None:
    """Fill the index, parents before children; a block without all of its ancestors is left out."""
    runs: list[tuple[int, int]] = []  # (parent, its child) where a run of prefixes begins
    children: dict[int, list[int]] = {}
    for block, published in agreed.items():
        parent = published.parent
        if parent == NO_BLOCK:
            runs.append((NO_BLOCK, block))
            continue
        before = agreed.get(parent)
        if (
            before is not None
            and before.generation == published.parent_generation
            and before.root == published.root
        ):
            children.setdefault(parent, []).append(block)
    restored: list[int] = []
    while runs:
        parent, block = runs.pop()
        run = [block]
        while len(following := children.get(run[-1], ())) == 1:
            run += following
        entered = _enter(device.index, agreed, parent, run)
        restored += entered
        if len(entered) == len(run):
            runs += [(run[-1], block) for block in following]
    # Parents come before children here; in the cache children go first.
    device.restore(restored[::-1])


def _enter(
    index: PrefixIndex, agreed: dict[int, Published], parent: int, run: list[int]
) -> list[int]:
    """Enter blocks, each the only child of the one before it, up to the first that cannot be:
    its prefix is in another block, or its hash does not follow from its tokens.
    """
    token_ids = b"".join([agreed[block].token_ids for block in run])
    entered, _, _ = index.publish(agreed[run[0]].root, parent, token_ids, run)
    num_sound = 0
    for block, is_at, hash_ in zip(run, entered, index.hashes(entered), strict=False):
        if block != is_at or agreed[block].hash != hash_:
            break
        num_sound += 1
    index.evict(entered[num_sound:])
    return entered[:num_sound]
