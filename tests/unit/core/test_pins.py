"""Pins: cached blocks are held for reading, with no sequence, until they are given back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvplane import ops
from kvplane.errors import BlockInUseError
from kvplane.prefixes import ForgetScope
from kvplane.results import OperationResult, Pinned
from kvplane.wire import signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.core.core_messages import BLOCK, DEVICE, HOST, POOL
from tests.helpers.core.core_model import Engine, World
from tests.helpers.refusals import refused

PROMPT = range(100, 100 + 3 * BLOCK)
OTHER = range(500, 500 + 2 * BLOCK)


def pin(engine: Engine, *prompts: Sequence[int], first_id: int = 1) -> Pinned:
    """Pin prompts, none of which may be refused."""
    ids = range(first_id, first_id + len(prompts))
    answer = engine.step(ops.pin(ids, prompts))
    assert not answer.HasField("plan"), "a pin makes no plan"
    (result,) = answer.results
    assert not result.failures
    return OperationResult(result).pinned


def blocks_of(world: World, pinned: Pinned) -> list[tuple[int, int, int]]:
    """Tier, index and generation of each block in a grant, whose signature is right."""
    assert pinned.grant is not None
    grant: tpb.SignedPayload = pinned.grant  # type: ignore[assignment]
    key = world.pool.key
    assert grant.signature == signing.sign(key, signing.PIN_GRANT, grant.payload)
    blocks = plan_pb2.PinGrant.FromString(grant.payload)
    return [
        (tier, int.from_bytes(index, "little", signed=True), int.from_bytes(generation, "little"))
        for tier, index, generation in zip(
            blocks.tiers,
            (blocks.indices[i : i + 4] for i in range(0, len(blocks.indices), 4)),
            (blocks.generations[i : i + 8] for i in range(0, len(blocks.generations), 8)),
            strict=True,
        )
    ]


def fill(engine: Engine, num_blocks: int, sequence_id: int = 90) -> bool:
    """Whether so many blocks can be allocated for a sequence, which then holds them."""
    tokens = range(10_000 * sequence_id, 10_000 * sequence_id + num_blocks * BLOCK)
    (result,) = engine.admit(sequence_id, tokens).results
    return not result.failures


def test_each_prompt_is_looked_up_by_itself_and_a_miss_holds_nothing() -> None:
    world = World()
    engine = world.engine()
    engine.cache(PROMPT)
    engine.cache(OTHER)
    pinned = pin(engine, OTHER, [7] * BLOCK, PROMPT[: BLOCK + 3])
    assert [*pinned.num_blocks] == [2, 0, 1]
    assert [pinned.entries(i) for i in range(3)] == [range(2), range(2, 2), range(2, 3)]
    found = [*world.found(OTHER, "tenant"), *world.found(PROMPT, "tenant")[:1]]
    assert [(DEVICE, index) for index in found] == [each[:2] for each in blocks_of(world, pinned)]
    assert pin(engine, [7] * BLOCK, first_id=2) == Pinned(pinned.num_blocks[1:2], None)
    world.core.check_integrity()


def test_pinned_blocks_are_not_evicted_and_come_back_when_they_are_unpinned() -> None:
    world = World(num_device=6, num_host=0)
    engine, other = world.engine(), world.engine()
    engine.cache(PROMPT)
    assert world.usage()["cached"] == 3
    pin(engine, PROMPT)
    assert world.usage()["held"] == 3
    assert not fill(other, 4)
    assert fill(other, 3)
    assert other.lookup([*PROMPT, 0]) == 3 * BLOCK
    engine.step(ops.unpin([1, 5]))
    assert fill(other, 3, 91)
    assert other.lookup(PROMPT) == 0
    world.core.check_integrity()


def test_blocks_of_the_host_tier_are_pinned_where_they_are() -> None:
    world = World(num_device=3, num_host=3)
    engine = world.engine()
    engine.cache(PROMPT)
    assert fill(engine, 3)  # what is evicted is copied to the host tier
    engine.do(ops.free(90))
    pinned = pin(engine, PROMPT)
    assert [tier for tier, *_ in blocks_of(world, pinned)] == [HOST] * 3
    assert world.usage(HOST)["held"] == 3
    engine.step(ops.unpin(1))
    assert world.usage(HOST)["held"] == 0
    world.core.check_integrity()


@pytest.mark.parametrize("how", ["unpin", "expire", "close"])
def test_a_pin_ends_in_each_of_three_ways(how: str) -> None:
    world = World(num_device=4, num_host=0, lease_s=10.0)
    engine, other = world.engine(), world.engine()
    engine.cache(PROMPT)
    pin(engine, PROMPT)
    if how == "unpin":
        engine.step(ops.unpin(1))
    elif how == "expire":
        for _ in range(3):  # the lease is renewed, and the pin is not
            world.pass_time(4.0, engine, other)
    else:
        world.core.close_session(engine.ref, "tenant")
        world.pump()
    assert world.usage()["held"] == 0
    world.core.check_integrity()
    assert fill(other, 4)


def test_a_pin_whose_time_is_over_is_not_described_as_held() -> None:
    world = World(lease_s=10.0)
    engine = world.engine()
    engine.cache(PROMPT)
    pin(engine, PROMPT)
    assert sum(usage.num_held_blocks for usage in world.core.get_pool(POOL).usage) == 3
    world.clock.now += 10.0  # and no other call comes
    assert not any(usage.num_held_blocks for usage in world.core.get_pool(POOL).usage)
    world.core.check_integrity()


def test_the_id_of_a_pin_that_has_ended_can_be_used_again() -> None:
    world = World(lease_s=10.0)
    engine = world.engine()
    engine.cache(PROMPT)
    pin(engine, PROMPT)
    world.pass_time(6.0, engine)
    engine.step(ops.unpin(1))
    pin(engine, PROMPT)  # its time is longer than that of the first
    world.pass_time(6.0, engine)
    assert world.usage()["held"] == 3
    world.pass_time(6.0, engine)
    assert world.usage()["held"] == 0
    world.core.check_integrity()


def test_no_pin_takes_blocks_from_those_who_wait_and_what_is_unpinned_goes_to_them() -> None:
    world = World(num_device=4, num_host=0)
    engine, other = world.engine(), world.engine()
    engine.cache(PROMPT)
    pin(engine, PROMPT[:BLOCK])
    other.step(ops.admit(1, range(4 * BLOCK), wait=True))
    (result,) = engine.step(ops.pin([2, 3], [PROMPT, PROMPT[:BLOCK]])).results
    assert [failure.item for failure in result.failures] == [0]
    assert result.failures[0].shortage.reason == session_pb2.SHORTAGE_REASON_HEADROOM
    assert [*OperationResult(result).pinned.num_blocks] == [0, 1], "it is held already"
    engine.step(ops.unpin([1, 3]))
    assert other.state(1).num_tokens == 4 * BLOCK
    world.core.check_integrity()


def test_a_tenant_s_quota_counts_what_its_pins_hold() -> None:
    world = World(max_tenant_blocks=4)
    engine = world.engine()
    engine.cache(OTHER)
    engine.cache(PROMPT)
    pin(engine, PROMPT, PROMPT)  # each block counts once
    assert not fill(engine, 2)
    (result,) = engine.step(ops.pin(7, [OTHER])).results
    assert result.failures[0].shortage.reason == session_pb2.SHORTAGE_REASON_QUOTA
    assert fill(engine, 1)
    world.core.check_integrity()


def test_the_blocks_of_a_session_s_pins_are_bounded() -> None:
    world = World(max_pinned_blocks=5)
    engine = world.engine()
    engine.cache(PROMPT)
    (result,) = engine.step(ops.pin([1, 2, 3], [PROMPT, PROMPT, PROMPT[: 2 * BLOCK]])).results
    assert [failure.item for failure in result.failures] == [1]
    assert result.failures[0].error.reason == "QUOTA_EXCEEDED"
    assert [*OperationResult(result).pinned.num_blocks] == [3, 0, 2]
    world.core.check_integrity()


def test_a_pinned_prefix_is_forgotten_by_force_alone_and_is_not_found_again() -> None:
    world = World()
    engine, other = world.engine(), world.engine()
    engine.cache(PROMPT)
    pin(engine, PROMPT)
    for prefix in (PROMPT, PROMPT[:BLOCK]):
        with refused(BlockInUseError, "token_ids"):
            other.forget(prefix)
    with refused(BlockInUseError, "scope"):
        other.forget(ForgetScope.NAMESPACE)
    assert other.forget(PROMPT[: 2 * BLOCK], force=True).num_blocks_in_use == 2
    world.work()
    assert other.lookup([*PROMPT, 0]) == BLOCK
    engine.cache(PROMPT)  # in other blocks, but for the first, which is still pinned
    with refused(BlockInUseError, "token_ids"):
        other.forget(PROMPT[:BLOCK])
    assert other.forget(PROMPT).num_blocks_in_use == 0
    engine.step(ops.unpin(1))
    assert world.usage()["held"] == 0
    assert other.forget(PROMPT[:BLOCK]).num_blocks_in_use == 0
    world.work()
    world.core.check_integrity()


def test_a_pinned_block_that_was_forgotten_is_not_written_in_place() -> None:
    world = World()
    engine, other = world.engine(), world.engine()
    engine.admit(5, PROMPT)
    (*_, (_, last, _)) = blocks_of(world, pin(engine, PROMPT))
    other.forget(PROMPT, force=True)
    world.work()
    engine.do(ops.truncate(5, 3 * BLOCK - 1))
    engine.append(5, 9)
    assert engine.table(5)[2][1] != last
    world.core.check_integrity()


def test_pins_that_were_undone_are_not_remembered_until_their_time() -> None:
    world = World(lease_s=1e6)
    engine = world.engine()
    engine.cache(PROMPT)
    pin(engine, PROMPT)
    for i in range(2, 5):
        ids = range(100 * i, 100 * i + 100)
        engine.step(ops.pin(ids, [PROMPT[:BLOCK]] * 100), ops.unpin(ids))
        world.core.check_integrity()
    assert world.usage()["held"] == 3


def test_a_repeated_step_has_the_same_grant_and_pins_once() -> None:
    world = World()
    engine = world.engine()
    engine.cache(PROMPT)
    pin(engine, PROMPT)
    engine.repeat(engine.sent[-1])
    engine.step(ops.unpin(1))
    assert world.usage()["held"] == 0
