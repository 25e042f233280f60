"""Senders and receivers of blocks that take their time: pushes of others come through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from two_pools import THERE, TwoPools, push, side, two_pools

from kvplane import ops
from kvplane.errors import DeadlineExceededError, QuotaExceededError
from kvplane.integrations.push import sender
from kvplane.integrations.push.client import PrefixMover
from kvplane.integrations.push.push_pb2 import PushBlocksRequest, PushTicket
from kvplane.integrations.push.push_pb2_grpc import BlockPushServiceStub
from kvplane.integrations.push.receiver import PEERS
from tests.helpers.planes_in_process import PROMPT, SEQUENCE
from tests.helpers.waiting import until

ADMIT = ops.admit(SEQUENCE, PROMPT, max_total_tokens=64)
PATIENCE_S = 60.0


@pytest.fixture
async def pools(tmp_path: Path) -> AsyncIterator[TwoPools]:
    async with two_pools(tmp_path) as pools:
        yield pools


async def begin(
    stack: AsyncExitStack, ticket: PushTicket, first: PushBlocksRequest | None = None
) -> Any:
    """A push that says no more than its first request."""
    own = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(ticket.address, own))
    call: Any = BlockPushServiceStub(channel).PushBlocks()
    if first is None:
        await call.wait_for_connection()
    else:
        first.open.secret = ticket.secret
        await call.write(first)
    return call


async def ticket_of(pools: TwoPools, plan: Any) -> PushTicket:
    return await pools.there.receive(plan)


async def test_who_shows_no_ticket_keeps_nobody_out(pools: TwoPools) -> None:
    plan = (await pools.there.session.run(ADMIT)).plan
    ticket = await ticket_of(pools, plan)
    async with AsyncExitStack() as stack:
        for _ in range(24):
            await begin(stack, ticket)
        await push(ticket, await pools.chunks())


async def test_one_caller_cannot_hold_all_pushes(pools: TwoPools) -> None:
    """Its senders say nothing more; those of a caller on another connection are served. Once one
    of them is gone its place and the ticket that was refused serve another push.
    """
    there = pools.there
    plan = (await there.session.run(ADMIT)).plan
    requests = await pools.chunks()
    async with (
        AsyncExitStack() as stack,
        side(pools.control, there.plane, THERE) as other,
    ):
        slots = there.push.receiver._slots
        for num in range(1, 5):
            last = await begin(stack, await ticket_of(pools, plan), requests[0])
            await until(lambda num=num: slots._of_callers.total() >= num, PATIENCE_S)
        ticket = await ticket_of(pools, plan)
        with pytest.raises(QuotaExceededError, match="4 pushes of this caller"):
            await push(ticket, await pools.chunks())
        others_plan = (await other.session.run(ADMIT)).plan
        await push(await other.receive(others_plan), await pools.chunks())
        assert there.push.counts.num_pushes["received", "QUOTA_EXCEEDED"] == 1
        last.cancel()
        await until(lambda: slots._of_callers.total() < 4, PATIENCE_S)
        await push(ticket, await pools.chunks())


@asynccontextmanager
async def deaf() -> AsyncIterator[str]:
    """Where pushes are accepted and never answered."""

    async def never(requests: Any, context: Any) -> None:
        await asyncio.Event().wait()

    server = grpc.aio.server()
    handlers = {"PushBlocks": grpc.stream_unary_rpc_method_handler(never)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(PEERS.full_name, handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_receiver_that_takes_nothing_is_given_up(
    pools: TwoPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pools.here, pools.there
    plan = (await there.session.run(ADMIT)).plan
    real = await there.receive(plan)
    async with deaf() as address:
        ticket = PushTicket(
            address=address, secret=bytes(32), num_blocks=real.num_blocks, first_block=0
        )
        with monkeypatch.context() as patch:
            patch.setattr(sender, "STALL_S", 0.5)
            async with asyncio.timeout(PATIENCE_S / 2):
                with pytest.raises(DeadlineExceededError, match="takes nothing"):
                    await here.pushes.send_blocks(
                        here.session.grant, SEQUENCE, ticket, timeout_s=PATIENCE_S
                    )
    assert here.push.counts.num_pushes["sent", "DEADLINE_EXCEEDED"] == 1
    await there.session.abort_plans(there.session.last_number)
    async with PrefixMover(here.session, there.session) as mover:
        await mover.move(SEQUENCE, PROMPT, there_id=2)
