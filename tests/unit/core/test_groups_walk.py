"""Pools of two layer groups, through both planes: whatever is done, the groups stay in step, and
each holds what the tokens say as far back as its window reaches.
"""

from __future__ import annotations

from random import Random

import pytest
from kvplane_blocks import Pool

from kvplane import ops
from kvplane.wire import columns
from kvplane.wire.columns import INT32
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.planning.groups_world import BLOCK, WINDOW, World

HOST = tpb.TIER_HOST


def held(world: World, group: int) -> int:
    return sum(
        usage.num_held_blocks
        for usage in world.core.get_pool("pool").usage
        if usage.group == group and usage.tier == tpb.TIER_DEVICE
    )


def decode(world: World, sequence_id: int, num: int) -> None:
    for _ in range(num):
        first = len(world.sequences[sequence_id])
        result = world.step(ops.append(sequence_id, [first % 7], 1, first_positions=first))
        assert not result.results[0].failures, result
        world.check()


def test_a_group_with_a_window_gives_back_what_lies_behind_it() -> None:
    world = World(device=(16, 6))
    world.step(ops.admit(1, range(40)))
    assert (held(world, 0), held(world, 1)) == (5, 5)
    decode(world, 1, 60)
    assert held(world, 0) == 13
    assert held(world, 1) <= -(-WINDOW // BLOCK) + 2
    with_group = [columns.read(INT32, t.indices, "").tolist().count(-1) for t in world.tables(1)]
    assert with_group[0] == 0 and with_group[1] >= 9
    world.step(ops.free([1]))
    world.step()
    assert (held(world, 0), held(world, 1)) == (0, 0)


def test_a_hit_needs_of_a_window_group_only_what_its_window_sees() -> None:
    world = World(device=(30, 5))
    prompt = list(range(33))
    world.step(ops.admit(1, prompt))
    world.step(ops.free([1]))
    world.step()  # all four full blocks are published in both groups
    world.step(ops.admit(2, range(500, 513)))
    world.step(ops.free([2]))
    world.step()
    kept = [core.usage(1)[2] for core in world.pool.groups]
    assert kept == [5, 4] or kept[1] < kept[0], kept  # the window group had to evict
    found = world.step(ops.admit(3, prompt)).results[0].admit.num_cached_tokens
    lengths = [
        len(Pool([core]).match(world.of_session.root, columns.pack(INT32, prompt))[2]) // 16
        for core in world.pool.groups
    ]
    assert found == BLOCK * min(lengths)
    world.check()


def test_a_quota_holds_in_each_group() -> None:
    world = World(device=(16, 12), max_tenant_blocks=6)
    world.step(ops.admit(1, range(33)))
    before = [core.usage(1) for core in world.pool.groups]
    refused = world.step(ops.admit(2, range(300, 317))).results[0].failures[0]
    assert refused.status == cpb.ITEM_STATUS_LATER
    assert refused.shortage.reason == cpb.SHORTAGE_REASON_QUOTA
    assert [core.usage(1) for core in world.pool.groups] == before
    never = world.step(ops.admit(2, range(300, 349))).results[0].failures[0]
    assert never.status == cpb.ITEM_STATUS_NEVER
    assert never.shortage.reason == cpb.SHORTAGE_REASON_QUOTA
    decode(world, 1, 15)
    assert (held(world, 0), held(world, 1)) == (6, 3), "the window's group has room for more"
    before = [core.usage(1) for core in world.pool.groups]
    grown = world.step(ops.append(1, [5], 1, first_positions=48)).results[0].failures[0]
    assert grown.status == cpb.ITEM_STATUS_NEVER
    assert grown.shortage.reason == cpb.SHORTAGE_REASON_QUOTA
    assert [core.usage(1) for core in world.pool.groups] == before
    world.check()


def test_what_has_no_room_in_one_group_is_done_in_none() -> None:
    world = World(device=(16, 4))
    world.step(ops.admit(1, range(17)))
    before = [core.usage(1) for core in world.pool.groups]
    refused = world.step(ops.admit(2, range(300, 320))).results[0]
    assert refused.failures[0].status == cpb.ITEM_STATUS_LATER
    assert refused.failures[0].shortage.num_blocks_needed == 3  # of the smallest group
    assert [core.usage(1) for core in world.pool.groups] == before
    never = world.step(ops.admit(2, range(300, 340))).results[0]
    assert never.failures[0].status == cpb.ITEM_STATUS_NEVER
    world.check()


def test_an_abort_that_leaves_one_group_nothing_begins_again_in_all() -> None:
    world = World()
    prompt = list(range(57))
    world.step(ops.admit(1, prompt[:25]))
    world.step()  # three blocks are published
    world.step(ops.admit(2, prompt))
    world.step(ops.admit(3, [*prompt, 1]), num_receipts=0)  # shares what sequence 2 computes
    assert [len(t.indices) // 4 for t in world.tables(3)] == [8, 8]
    assert columns.read(INT32, world.tables(3)[1].indices, "").tolist()[:4] == [-1] * 4
    world.abort()
    states = {s.sequence_id: s.num_written_tokens for s in world.states()}
    assert states == {1: 25, 2: 24, 3: 0}  # the window of the third sees what was never written
    world.check()


def test_a_new_control_plane_finds_what_was_cached() -> None:
    world = World()
    prompt = list(range(41))
    world.step(ops.admit(1, prompt))
    world.step(ops.free([1]))
    world.step()
    world.restart_control()
    assert world.step(ops.admit(1, prompt)).results[0].admit.num_cached_tokens == 40
    world.check()


@pytest.mark.parametrize("seed", range(6))
def test_groups_stay_in_step(seed: int) -> None:
    walk(seed, 250)


def test_an_abort_leaves_no_group_with_more_published_than_written() -> None:
    """One group found a prefix that another had to wait for, and the plan was aborted."""
    walk(122, 1500)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 166))
