"""Keys change under engines that work, over real sockets; nobody notices but who forges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from sharded_engine import finish, outputs_of, prompt, run
from sharded_pool import LAYOUT, POOL, ShardedPool, by_heads

from control_plane.planning.pools.rotation import unconfirmed
from data_plane.server.registration_client import RegistrationClient
from kvplane import ControlClient, ops
from kvplane.clients.sharded_execution import ShardedDataClient
from kvplane.errors import BadSignatureError, PlaneUnavailableError
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import signing

LIFETIME_S = 0.3


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[ShardedPool]:
    async with ShardedPool(
        tmp_path, by_heads(2), key_lifetime_s=LIFETIME_S, heartbeat_s=0.3
    ) as pool:
        yield pool
        pool.control.core.check_integrity()
        for plane in pool.planes.values():
            plane.executor.check_integrity()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not reached():
            await asyncio.sleep(0.01)


def num_rotations(pool: ShardedPool) -> int:
    return pool.control.core._pools[POOL].statistics.num_key_rotations


async def test_engines_go_on_and_forgers_are_refused(tmp_path: Path, pool: ShardedPool) -> None:
    """The session's grant and its first plan are of keys that are long dropped at the end."""
    (folder := tmp_path / "quiet").mkdir()
    expected = await outputs_of(folder, by_heads(2), LAYOUT)
    keys = pool.control.core._pools[POOL].keys
    async with (
        ControlClient(pool.address) as control,
        await control.open_session(POOL, LAYOUT) as session,
        ShardedDataClient(session.shards, LAYOUT) as data,
    ):
        former, first = keys.present, session.grant
        execution = await data.open(session.grant)
        outputs = await run(session, execution, 0, ops.admit(1, prompt(21)))
        for step in (1, 2):
            seen = num_rotations(pool)
            await until(lambda seen=seen: num_rotations(pool) > seen)  # receipts are of former keys
            append = ops.append(1, [step], 1, first_position=20 + step)
            outputs += await run(session, execution, step, append)
        seen = num_rotations(pool)
        result = await session.step([ops.admit(2, [*prompt(21)[:16], 7, 8, 9])])
        await until(lambda: num_rotations(pool) >= seen + 2)  # the plan is of a former key
        await until(
            lambda: all(p.executor.keys.id == keys.present_id for p in pool.planes.values())
        )
        await data.open(first)  # the grant too
        outputs += await finish(session, execution, result, 3)
        assert [bytes(x.data) for x in outputs] == [bytes(x.data) for x in expected]
        plan = tpb.Plan.FromString(result.plan.payload)
        plan.number += 100
        payload = plan.SerializeToString()
        signature = signing.sign(former, signing.PLAN, payload)
        forged = tpb.SignedPayload(type=signing.PLAN, payload=payload, signature=signature)
        refused = pool.planes[0].executor.counters.num_rejections
        before = refused["BAD_SIGNATURE"]
        with pytest.raises(BadSignatureError):
            await execution.start(forged)
        assert refused["BAD_SIGNATURE"] == before + 1
        await session.submit_receipts()
        assert not pool.control.core._sessions[session.ref.session_id].plans


async def work(pool: ShardedPool) -> None:
    """A session's whole life."""
    async with (
        ControlClient(pool.address) as control,
        await control.open_session(POOL, LAYOUT) as session,
        ShardedDataClient(session.shards, LAYOUT) as data,
    ):
        execution = await data.open(session.grant)
        await run(session, execution, 0, ops.admit(1, prompt(21)))
        await session.submit_receipts()


async def test_a_shard_that_never_confirms_stops_the_rotation_alone(
    pool: ShardedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_keys = RegistrationClient._tell_keys

    async def silent(self: RegistrationClient, stream: object) -> None:
        if self._executor is not pool.planes[1].executor:
            await tell_keys(self, stream)

    monkeypatch.setattr(RegistrationClient, "_tell_keys", silent)
    state = pool.control.core._pools[POOL]
    await until(lambda: unconfirmed(state) == [1])
    num = num_rotations(pool)
    await work(pool)
    await asyncio.sleep(2 * LIFETIME_S)
    assert unconfirmed(state) == [1]
    assert num_rotations(pool) == num
    [observed] = pool.control.core.observe_pools()
    assert observed.num_unconfirmed_key_shards == 1
    assert observed.key_age_s > LIFETIME_S
    monkeypatch.undo()
    pool.control._servicer._registrar._streams[POOL, 1].fail(PlaneUnavailableError("broken"))
    await until(lambda: num_rotations(pool) > num + 1)  # its next Hello says what it holds
    await work(pool)


async def test_planes_that_restart_in_mid_rotation_find_together_again(pool: ShardedPool) -> None:
    for restart in (lambda: pool.stop(1), pool.restart_control):
        state = pool.control.core._pools[POOL]
        await until(lambda state=state: bool(state.keys.next))
        await restart()
        if 1 not in pool.planes:
            await pool.start(1)
        await until(lambda: POOL in pool.control.core._pools)
        await until(lambda: pool.control.core._pools[POOL].ready)
        await work(pool)
        num = num_rotations(pool)
        await until(lambda num=num: num_rotations(pool) > num)
        await work(pool)
