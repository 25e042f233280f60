"""Proof that a pool's books balance: what must hold after every call to the core.

Everything is counted anew from tables, plans and the index, and compared with what is kept. Slow by
design (it scans the pool); for tests and idle moments.
"""

from __future__ import annotations

from collections import Counter

from control_plane.blocks.block_store import CACHED, FREE, HELD, LIMBO, PINNED, BlockTier
from control_plane.blocks.prefix_index import NO_BLOCK
from control_plane.planning.model import Tier
from control_plane.planning.pool import Pool
from control_plane.planning.sequence import Sequence
from control_plane.planning.session import Session


def check_pool(pool: Pool) -> None:
    """Raise AssertionError saying what is wrong, if anything is."""
    for tier in pool.tiers.values():
        _check_counts(pool, tier)
        _check_states(tier)
        _check_fences(pool, tier)
    _check_index(pool)
    _check_eviction_order(pool.device)
    for session in pool.sessions.values():
        _check_session(pool, session)
    _check_promises(pool)


def _check_counts(pool: Pool, tier: BlockTier) -> None:
    tables: Counter[int] = Counter()
    pins: Counter[int] = Counter()
    for session in pool.sessions.values():
        for sequence in session.sequences.values():
            if sequence.tier is tier.tier:
                tables.update(sequence.table)
        for record in session.plans.values():
            pins.update(block for owner, block in record.pins if owner is tier)
    for block in range(tier.num_blocks):
        name = f"{tier.tier.value} block {block}"
        kept = tier.tables[block]
        assert kept == tables[block], f"{name}: {tables[block]} tables name it, not {kept}"
        kept = tier.pins[block]
        assert kept == pins[block], f"{name}: {pins[block]} transfers pin it, not {kept}"


def _check_states(tier: BlockTier) -> None:
    free = Counter(tier.free)
    cached = Counter(tier.policy)
    assert not free or max(free.values()) == 1, f"{tier.tier.value}: a block is free twice"
    for block, state in enumerate(tier.state):
        want = _state_of(tier, block)
        name = f"{tier.tier.value} block {block}"
        assert state == want, f"{name}: in state {state}, should be {want}"
        assert (free[block] == 1) == (state == FREE), f"{name}: on the free list wrongly"
        assert cached[block] == (state == CACHED), f"{name}: in the cache wrongly"
    num_in = Counter(tier.state)
    assert tier.num_in == [num_in[s] for s in range(5)], f"{tier.tier.value}: state counts differ"
    assert sum(tier.num_in) == tier.num_blocks, f"{tier.tier.value}: blocks are not conserved"


def _state_of(tier: BlockTier, block: int) -> int:
    if tier.tables[block]:
        return HELD
    if tier.pins[block]:
        return PINNED
    if tier.fences[block] is not None:
        return LIMBO
    return FREE if tier.entries[block] is None else CACHED


def _check_fences(pool: Pool, tier: BlockTier) -> None:
    own: dict[int, set[int]] = {}
    for block, fences in enumerate(tier.fences):
        name = f"{tier.tier.value} block {block}"
        assert fences != {}, f"{name}: an empty fence"
        for session_id, plan in (fences or {}).items():
            assert session_id in pool.sessions or session_id in pool.fenced, (
                f"{name}: fenced by session {session_id}, which no one will lift"
            )
            assert block in tier.fenced_by(session_id, plan), f"{name}: its fence is not listed"
            session = pool.sessions.get(session_id)
            assert session is None or plan > session.done, f"{name}: fenced by a plan that ran"
        if fences is not None and tier.state[block] == LIMBO and len(fences) == 1:
            own.setdefault(next(iter(fences)), set()).add(block)
    assert own == tier.own_limbo(), f"{tier.tier.value}: own limbo differs"


def _check_index(pool: Pool) -> None:
    found: set[int] = set()
    for _, entry in pool.index.entries():
        assert entry.block != NO_BLOCK or entry.children, "an entry without block and child"
        if entry.block != NO_BLOCK:
            assert entry.block not in found, f"block {entry.block} is in two entries"
            found.add(entry.block)
            assert pool.device.entries[entry.block] is entry, (
                f"block {entry.block} and its entry disagree"
            )
    published = {b for b, entry in enumerate(pool.device.entries) if entry is not None}
    assert published == found, "published blocks are not in the index"
    assert not any(pool.host.entries), "a host block is published"


def _check_eviction_order(tier: BlockTier) -> None:
    gone: set[int] = set()
    for block in tier.policy:
        gone.add(block)
        entry = tier.entries[block]
        assert entry is not None, f"cached block {block} is not published"
        while entry.parent is not None:
            entry = entry.parent
            assert entry.block not in gone, f"block {block} would go after its ancestor"


def _check_session(pool: Pool, session: Session) -> None:
    held: Counter[int] = Counter()
    for sequence in session.sequences.values():
        _check_sequence(pool, session, sequence)
        if sequence.tier is Tier.DEVICE:
            held.update(sequence.table)
    assert held == session.held, f"session {session.id}: what it holds differs"
    need = max((s.need for s in session.sequences.values()), default=0)
    assert session.guarantee == need, f"session {session.id}: guarantee differs"
    assert all(n > session.done for n in session.plans), "a plan that ran is in flight"
    assert session.done == min(session.receipted), f"session {session.id}: receipts differ"


def _check_sequence(pool: Pool, session: Session, sequence: Sequence) -> None:
    name = f"session {session.id} sequence {sequence.id}"
    num_slots = len(sequence.table) * pool.block_size
    assert (
        0 <= sequence.num_cached <= sequence.num_written <= sequence.num_scheduled <= num_slots
    ), f"{name}: positions are out of order"
    assert len(set(sequence.table)) == len(sequence.table), f"{name}: a block twice in its table"
    ends = [end for _, end in sequence.pending]
    assert ends == sorted(ends), f"{name}: pending ends fall"
    assert all(plan in session.plans for plan, _ in sequence.pending), f"{name}: waits in vain"
    if sequence.tier is not Tier.DEVICE:
        return
    # What some plan in flight writes is nobody else's, and not published.
    for _, end in sequence.pending:
        block = sequence.table[(end - 1) // pool.block_size]
        assert pool.device.entries[block] is None, f"{name}: writes published block {block}"
    # What is published is what it reads: all of it, or, when a fork that knows more tokens has
    # published the block, as far as it goes itself.
    size = pool.block_size
    end = min(sequence.num_tokens, sequence.num_scheduled)
    for i, block in enumerate(sequence.table):
        entry = pool.device.entries[block]
        if entry is not None:
            known = bytes(sequence.tokens[i * size * 4 : min((i + 1) * size, end) * 4])
            assert entry.tokens.startswith(known), f"{name}: block {block} holds other tokens"


def _check_promises(pool: Pool) -> None:
    sessions = pool.sessions.values()
    assert pool.num_guaranteed == sum(s.guarantee for s in sessions), "guarantees differ"
    assert pool.num_promised == sum(s.shortfall for s in sessions), "promises differ"
    if pool.built:
        assert pool.num_guaranteed <= pool.device.num_blocks, "more is guaranteed than there is"
    for usage in pool.usage():
        parts = (
            usage.num_free_blocks,
            usage.num_cached_blocks,
            usage.num_held_blocks,
            usage.num_limbo_blocks,
            usage.num_reserved_blocks,
        )
        assert min(parts) >= 0, f"{usage.tier.value}: a negative count"
        assert sum(parts) == usage.num_blocks, f"{usage.tier.value}: blocks are not conserved"
