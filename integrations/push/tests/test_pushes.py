"""Blocks are pushed from data plane to data plane: what arrives is what was sent, or nothing is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from two_pools import PUSHING, THERE, TwoPools, push, side, two_pools, variables

from data_plane.execution.table_blocks import TableBlocks
from kvplane import ControlClient, Layout, Tensor, ops
from kvplane.errors import (
    ChecksumMismatchError,
    InvalidRequestError,
    KvplaneError,
    LayoutMismatchError,
    NotPermittedError,
    PlanOutOfOrderError,
    QuotaExceededError,
    SessionExpiredError,
)
from kvplane.integrations.push import chunks, receiver
from kvplane.integrations.push.client import PrefixMover
from kvplane.integrations.push.push_pb2 import BlockChunk, PushBlocksRequest
from kvplane.integrations.push.push_pb2_grpc import BlockPushServiceStub
from kvplane.prefixes import tokens_of
from kvplane.results import ShardBlocks
from tests.helpers.planes_in_process import NUM_BLOCKS, PROMPT, SEQUENCE, Side
from tests.helpers.sharded_pool import POOL as SHARDED_POOL
from tests.helpers.sharded_pool import ShardedPool, by_heads
from tests.helpers.waiting import until

Requests = list[PushBlocksRequest]
ADMIT = ops.admit(SEQUENCE, PROMPT, max_total_tokens=64)
BLOCK_BYTES = 3 * 2 * 8 * 8 * 4
PATIENCE_S = 60.0


@pytest.fixture
async def pools(tmp_path: Path) -> AsyncIterator[TwoPools]:
    async with two_pools(tmp_path) as pools:
        yield pools


async def full_blocks(side: Side) -> Tensor:
    """Read the prompt's full blocks."""
    (read,) = await side.execution.read_blocks(SEQUENCE, range(NUM_BLOCKS - 1))
    return read.blocks


