"""Which written blocks others may find: publish after write.

A block of a sequence is published when it is full, its tokens are known, receipts say that every
slot of it was written, and the plan that moved it to where it is has run. Where the prefix has a
block already, the new one stays private.

An engine may free a sequence before its last receipts come. What these say was written is published
all the same, as far as the retired blocks have not been allocated again.
"""

from __future__ import annotations

from typing import Final

from control_plane.blocks.prefix_index import NO_BLOCK
from control_plane.planning.sequence import Sequence
from control_plane.planning.session import Session
from kvplane.v1 import types_pb2 as tpb

_DEVICE: Final = tpb.TIER_DEVICE


def publish(session: Session, sequence: Sequence) -> list[int]:
    """Publish the blocks of the sequence that have become complete.

    Returns the blocks to announce: the new ones, and those that can be found again because a new
    one took the place of an evicted one.
    """
    pool, device = session.pool, session.pool.device
    num_complete = sequence.num_complete(pool.block_size)
    if (
        num_complete <= sequence.num_published
        or sequence.tier != _DEVICE
        or sequence.moved_by > session.done
    ):
        return []
    parent, generation = sequence.chain
    if parent != NO_BLOCK and device.generation[parent] != generation:
        # It was evicted since (this sequence's own block was private): begin again.
        sequence.unpublish()
        parent = NO_BLOCK
    first = sequence.num_published
    if sequence.generations is not None:
        num_complete = _num_still_there(session, sequence, num_complete)
        if num_complete <= first:
            return []
    block_bytes = pool.block_size * 4
    entered, refilled, last = device.publish(
        session.root,
        parent,
        bytes(sequence.tokens[first * block_bytes : num_complete * block_bytes]),
        sequence.table[first:num_complete],
    )
    sequence.num_published, sequence.chain = num_complete, (last, device.generation[last])
    pool.counters.num_publications += len(entered)
    if not refilled:
        return entered
    return list(dict.fromkeys(entered + device.index.below(refilled)))


def expect_publication(session: Session, sequence: Sequence) -> bool:
    """Whether receipts that are still to come can publish blocks of a sequence that is freed now.

    Its released blocks are then the last that the session reuses.
    """
    device, size = session.pool.device, session.pool.block_size
    num_complete = min(sequence.num_tokens, sequence.num_scheduled) // size
    if sequence.tier != _DEVICE or num_complete <= sequence.num_published:
        return False
    sequence.generations = device.generations(sequence.table)
    device.keep(sequence.table[sequence.num_published : num_complete][::-1])
    return True


def _num_still_there(session: Session, sequence: Sequence, num_complete: int) -> int:
    """How many leading blocks of a freed sequence are complete and not allocated again."""
    generation, first = session.pool.device.generation, sequence.num_published
    assert sequence.generations is not None, "a live sequence holds all of its blocks"
    for i in range(first, num_complete):
        if generation[sequence.table[i]] != sequence.generations[i]:
            return i
    return num_complete