def test_groups_stay_in_step_for_long(seed: int) -> None:
    walk(seed, 1500)


def walk(seed: int, num_steps: int) -> None:
    rng = Random(seed)
    device = rng.choice(((16, 12), (12, 12), (20, 8), (8, 16)))
    world = World(device, rng.choice(((6, 4), (12, 12), (0, 0))))
    for _ in range(num_steps):
        dice = rng.random()
        if dice < 0.02 and world.pool.native.plans_in_flight(world.of_session.handle):
            world.abort()
        elif dice < 0.03:
            world.restart_control()
        else:
            world.step(
                *operations(world, rng),
                num_receipts=rng.choice((0, 1, 9, 9)) if len(world.of_session.plans) < 2 else 9,
            )
        world.check()
    if world.sequences:
        world.step(ops.free(list(world.sequences)))
    world.step()
    world.check()
    assert [held(world, group) for group in (0, 1)] == [0, 0]
    for kind in (
        "admit done",
        "append done",
        "fork done",
        "truncate done",
        "free done",
        "hits",
        "trimmed",
        "tables checked",
    ):
        assert world.seen[kind], (kind, world.seen)


def operations(world: World, rng: Random) -> list[cpb.Operation]:
    """One to three operations, on sequences that the others do not touch."""
    ids = list(world.sequences)
    rng.shuffle(ids)
    made: list[cpb.Operation] = []
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.25 or not ids:
            new = next(i for i in range(1, 99) if i not in world.sequences)
            if any(op.HasField("admit") or op.HasField("fork") for op in made):
                continue
            num_compute = rng.choice((None, None, 8, 16))
            prompt = world.prompt(rng, rng.choice((5, 8, 16, 17, 24, 40, 41, 57)))
            made.append(ops.admit(new, prompt, num_compute_tokens=num_compute))
            continue
        sequence_id = ids.pop()
        num_tokens = len(world.sequences[sequence_id])
        state = next(s for s in world.states() if s.sequence_id == sequence_id)
        if kind < 0.65:
            first = state.num_scheduled_tokens
            num = rng.choice((1, 1, 1, 4, 9))
            num_new = max(0, first + num - num_tokens)
            tokens = [rng.randrange(1000) for _ in range(num_new)]
            made.append(ops.append(sequence_id, tokens, num, first_positions=first))
        elif kind < 0.75:
            new = next(i for i in range(1, 99) if i not in world.sequences)
            if not any(op.HasField("admit") or op.HasField("fork") for op in made):
                made.append(ops.fork(sequence_id, new))
        elif kind < 0.82 and num_tokens:
            made.append(ops.truncate(sequence_id, rng.randint(max(1, num_tokens - 12), num_tokens)))
        elif kind < 0.92:
            made.append(ops.free([sequence_id]))
        elif state.tier == HOST:
            made.append(ops.swap([sequence_id], "device"))
        else:
            made.append(ops.swap([sequence_id], "host"))
    return made
