"""Checks that the blocks of a store are accounted for: what must hold after every call.

Everything is counted again and compared with the stored counts. It scans the store, which is slow:
for tests. ``name`` identifies the store in messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from control_plane.blocks.block_store import CACHED, FREE, HELD, PINNED, RETIRED, BlockStore
from control_plane.blocks.prefix_index import NO_BLOCK
from control_plane.blocks.reservations import Reservations


def check_store(
    store: BlockStore,
    name: str,
    *,
    ref_count: Mapping[int, int],
    pins: Mapping[int, int],
    finished: Mapping[int, int],
) -> None:
    """Raise AssertionError saying what is wrong, if anything is.

    Counted by the caller, blocks with none left out: ``ref_count[b]`` table entries and ``pins[b]``
    transfers that refer to block b. ``finished``: the last plan that has run of each session that
    is open, or ended and not fenced yet.
    """
    _check_counts(store, name, ref_count, pins)
    _check_states(store, name)
    _check_retired(store, name, finished)
    _check_index(store, name)
    _check_eviction_order(store, name)


def check_reservations(reservations: Reservations, sessions: Mapping[int, Counter[int]]) -> None:
    """Raise AssertionError if a sum is wrong, or a session holds other blocks than the caller
    counted: {session: {block: table entries}}.
    """
    for session_id, held in sessions.items():
        assert held == reservations.held(session_id), f"session {session_id}: holds other blocks"
        lacking = reservations.guarantee(session_id) - len(held)
        assert reservations.shortfall(session_id) == max(0, lacking), "a shortfall differs"
    guarantees = sum(map(reservations.guarantee, sessions))
    assert reservations.num_guaranteed == guarantees, "guarantees differ from their sum"
    reserved = sum(map(reservations.shortfall, sessions))
    assert reservations.num_reserved == reserved, "shortfalls differ from their sum"


def _check_counts(
    store: BlockStore, name: str, ref_count: Mapping[int, int], pins: Mapping[int, int]
) -> None:
    for block in range(store.num_blocks):
        kept, counted = store.ref_count[block], ref_count.get(block, 0)
        assert kept == counted, f"{name} block {block}: {counted} table entries, not {kept}"
        kept, counted = store.pins[block], pins.get(block, 0)
        assert kept == counted, f"{name} block {block}: {counted} transfers pin it, not {kept}"


def _check_states(store: BlockStore, name: str) -> None:
    free, cached = Counter(store.free), Counter(store.policy)
    for block, state in enumerate(store.state):
        want = _state_of(store, block)
        assert state == want, f"{name} block {block}: in state {state}, should be {want}"
        assert free[block] == (state == FREE), f"{name} block {block}: free list disagrees"
        assert cached[block] == (state == CACHED), f"{name} block {block}: eviction order disagrees"
    num_in = Counter(store.state)
    assert store.num_in == [num_in[s] for s in range(5)], f"{name}: state counts differ"
    assert sum(store.num_in) == store.num_blocks, f"{name}: blocks are not conserved"


def _state_of(store: BlockStore, block: int) -> int:
    if store.ref_count[block]:
        return HELD
    if store.pins[block]:
        return PINNED
    if store.retire_after[block] is not None:
        return RETIRED
    return FREE if store.index.entries[block] is None else CACHED


def _check_retired(store: BlockStore, name: str, finished: Mapping[int, int]) -> None:
    own: dict[int, set[int]] = {}
    for block, after in enumerate(store.retire_after):
        assert after != {}, f"{name} block {block}: waits for no plan"
        for session_id, plan in (after or {}).items():
            waits = f"{name} block {block}: waits for plan {plan} of session {session_id}"
            assert session_id in finished, f"{waits}, which is unknown"
            assert plan > finished[session_id], f"{waits}, which has run"
            assert block in store.waiting(session_id, plan), f"{waits}, and is not listed"
        if after is not None and store.state[block] == RETIRED and len(after) == 1:
            own.setdefault(next(iter(after)), set()).add(block)
    kept = {i: {*blocks.plain, *blocks.kept} for i, blocks in store.own_retired().items()}
    assert own == kept, f"{name}: what sessions could allocate at once differs"
    for blocks in store.own_retired().values():
        assert blocks.plain.keys().isdisjoint(blocks.kept), f"{name}: a block is kept and plain"
        assert not any(map(store.index.entries.__getitem__, blocks.plain)), (
            f"{name}: a published block would be reused first"
        )


def _check_index(store: BlockStore, name: str) -> None:
    found: set[int] = set()
    for _, entry in store.index.walk():
        assert entry.block != NO_BLOCK or entry.children, f"{name}: an entry without block or child"
        assert entry.parent is not None, f"{name}: a root among the entries"
        assert entry in entry.parent.children, f"{name}: an entry is not its parent's child"
        if entry.block != NO_BLOCK:
            assert entry.block not in found, f"{name} block {entry.block}: in two entries"
            found.add(entry.block)
            assert store.index.entries[entry.block] is entry, (
                f"{name} block {entry.block}: its entry says otherwise"
            )
    published = {b for b, entry in enumerate(store.index.entries) if entry is not None}
    assert published == found, f"{name}: published blocks are not in the index"


def _check_eviction_order(store: BlockStore, name: str) -> None:
    evicted: set[int] = set()
    for block in store.policy:
        evicted.add(block)
        entry = store.index.entries[block]
        assert entry is not None, f"{name} block {block}: cached and not published"
        while entry.parent is not None:
            entry = entry.parent
            assert entry.block not in evicted, f"{name} block {block}: evicted after its ancestor"
