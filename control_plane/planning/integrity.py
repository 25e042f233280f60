"""Checks that a pool is consistent: what must hold after every call to the core.

References are counted again from tables, plans and sessions, and ``blocks.integrity`` compares the
blocks with these counts. It scans the pool, which is slow: for tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from control_plane.blocks.integrity import check_reservations, check_store
from control_plane.planning.pools.pool import Pool
from control_plane.planning.sequence import Sequence
from control_plane.planning.session import Session
from kvplane.v1 import types_pb2 as tpb

_DEVICE: Final = tpb.TIER_DEVICE
_NAMES: Final = {_DEVICE: "device", tpb.TIER_HOST: "host"}


def check_pool(pool: Pool, sessions: Iterable[Session]) -> None:
    """Raise AssertionError saying what is wrong, if anything is. ``sessions``: all open ones."""
    sessions = list(sessions)
    finished = {session.id: session.done for session in sessions} | dict.fromkeys(
        pool.shards.fenced_sessions, 0
    )
    for tier, store in pool.tiers.items():
        ref_count: Counter[int] = Counter()
        pins: Counter[int] = Counter()
        for session in sessions:
            ref_count.update(_held(session, tier))
            for record in session.plans.values():
                pins.update(block for owner, block in record.pins if owner is store)
        check_store(store, _NAMES[tier], ref_count=ref_count, pins=pins, finished=finished)
    assert not any(pool.host.index.entries), "a host block is published"
    check_reservations(
        pool.reservations, {session.id: _held(session, _DEVICE) for session in sessions}
    )
    for session in sessions:
        _check_session(pool, session)
    _check_usage(pool)


def _held(session: Session, tier: tpb.Tier) -> Counter[int]:
    """How many table entries of the session refer to each block of the tier."""
    held: Counter[int] = Counter()
    for sequence in session.sequences.values():
        if sequence.tier == tier:
            held.update(sequence.table)
    return held


def _check_session(pool: Pool, session: Session) -> None:
    for sequence in session.sequences.values():
        _check_sequence(pool, session, sequence)
    need = max((s.need for s in session.sequences.values()), default=0)
    guarantee = pool.reservations.guarantee(session.id)
    assert guarantee == need, f"session {session.id}: guarantee differs"
    assert all(n > session.done for n in session.plans), "a plan that ran is in flight"
    assert session.done == min(session.receipted), f"session {session.id}: receipts differ"


def _check_sequence(pool: Pool, session: Session, sequence: Sequence) -> None:
    name = f"session {session.id} sequence {sequence.id}"
    num_slots = len(sequence.table) * pool.block_size
    assert (
        0 <= sequence.num_cached <= sequence.num_written <= sequence.num_scheduled <= num_slots
    ), f"{name}: positions are out of order"
    assert len(set(sequence.table)) == len(sequence.table), f"{name}: a block twice in its table"
    assert sequence.generations is None, f"{name}: is live, but marked as freed"
    ends = [end for _, end in sequence.pending]
    assert ends == sorted(ends), f"{name}: pending ends are not ascending"
    assert all(plan in session.plans for plan, _ in sequence.pending), (
        f"{name}: waits for a lost plan"
    )
    if sequence.tier != _DEVICE:
        return
    entries = pool.device.index.entries
    # What a plan in flight writes is not published.
    for _, end in sequence.pending:
        block = sequence.table[(end - 1) // pool.block_size]
        assert entries[block] is None, f"{name}: writes published block {block}"
    # A published block holds the tokens of the sequence: all of them, or, when a fork that knows
    # more tokens published the block, those that the sequence has.
    size = pool.block_size
    end = min(sequence.num_tokens, sequence.num_scheduled)
    for i, block in enumerate(sequence.table):
        entry = entries[block]
        if entry is not None:
            known = bytes(sequence.tokens[i * size * 4 : min((i + 1) * size, end) * 4])
            assert entry.tokens.startswith(known), f"{name}: block {block} holds other tokens"


def _check_usage(pool: Pool) -> None:
    if pool.built:
        num_guaranteed = pool.reservations.num_guaranteed
        assert num_guaranteed <= pool.device.num_blocks, "more is guaranteed than there is"
    for usage in pool.usage().tiers:
        parts = (
            usage.num_free_blocks,
            usage.num_cached_blocks,
            usage.num_held_blocks,
            usage.num_retired_blocks,
        )
        assert min(parts) >= 0, f"{_NAMES[usage.tier]}: a negative count"
        assert sum(parts) == usage.num_blocks, f"{_NAMES[usage.tier]}: blocks are not conserved"
