"""Executions that a session opens: on all its shards, with its client's settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvplane import ControlClient, DataClient, Execution, Session, Tensor, ops
from kvplane.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LayoutMismatchError,
    PlaneUnavailableError,
    PoolNotReadyError,
    SequenceNotFoundError,
)
from kvplane.execution.execution import shards_of
from kvplane.results import ShardBlocks
from kvplane.transport.connection import Connection
from kvplane.wire.v1.types_pb2 import SignedPayload
from tests.helpers.both_planes import LAYOUT, POOL, Planes, zeros
from tests.helpers.data.plan_author import LAYOUT as LISTED_LAYOUT
from tests.helpers.data.plan_author import POOL_ID as LISTED_POOL
from tests.helpers.listed_peers import listed_peers
from tests.helpers.refusals import refused
from tests.helpers.sharded_engine import layer_input, prompt
from tests.helpers.sharded_engine import run as run_on_shards
from tests.helpers.sharded_pool import BY_BOTH, BY_LAYERS, ShardedPool, by_heads
from tests.helpers.sharded_pool import LAYOUT as SHARDED_LAYOUT
from tests.helpers.sharded_pool import POOL as SHARDED_POOL

PROMPT = [5] * 12


async def compute(session: Session, execution: Execution) -> SignedPayload:
    plan = (await session.run(ops.admit(1, PROMPT, skip_prefix_lookup=True))).plan
    assert plan is not None
    await execution.start(plan)
    for layer in execution.layers:
        await execution.layer(layer, *3 * [zeros(execution.num_tokens)])
    assert execution.has_run
    return plan


async def test_a_plans_receipts_are_the_sessions_once(
    control: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a call of the user; not again when a layer is sent or the plan presented again."""
    given: list[SignedPayload] = []
    async with control.open_session(POOL) as session:
        monkeypatch.setattr(session._steps, "add_receipt", given.append)
        async with session.open_execution() as execution:
            plan = await compute(session, execution)
            assert given == execution.receipts
            await execution.layer(2, *3 * [zeros(12)])
            await execution.start(plan)
            assert execution.has_run
            assert given == execution.receipts


async def test_a_layer_larger_than_a_message_is_refused_at_once_and_the_next_one_runs(
    planes: Planes,
) -> None:
    wide = Tensor("float32", (12, 1, 1 << 19), bytes(12 << 21))
    async with (
        ControlClient(planes.control.address, shared_memory=False) as control,
        control.open_session(POOL) as session,
        session.open_execution() as execution,
    ):
        step = await session.run(ops.admit(1, PROMPT, skip_prefix_lookup=True))
        await execution.start(step.plan)
        with refused(InvalidRequestError, "query", match="75,497,[0-9]+ bytes .* fewer tokens"):
            await execution.layer(0, wide, wide, wide)
        for layer in execution.layers:
            await execution.layer(layer, *3 * [zeros(12)])
        assert execution.has_run


@pytest.mark.parametrize("ends", ["session", "client"])
async def test_executions_are_closed_with_their_session_and_its_client(
    planes: Planes, ends: str
) -> None:
    control = ControlClient(planes.control.address)
    session = await control.open_session(POOL)
    executions = [await session.open_execution() for _ in range(2)]
    shards = [shards_of(execution)[0] for execution in executions]
    assert all(shard._is_open and shard.local is not None for shard in shards)
    await (session.close() if ends == "session" else control.close())
    assert not any(shard._is_open or shard.local is not None for shard in shards)
    await control.close()


async def test_executions_have_the_settings_of_the_control_client(planes: Planes) -> None:
    async with (
        ControlClient(planes.control.address, shared_memory=False, timeout_s=7.5) as control,
        control.open_session(POOL) as session,
        session.open_execution() as execution,
    ):
        (shard,) = shards_of(execution)
        assert shard.local is None
        assert shard._connection.timeout_s == 7.5
        await compute(session, execution)


async def test_executions_have_the_certificates_of_the_control_client(tmp_path: Path) -> None:
    async with (
        listed_peers(tmp_path) as peers,
        peers.client("engine-a") as control,
        control.open_session(LISTED_POOL) as session,
        session.open_execution() as execution,
    ):
        assert session.layout == LISTED_LAYOUT
        await execution.start((await session.run(ops.admit(1, PROMPT))).plan)
        assert execution.num_tokens == len(PROMPT)


async def test_a_session_waits_for_its_pool_and_takes_its_layout(tmp_path: Path) -> None:
    planes = Planes(tmp_path)
    await planes.start_control()
    async with ControlClient(planes.address) as control:
        with pytest.raises(PoolNotReadyError):
            await control.open_session(POOL, timeout_s=0.3)
        opening = asyncio.ensure_future(control.open_session(POOL))
        await asyncio.sleep(0.3)
        assert not opening.done()
        await planes.start()
        async with await opening as session:
            assert session.layout == LAYOUT
        with pytest.raises(LayoutMismatchError):
            await control.open_session(POOL, SHARDED_LAYOUT)
    await planes.__aexit__()


