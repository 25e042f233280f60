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

from array import array

from control_plane.planning.pools.pool import Pool
from control_plane.planning.pools.publications import NO_BLOCK, Published
from control_plane.planning.pools.shards import TIERS, Report
from kvplane import columns
from kvplane.columns import INT32
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
    _restore(pool, _agreed(pool, reports))
    for state in shards.states.values():
        state.drop_report()
    pool.built = True


def _learn(known: array[int], reported: dict[int, int]) -> None:
    """Raise ``known`` to the highest generation of each block."""
    known.extend([0] * (max(reported, default=-1) + 1 - len(known)))
    for block, generation in reported.items():
        if generation > known[block]:
            known[block] = generation


def _agreed(pool: Pool, reports: list[Report]) -> dict[int, Published]:
    """The publications that are of their blocks' final generation in every shard."""
    first, *others = reports
    num_blocks = pool.num_blocks(tpb.TIER_DEVICE)
    final = pool.generations[tpb.TIER_DEVICE]
    present = first.generations[tpb.TIER_DEVICE]
    return {
        block: published
        for block, published in first.published.items()
        if block < num_blocks
        and published.generation == present.get(block) == final[block]
        and all(other.published.get(block) == published for other in others)
    }


def _restore(pool: Pool, agreed: dict[int, Published]) -> None:
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
    while runs:
        parent, block = runs.pop()
        run = [block]
        while len(following := children.get(run[-1], ())) == 1:
            run += following
        if _enter(pool, agreed, parent, run) == len(run):
            runs += [(run[-1], block) for block in following]
    pool.native.restored()


def _enter(pool: Pool, agreed: dict[int, Published], parent: int, run: list[int]) -> int:
    """Enter blocks, each the only child of the one before it, up to the first that cannot be:
    its prefix is in another block, or its hash does not follow from its tokens. Returns how many
    were entered.
    """
    return pool.native.restore(
        agreed[run[0]].root,
        parent,
        b"".join([agreed[block].token_ids for block in run]),
        columns.pack(INT32, run),
        b"".join([agreed[block].hash for block in run]),
    )
