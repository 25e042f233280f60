"""Which written blocks others may find: publish after write.

A block of a sequence is published when it is full, its tokens are known, receipts say that every
slot of it was written, and the plan that moved it to where it is has run. Where the prefix has a
block already, the new one stays private.
"""

from __future__ import annotations

from control_plane.model import Tier
from control_plane.prefix_index import NO_BLOCK, Entry
from control_plane.sequence import Sequence
from control_plane.sessions import Session


def publish(session: Session, sequence: Sequence) -> list[tuple[str, Entry]]:
    """Enter what has become complete of the sequence into the index.

    Returns the (tenant, entry) pairs that are new, parents before children.
    """
    pool = session.pool
    num_complete = min(sequence.num_written, sequence.num_tokens) // pool.block_size
    if (
        num_complete <= sequence.num_published
        or sequence.tier is not Tier.DEVICE
        or sequence.moved_by > session.done
    ):
        return []
    if sequence.chain is None or sequence.chain.block == NO_BLOCK:
        # The last block's entry went since (this sequence's own block was private): begin again.
        sequence.num_published, sequence.chain = 0, None
    parent = sequence.chain or pool.index.root(session.tenant)
    block_bytes = pool.block_size * 4
    published: list[tuple[str, Entry]] = []
    for i in range(sequence.num_published, num_complete):
        tokens = bytes(sequence.tokens[i * block_bytes : (i + 1) * block_bytes])
        entry = pool.index.child(parent, tokens)
        block = sequence.table[i]
        if entry.block == NO_BLOCK:
            pool.device.publish(block, entry)
            published.append((session.tenant, entry))
        parent = entry
    sequence.num_published, sequence.chain = num_complete, parent
    pool.counters.num_publications += len(published)
    return published