async def test_what_is_not_entered_opens_nothing(control: ControlClient) -> None:
    control.open_session(POOL)
    async with control.open_session(POOL) as session:
        session.open_execution()
        assert len(await control.list_sessions(POOL)) == 1
        assert not len(session._executions._opened)


async def test_the_shape_of_keys_is_the_layouts(planes: Planes, control: ControlClient) -> None:
    async with (
        control.open_session(POOL) as session,
        session.open_execution() as execution,
        DataClient(planes.data.address) as data,
        await data.open(session.grant) as lone,
    ):
        assert execution.key_shape(0) == (0, 1, 8)
        await execution.start((await session.run(ops.admit(1, PROMPT))).plan)
        assert execution.key_shape(2) == (12, 1, 8)
        with pytest.raises(InvalidRequestError, match="layer 3 is in no group"):
            execution.key_shape(3)
        with pytest.raises(InvalidRequestError, match="open the execution by its session"):
            lone.key_shape(0)


@pytest.mark.parametrize("shards", [by_heads(1), BY_BOTH], ids=["1", "both"])
async def test_blocks_that_are_read_are_written_elsewhere(tmp_path: Path, shards: list) -> None:
    """Of all shards, to another sequence, whose prompt is cached then."""
    async with (
        ShardedPool(tmp_path, shards) as pool,
        ControlClient(pool.address) as control,
        control.open_session(SHARDED_POOL) as session,
        session.open_execution() as execution,
    ):
        await run_on_shards(session, execution, 0, ops.admit(1, prompt(16)))
        await session.submit_receipts()
        read = await execution.read_blocks(1, range(2))
        assert len(read) == len(shards)
        assert {each.layout_fingerprint for each in read} == {session.layout.fingerprint}
        admit = ops.admit(2, prompt(16), skip_prefix_lookup=True)
        await execution.start((await session.run(admit)).plan)
        for first in range(2):
            assert not execution.has_run
            part = await execution.read_blocks(1, first)
            await execution.write_blocks(2, part, first)
        assert execution.has_run
        await session.submit_receipts()
        back = await execution.read_blocks(2, range(2))
        assert [each.blocks for each in back] == [each.blocks for each in read]
        with pytest.raises(SequenceNotFoundError):
            await execution.read_blocks(99)


async def test_a_plan_has_run_when_all_shards_have(tmp_path: Path) -> None:
    async with (
        ShardedPool(tmp_path, BY_LAYERS) as pool,
        ControlClient(pool.address) as control,
        control.open_session(SHARDED_POOL) as session,
        session.open_execution() as execution,
    ):
        await execution.start((await session.run(ops.admit(1, prompt(16)))).plan)
        seen = []
        for layer in execution.layers:
            await execution.layer(layer, *layer_input(SHARDED_LAYOUT, layer, 16, 0))
            seen.append((len(execution.receipts), execution.has_run))
        assert seen[-1] == (2, True)
        assert (1, False) in seen
        assert (1, True) not in seen


Change = Callable[[list[ShardBlocks]], list[ShardBlocks]]
REFUSED: dict[str, tuple[Change, type[Exception]]] = {
    "too few": (lambda blocks: blocks[1:], InvalidRequestError),
    "another layout": (
        lambda blocks: [ShardBlocks(blocks[0].blocks, bytes(32))],
        LayoutMismatchError,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_blocks_that_do_not_fit_are_not_written(control: ControlClient, name: str) -> None:
    change, error = REFUSED[name]
    async with control.open_session(POOL) as session, session.open_execution() as execution:
        await compute(session, execution)
        read = await execution.read_blocks(1, range(2))
        admit = ops.admit(2, PROMPT, skip_prefix_lookup=True)
        await execution.start((await session.run(admit)).plan)
        with pytest.raises(error):
            await execution.write_blocks(2, change(read), range(2))
        unknown = [ShardBlocks(each.blocks) for each in read]
        await execution.write_blocks(2, unknown, range(2))
        assert execution.has_run


async def test_an_execution_that_cannot_be_opened_leaves_no_connection(
    planes: Planes, control: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    close = Connection.close

    async def closing(connection: Connection) -> None:
        closed.append(connection.target)
        await close(connection)

    async with control.open_session(POOL) as session:
        await planes.data.stop()
        monkeypatch.setattr(Connection, "close", closing)
        with pytest.raises((PlaneUnavailableError, DeadlineExceededError)):
            await session.open_execution(timeout_s=0.3)
        assert closed == [planes.data.address]
