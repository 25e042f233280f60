"""The client against both planes, over networks that lose messages, and through their restarts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, DataClient, Execution, Session, Tensor, ops
from kvplane.errors import (
    SessionNotFoundError,
    StaleError,
    UnavailableError,
)
from kvplane.wire import columns
from kvplane.wire.v1.types_pb2 import SignedPayload
from tests.helpers.both_planes import LAYOUT, POOL, Planes
from tests.helpers.lossy_link import LossyLink
from tests.helpers.sharded_engine import numbers
from tests.helpers.waiting import until


async def run(execution: Execution, plan: SignedPayload, *, seed: int = 0) -> list[bytes]:
    """The attention of every layer of ``plan``; leaves its receipt in ``execution.receipts``."""
    await execution.start(plan)
    if execution.has_run:
        return []
    return [
        bytes((await execution.layer(i, *inputs(execution.num_tokens, seed + i))).data)
        for i in execution.layers
    ]


def inputs(num_tokens: int, seed: int) -> list[Tensor]:
    return [numbers((num_tokens, 1, 8), 1000 * seed + i) for i in range(3)]


def receipt_of(execution: Execution) -> SignedPayload:
    [receipt] = execution.receipts
    return receipt


def num_published(data_plane: DataPlaneServer) -> int:
    return sum(
        columns.count(columns.INT32, publications.indices)
        for part in data_plane.executor.report()
        for publications in part.publications
    )


async def test_a_lossy_network_changes_no_bit_of_the_attention(
    planes: Planes, control: ControlClient, data: DataClient
) -> None:
    async def outputs(target: DataClient, between: Callable[[], None]) -> list[bytes]:
        """A prompt and ten more tokens."""
        async with (
            await control.open_session(POOL, LAYOUT) as session,
            await target.open(session.grant) as execution,
        ):
            operation = ops.admit(1, [3] * 12, max_total_tokens=32, skip_prefix_lookup=True)
            found: list[bytes] = []
            for step in range(11):
                plan = (await session.step([operation])).plan
                between()
                found += await run(execution, plan, seed=10 * step)
                session.add_receipt(receipt_of(execution))
                operation = ops.append(1, [step], 1, first_positions=12 + step)
            return found

    undisturbed = await outputs(data, lambda: None)
    async with (
        LossyLink(planes.data.address) as proxy,
        DataClient(proxy.address, shared_memory=False) as disturbed,
    ):
        loop = asyncio.get_running_loop()

        def break_soon() -> None:
            loop.call_later(random.uniform(0, 0.005), proxy.hold, "answers")
            loop.call_later(random.uniform(0.005, 0.01), proxy.cut)

        assert await outputs(disturbed, break_soon) == undisturbed
        assert proxy.num_connections > 3


async def test_a_session_goes_on_after_the_control_plane_was_restarted(
    planes: Planes, control: ControlClient, data: DataClient
) -> None:
    session, _ = await computed(control, data)
    await session.submit_receipts()
    await until(lambda: num_published(planes.data) >= 2)
    await planes.restart_control()
    with pytest.raises((SessionNotFoundError, StaleError, UnavailableError)):
        await session.step([NEXT])
    await go_on(await session.reopen(), data, num_cached_tokens=16)


async def test_a_session_goes_on_after_the_data_plane_was_restarted(
    planes: Planes, control: ControlClient, data: DataClient
) -> None:
    session, execution = await computed(control, data)
    result = await session.step([NEXT])
    await planes.restart()
    with pytest.raises((StaleError, SessionNotFoundError)):
        await execution.start(result.plan)
    with pytest.raises((StaleError, SessionNotFoundError, UnavailableError)):
        await session.step([NEXT])
    await go_on(await session.reopen(), data, num_cached_tokens=0)


PROMPT = list(range(20))
NEXT = ops.append(1, [9], 1, first_positions=20)


async def computed(control: ControlClient, data: DataClient) -> tuple[Session, Execution]:
    """A session that has computed the prompt, and its execution."""
    session = await control.open_session(POOL, LAYOUT)
    execution = await data.open(session.grant)
    await run(execution, (await session.run(ops.admit(1, PROMPT, max_total_tokens=32))).plan)
    session.add_receipt(receipt_of(execution))
    return session, execution


async def go_on(session: Session, data: DataClient, *, num_cached_tokens: int) -> None:
    """Admit again, compute what is not cached, and one token more."""
    async with session, await data.open(session.grant) as execution:
        readmitted = await session.readmit({1: (PROMPT, 32)})
        assert readmitted == {1: num_cached_tokens}
        if readmitted.plan is not None:  # of tables that begin with cached blocks
            assert await run(execution, readmitted.plan) == []
            session.add_receipt(receipt_of(execution))
        num_missing = len(PROMPT) - num_cached_tokens
        for operation in (
            ops.append(1, [], num_missing, first_positions=num_cached_tokens),
            NEXT,
        ):
            result = await session.step([operation])
            assert len(await run(execution, result.plan)) == 3
            session.add_receipt(receipt_of(execution))
        await session.submit_receipts()
        assert ((await session.list_sequences([1]))[0]).num_written_tokens == len(PROMPT) + 1