@pytest.mark.parametrize("chunk_bytes", [1024, chunks.CHUNK_BYTES], ids=["small", "large"])
async def test_what_is_prefilled_here_is_decoded_there_bit_for_bit(
    pools: TwoPools, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    here, there = pools.here, pools.there
    async with PrefixMover(here.session, there.session) as mover:
        moved = await mover.move(SEQUENCE, PROMPT, max_total_tokens=64)
    assert (moved.num_cached_tokens, moved.num_bytes) == (0, NUM_BLOCKS * BLOCK_BYTES)
    assert await there.num_cached() == 24
    for position in (28, 29):
        token = ops.append(SEQUENCE, [position], num_slots=1, first_positions=position)
        assert await there.run(token, [position]) == await here.run(token, [position])
    for pool, direction in ((here, "sent"), (there, "received")):
        assert pool.push.counts.num_bytes[direction] == moved.num_bytes
        assert pool.push.counts.num_pushes[direction, "OK"] == 1
        assert len(pool.push.receiver.tickets) == 0


async def test_opaque_pages_are_pushed_with_their_keys_and_sizes(tmp_path: Path) -> None:
    layout, page = Layout.of_opaque_pages("engine/tiny", 128), Tensor.zeros("uint8", (1, 1, 128))
    tokens = tokens_of(b"chunk")
    async with two_pools(tmp_path, layout=layout) as pools:
        here, there = pools.here, pools.there
        await here.execution.start((await here.session.run(ops.admit(SEQUENCE, tokens))).plan)
        await here.execution.write_blocks(
            SEQUENCE, [ShardBlocks(page, num_bytes=(5,))], keys=[b"key"]
        )
        async with PrefixMover(here.session, there.session) as mover:
            assert (await mover.move(SEQUENCE, tokens)).num_bytes == layout.block_bytes()
        for key, num_bytes in ((b"key", 5), (b"other", 0)):
            (read,) = await there.execution.read_blocks(SEQUENCE, keys=[key])
            assert read.num_bytes == (num_bytes,)


async def test_what_is_cached_there_is_not_sent_again(pools: TwoPools) -> None:
    async with PrefixMover(pools.here.session, pools.there.session) as mover:
        await mover.move(SEQUENCE, PROMPT)
        moved = await mover.move(SEQUENCE, PROMPT, there_id=2)
    assert (moved.num_cached_tokens, moved.num_bytes) == (24, BLOCK_BYTES)


def sealed(chunk: BlockChunk, **fields: Any) -> PushBlocksRequest:
    """A chunk with other fields and the checksum that goes with them."""
    changed = BlockChunk()
    changed.CopyFrom(chunk)
    for name, value in fields.items():
        setattr(changed, name, value)
    changed.checksum = chunks._checksum(changed, changed.data)
    return PushBlocksRequest(chunk=changed)


def with_changed_data(requests: Requests) -> Requests:
    data = bytearray(requests[2].chunk.data)
    data[100] ^= 1
    requests[2].chunk.data = bytes(data)
    return requests


def put_elsewhere(requests: Requests) -> Requests:
    requests[1].chunk.first_block, requests[2].chunk.first_block = 1, 0
    return requests


def of_another_layout(requests: Requests) -> Requests:
    requests[0].open.layout_fingerprint = bytes(32)
    return requests


def of_other_layers(requests: Requests) -> Requests:
    requests[0].open.shard.num_layers = 2
    return requests


def with_first(**fields: Any) -> Callable[[Requests], Requests]:
    """Return a fault that changes fields of the first chunk."""
    return lambda requests: [requests[0], sealed(requests[1].chunk, **fields), *requests[2:]]


WRONG: dict[str, tuple[Callable[[Requests], Requests], type[KvplaneError]]] = {
    # Before any other has written the first block.
    "with a gap": (lambda requests: [requests[0], *requests[2:]], InvalidRequestError),
    "without opening": (lambda requests: requests[1:], InvalidRequestError),
    "with changed data": (with_changed_data, ChecksumMismatchError),
    "put elsewhere": (put_elsewhere, ChecksumMismatchError),
    "of another layout": (of_another_layout, LayoutMismatchError),
    "of other layers": (of_other_layers, LayoutMismatchError),
    "too short": (lambda requests: requests[:-1], InvalidRequestError),
    "twice": (lambda requests: [*requests[:2], *requests[1:]], InvalidRequestError),
    "past the end": (
        lambda requests: [*requests[:-1], sealed(requests[-1].chunk, first_block=NUM_BLOCKS)],
        InvalidRequestError,
    ),
    "before the beginning": (with_first(first_block=-1), InvalidRequestError),
    "of no blocks": (
        lambda requests: [
            *(requests[0], sealed(requests[1].chunk, num_blocks=0, data=b"")),
            *requests[1:],
        ],
        InvalidRequestError,
    ),
    "of more layers": (with_first(num_layers=4), InvalidRequestError),
    "of another group": (with_first(group=1), InvalidRequestError),
}


async def test_a_push_that_is_wrong_publishes_nothing_and_a_right_one_can_follow(
    pools: TwoPools,
) -> None:
    there = pools.there
    plan = (await there.session.run(ADMIT)).plan
    for name, (fault, error) in WRONG.items():
        ticket = await there.receive(plan)
        wrong = fault(await pools.chunks())
        with pytest.raises(error):
            await push(ticket, wrong)
            pytest.fail(name)
    assert await there.num_cached() == 0
    right = await push(await there.receive(plan), await pools.chunks())
    there.session.add_receipt(right.receipt)
    await there.session.submit_receipts()
    assert await there.num_cached() == 24
    assert await full_blocks(there) == await full_blocks(pools.here)


async def test_a_ticket_serves_once(pools: TwoPools) -> None:
    there = pools.there
    plan = (await there.session.run(ADMIT)).plan
    ticket = await there.receive(plan)
    requests = await pools.chunks()
    await push(ticket, requests)
    with pytest.raises(NotPermittedError, match="no such ticket"):
        await push(ticket, requests)
    assert plan is not None
    again = await there.pushes.receive_blocks(there.session.grant, plan, SEQUENCE)
    assert again.HasField("receipt")
    assert not again.HasField("ticket")


async def test_a_push_after_an_abort_is_refused(pools: TwoPools) -> None:
    there = pools.there
    plan = (await there.session.run(ADMIT)).plan
    ticket, late = await there.receive(plan), await there.receive(plan)
    requests = await pools.chunks()
    with pytest.raises(InvalidRequestError, match="early"):
        await push(ticket, requests[:3])
    await there.session.abort_plans(there.session.last_number)
    await there.run(ops.admit(2, PROMPT), range(len(PROMPT)))
    before = await there.execution.read_blocks(2, range(NUM_BLOCKS))
    with pytest.raises(PlanOutOfOrderError):
        await push(late, requests)
    after = await there.execution.read_blocks(2, range(NUM_BLOCKS))
    assert before == after


async def test_a_push_after_the_session_is_refused_and_its_blocks_return(pools: TwoPools) -> None:
    there = pools.there
    plan = (await there.session.run(ADMIT)).plan
    ticket, late = await there.receive(plan), await there.receive(plan)
    requests = await pools.chunks()
    with pytest.raises(InvalidRequestError, match="early"):
        await push(ticket, requests[:-1])
    await there.session.close()
    await until(lambda: there.plane.executor.num_sessions == 0)
    with pytest.raises(SessionExpiredError):
        await push(late, requests)
    async with side(pools.control, there.plane, THERE) as other:
        assert await other.num_cached() == 0
        whole_pool = ops.admit(1, [1] * 8 * 32, max_total_tokens=8 * 32)
        await other.run(whole_pool, range(8 * 32))


async def test_only_what_is_written_is_sent(pools: TwoPools) -> None:
    here, there = pools.here, pools.there
    more = ops.append(SEQUENCE, [28], num_slots=1, first_positions=28)
    plan = (await here.session.run(more)).plan
    await here.execution.start(plan)
    async with PrefixMover(here.session, there.session) as mover:
        with pytest.raises(PlanOutOfOrderError, match="computes these blocks"):
            await mover.move(SEQUENCE, PROMPT)
        # What is full is not written by the plan.
        await mover.move(SEQUENCE, PROMPT[:24])
    for layer in here.execution.layers:
        await here.layer(layer, [28])


async def test_a_move_that_failed_gives_its_blocks_back_and_can_be_made_again(
    pools: TwoPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    here, there = pools.here, pools.there
    read, num_reads = TableBlocks.read, 0

    def read_some(self: TableBlocks, *args: Any, **how: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 5:
            raise SessionExpiredError("the session has ended")
        return read(self, *args, **how)

    monkeypatch.setattr(TableBlocks, "read", read_some)
    usage = (await there.session.step([ops.free([])])).usage
    async with PrefixMover(here.session, there.session) as mover:
        with pytest.raises(SessionExpiredError):
            await mover.move(SEQUENCE, PROMPT)
        assert await there.num_cached() == 0
        assert (await there.session.step([ops.free([])])).usage == usage
        await mover.move(SEQUENCE, PROMPT)
    assert await there.num_cached() == 24


async def test_a_silent_sender_is_cut_off(pools: TwoPools, monkeypatch: pytest.MonkeyPatch) -> None:
    there = pools.there
    plan = (await there.session.run(ADMIT)).plan
    ticket = await there.receive(plan)
    requests = await pools.chunks()
    requests[0].open.secret = ticket.secret
    async with grpc.aio.insecure_channel(ticket.address) as channel:
        call: Any = BlockPushServiceStub(channel).PushBlocks()
        with monkeypatch.context() as patch:
            patch.setattr(receiver, "STALL_S", 0.5)
            # On a busy machine it is cut off before it has said so much.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(requests[0])
                await call.write(requests[1])
            async with asyncio.timeout(PATIENCE_S):
                await call.code()
    counts = there.push.counts
    await until(lambda: counts.num_pushes.total() == 1)
    await push(await there.receive(plan), await pools.chunks())


async def test_blocks_go_only_where_they_may(pools: TwoPools) -> None:
    here, there = pools.here, pools.there
    plan = (await there.session.run(ADMIT)).plan
    ticket = await there.receive(plan)
    for address in ("localhost:1", "127.0.0.2:1", "unix:/tmp/127.0.0.1:1", ""):
        other = type(ticket)(address=address, secret=ticket.secret, num_blocks=1)
        with pytest.raises(NotPermittedError, match="KVPLANE_PUSH_TO"):
            await here.pushes.send_blocks(here.session.grant, SEQUENCE, other)


async def test_pushes_at_one_time_are_bounded(pools: TwoPools) -> None:
    here, there = pools.here, pools.there
    plan = (await there.session.run(ADMIT)).plan
    ticket = await there.receive(plan)
    slots = here.push.sender._slots
    with ExitStack() as stack:
        for caller in "abcde":
            stack.enter_context(slots.taken(caller))
        with pytest.raises(QuotaExceededError):
            await here.pushes.send_blocks(here.session.grant, SEQUENCE, ticket)
    await here.pushes.send_blocks(here.session.grant, SEQUENCE, ticket)


async def test_a_data_plane_neither_sends_nor_takes_blocks_unless_told_to(tmp_path: Path) -> None:
    async with two_pools(tmp_path, {}) as pools:
        with pytest.raises(InvalidRequestError, match="KVPLANE_PUSH_BIND"):
            async with PrefixMover(pools.here.session, pools.there.session) as mover:
                await mover.move(SEQUENCE, PROMPT)
        with pytest.raises(InvalidRequestError, match="KVPLANE_PUSH_TO"):
            async with PrefixMover(pools.there.session, pools.here.session) as mover:
                await mover.move(SEQUENCE, PROMPT, there_id=2)


async def test_each_shard_pushes_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(**PUSHING).items():
        monkeypatch.setenv(name, value)
    async with AsyncExitStack() as stack:
        sessions, executions = [], []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            shards: list[Any] = [{**ranges, "plug_ins": "push"} for ranges in by_heads(2)]
            pool = await stack.enter_async_context(ShardedPool(tmp_path / name, shards))
            control = await stack.enter_async_context(ControlClient(pool.address))
            session = await control.open_session(SHARDED_POOL, timeout_s=PATIENCE_S)
            sessions.append(await stack.enter_async_context(session))
            executions.append(await session.open_execution())
        prompt = list(range(20))
        plan = (await sessions[0].run(ops.admit(1, prompt, max_total_tokens=32))).plan
        key = Tensor("float32", (20, 4, 8), bytes(range(256)) * 10)
        await executions[0].start(plan)
        for layer in executions[0].layers:
            await executions[0].layer(layer, key, key, key)
        await sessions[0].submit_receipts()
        async with PrefixMover(*sessions) as mover:
            moved = await mover.move(1, prompt, max_total_tokens=32)
        assert moved.num_bytes == 3 * 4 * 2 * 4 * 8 * 8 * 4
        here, there = [await each.read_blocks(1, range(2)) for each in executions]
        assert [each.blocks for each in here] == [each.blocks for each in there]
