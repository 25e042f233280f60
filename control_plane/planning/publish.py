"""Which written blocks others may find: publish after write.

A block of a sequence is published when it is full, its tokens are known, receipts say that every
slot of it was written, and the plan that moved it to where it is has run. Where the prefix has a
block already, the new one stays private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from control_plane.blocks.prefix_index import NO_BLOCK, Entry
from control_plane.planning.model import Tier

if TYPE_CHECKING:
    from control_plane.planning.sequence import Sequence
    from control_plane.planning.session import Session

# A tenant and new entries of it, parents before children.
Published = tuple[str, list[Entry]]


def publish(session: Session, sequence: Sequence) -> list[Published]:
    """Enter what has become complete of the sequence into the index; returns what is new."""
    pool = session.pool
    num_complete = sequence.num_complete(pool.block_size)
    if (
        num_complete <= sequence.num_published
        or sequence.tier is not Tier.DEVICE
        or sequence.moved_by > session.done
    ):
        return []
    if sequence.chain is None or sequence.chain.block == NO_BLOCK:
        # The last block's entry went since (this sequence's own block was private): begin again.
        sequence.num_published, sequence.chain = 0, None
    index, first = pool.index, sequence.num_published
    block_bytes = pool.block_size * 4
    chain = index.extend(
        sequence.chain or index.root(session.tenant),
        bytes(sequence.tokens[first * block_bytes : num_complete * block_bytes]),
    )
    new: list[Entry] = []
    for entry, block in zip(chain, sequence.table[first:num_complete], strict=True):
        if entry.block == NO_BLOCK:
            entry.block = block
            new.append(entry)
    sequence.num_published, sequence.chain = num_complete, chain[-1]
    if not new:
        return []
    pool.device.publish(new)
    pool.counters.num_publications += len(new)
    return [(session.tenant, new)]
