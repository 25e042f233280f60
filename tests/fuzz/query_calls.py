"""Calls that change nothing of a pool, and announcements."""

from __future__ import annotations

import kvplane_blocks
from kvplane_blocks import Pool

from tests.fuzz.pool_world import Call, Session, World


def ask(world: World, session: Session) -> None:
    """Make queries about prompts and sequences."""
    core, tokens = world.core(), world.prompt()
    hashes = world.data.ConsumeBytes(40) if world.data.ConsumeBool() else b""
    search = world.pool.search(core, world.root(), tokens, hashes, world.data.ConsumeBool())
    while search.search_some(1):
        pass
    search.counts()
    search.blocks()
    core.table(session.handle, world.some_id(session))


def announce(world: World, _: Session) -> None:
    core = world.core()
    if world.data.ConsumeBool():
        core.take_publications(world.unsigned(3, 64))
    else:
        core.publications_in(world.unsigned(9, 64), world.unsigned(9, 64))


def show(world: World, _: Session) -> None:
    """Read what a page and metrics show."""
    core, tier = world.core(), world.tier()
    for shown in (core.memory, core.counters, core.roots):
        shown()
    num_bounds = len(kvplane_blocks.duration_bounds_s())
    assert len(core.block_times()) > 6 * num_bounds  # three histograms of each tier
    assert core.num_token_chunks >= 0
    assert core.num_touched >= 0
    assert core.has_publications in (False, True)
    assert core.has_withdrawn in (False, True)
    core.num_sequences_in(tier)
    core.block_map(tier, world.unsigned(5, 32))


def count(world: World, session: Session) -> None:
    """What the queue counts."""
    handle, tier = session.handle, world.tier()
    for pool in (world.pool, Pool([world.core()])):
        pool.usage(tier)
        for num in (pool.num_obtainable, pool.num_pending, pool.num_own_retired):
            num(handle, tier)
        assert pool.num_blocks_held(handle) >= 0
        assert pool.resync_due(handle) in (False, True)
    sequence_id = world.some_id(session)
    assert world.pool.has_sequence(handle, sequence_id) <= world.pool.num_sequences(handle)
    family = world.pool.family_of(handle, sequence_id)
    world.pool.family_progress(handle, family)
    assert world.pool.family_held(handle, family) >= 0
    assert len(world.pool.family_on_device(handle, family)) % 8 == 0
    assert world.pool.num_device_blocks_held(handle) >= 0
    world.pool.take_family_events(handle)


QUERY_CALLS: tuple[Call, ...] = (ask, announce, show, count)
