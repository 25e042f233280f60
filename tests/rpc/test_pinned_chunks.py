"""Whatever ends between a look-up and its load, or between a store and its receipt: the bytes are
right, or it is a miss, and every block comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from kvplane import ControlClient, Tensor, ops
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    NotPermittedError,
    PlaneUnavailableError,
    PoolFullError,
    QuotaExceededError,
    SessionExpiredError,
    StaleEpochError,
    StaleError,
    StaleGenerationError,
)
from kvplane.execution import execution as executions
from kvplane.prefixes import PrefixLoader
from kvplane.prefixes import tokens_of as named
from kvplane.results import Pinned
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import execution_pb2 as epb
from kvplane.wire.v1 import execution_pb2_grpc
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.chunk_store import CHUNKS, PAGE_BYTES, PATIENCE_S, POOL, Store, store
from tests.helpers.planes_in_process import control_plane, data_plane, settings_of, write_layout
from tests.helpers.served import Stream
from tests.helpers.waiting import until

NAMES = [*CHUNKS]


@pytest.fixture
async def chunks() -> AsyncIterator[Store]:
    async with control_plane() as server, store(server) as here:
        yield here


async def load(here: Store, pinned: Pinned, names: list[bytes]) -> list[bytes]:
    """The chunks that were pinned, each by its name."""
    pages = [bytearray(PAGE_BYTES) for _ in names]
    views = [memoryview(page) for page in pages]
    sizes = await here.execution.read_pages(pinned, views, keys=names, timeout_s=5)
    return [bytes(page[:num]) for page, num in zip(pages, sizes, strict=True)]


async def another(here: Store) -> Store:
    """A second session of the same pool."""
    session = await here.control.open_session(POOL)
    return Store(here.control, session, await session.open_execution(), here.plane)


async def num_held(here: Store) -> int:
    info = await here.control.get_pool(POOL)
    return sum(usage.num_held_blocks + usage.num_retired_blocks for usage in info.usage)


async def test_many_chunks_are_looked_up_and_loaded_in_two_calls(chunks: Store) -> None:
    await chunks.put(CHUNKS)
    pinned = await chunks.pin(*NAMES, b"never stored")
    assert [*pinned.num_blocks] == [1, 1, 1, 0]
    assert await load(chunks, pinned, NAMES) == [*CHUNKS.values()]
    assert await num_held(chunks) == 3
    await chunks.session.step([ops.unpin(range(10))])
    assert await num_held(chunks) == 0


async def test_more_pages_than_a_region_has_room_for_go_in_parts() -> None:
    many = {f"{i}".encode(): f"chunk {i}".encode() for i in range(10)}
    small = {"local_region_bytes": 4 * PAGE_BYTES}
    async with control_plane() as server, store(server, **small) as here:
        await here.put(many)
        assert await load(here, await here.pin(*many), [*many]) == [*many.values()]


@pytest.fixture
async def far(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """A session without shared memory, whose messages hold two pages."""
    monkeypatch.setattr(executions, "_MESSAGE_BYTES", 2 * PAGE_BYTES)
    async with control_plane() as server, store(server, shared_memory=False) as here:
        yield here


MANY = {f"{i}".encode(): f"chunk {i}".encode() * (i + 1) for i in range(11)}


async def test_messages_of_one_load_are_under_way_at_one_time(far: Store) -> None:
    await far.put(MANY)
    pinned = await far.pin(*MANY)
    assert await load(far, pinned, [*MANY]) == [*MANY.values()]
    wrong = [b"another" if i == 4 else name for i, name in enumerate(MANY)]
    sizes = [*map(len, MANY.values())]
    assert [*map(len, await load(far, pinned, wrong))] == [*sizes[:4], 0, *sizes[5:]]


async def test_a_load_that_ends_between_its_messages_leaves_no_answers_to_the_next(
    far: Store,
) -> None:
    await far.put(MANY)
    pinned = await far.pin(*MANY)
    for num_turns in range(40):
        begun = asyncio.create_task(load(far, pinned, [*MANY]))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        begun.cancel()
        last = [*MANY][-3:]
        rooms = [memoryview(bytearray(PAGE_BYTES)) for _ in last]
        sizes = await far.execution.read_pages(pinned, rooms, [8, 9, 10], keys=last)
        assert [bytes(room[:n]) for room, n in zip(rooms, sizes, strict=True)] == [
            MANY[name] for name in last
        ]
    with pytest.raises(InvalidRequestError):
        rooms = [memoryview(bytearray(PAGE_BYTES)) for _ in range(8)]
        await far.execution.read_pages(pinned, rooms, [0, 1, 99, 3, 4, 5, 6, 7])
    assert await load(far, pinned, [*MANY]) == [*MANY.values()]


async def test_a_block_that_was_taken_after_its_pin_ended_is_refused_and_not_read(
    chunks: Store,
) -> None:
    await chunks.put(CHUNKS)
    pinned = await chunks.pin(*NAMES)
    last = chunks.last_id
    await chunks.session.step([ops.unpin(range(last + 1))])
    assert await load(chunks, pinned, NAMES) == [*CHUNKS.values()], "nobody has taken them yet"
    num_blocks = chunks.plane.executor.pools.num_blocks[pb.TIER_DEVICE]
    for i in range(num_blocks):
        await chunks.put({f"other {i}".encode(): b"other"})
    with pytest.raises(StaleGenerationError) as caught:
        await load(chunks, pinned, NAMES)
    assert caught.value.field == "entries[0]"


async def test_a_grant_is_no_other_session_s_and_no_forged_one_is_read(chunks: Store) -> None:
    await chunks.put(CHUNKS)
    pinned = await chunks.pin(*NAMES)
    there = await another(chunks)
    with pytest.raises(NotPermittedError):
        await load(there, pinned, NAMES)
    grant: Any = pinned.grant
    forged = pb.SignedPayload(
        type=grant.type, payload=grant.payload[:-1] + b"\7", signature=grant.signature
    )
    with pytest.raises(BadSignatureError):
        await load(chunks, Pinned(pinned.num_blocks, forged), NAMES)


async def test_a_full_pool_drops_the_store_at_once_and_a_session_pins_so_many_blocks() -> None:
    few = {"num_device_blocks": 3, "num_host_blocks": 0}
    async with control_plane(max_pinned_blocks=2) as server, store(server, **few) as here:
        await here.put(CHUNKS)
        with pytest.raises(QuotaExceededError):
            await here.pin(*NAMES)
        await here.session.step([ops.unpin(range(10))])
        there = await another(here)
        await here.pin(NAMES[0])
        for name in NAMES[1:]:
            await there.pin(name)
        with pytest.raises(PoolFullError):
            await here.put({b"fourth": b"4"})
        await there.session.close()
        await until(lambda: here.plane.executor.num_sessions == 1)
        await here.put({b"fourth": b"4"})
        assert await here.get(b"fourth") == b"4"


async def test_two_engines_that_store_one_chunk_at_one_time_keep_one(chunks: Store) -> None:
    there = await another(chunks)
    await asyncio.gather(*(each.put(CHUNKS) for each in (chunks, there)))
    for each in (chunks, there):
        assert [await each.get(name) for name in NAMES] == [*CHUNKS.values()]
    assert await num_held(chunks) == 0


@pytest.mark.parametrize("at", ["load", "receipt"])
async def test_the_data_plane_ends_before_the(at: str) -> None:
    async with control_plane() as server, AsyncExitStack() as stack:
        first = await stack.enter_async_context(store(server))
        if at == "load":
            await first.put(CHUNKS)
            pinned = await first.pin(*NAMES)
            await first.plane.stop()
            with pytest.raises(PlaneUnavailableError):
                await load(first, pinned, NAMES)
        else:
            step = await first.session.run(ops.admit(1, named(b"first"), ends_with_plan=True))
            assert step.plan is not None
            await first.execution.write_pages(step.plan, 1, [b"lost"])
            await first.plane.stop()  # the receipt is still here
        async with store(server) as second:
            with pytest.raises(StaleEpochError):
                await first.session.step([ops.unpin(1)])
            assert await second.get(b"first") is None
            await second.put(CHUNKS)
            assert await second.get(b"first") == CHUNKS[b"first"]
            assert await num_held(second) == 0


async def test_the_next_control_plane_knows_no_pins_and_their_blocks_are_free() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(control_plane())
        address = server.address
        here = await stack.enter_async_context(store(server))
        await here.put(CHUNKS)
        pinned = await here.pin(*NAMES)
        await until(lambda: here.plane.executor.blocks.num_published == len(CHUNKS))
        await server.stop()
        await stack.enter_async_context(control_plane(bind=address))
        await here.control.wait_ready(POOL, timeout_s=PATIENCE_S)
        with pytest.raises(StaleError):
            await load(here, pinned, NAMES)
        there = await another(here)
        assert await num_held(there) == 0
        pinned = await there.pin(*NAMES)
        assert await load(there, pinned, NAMES) == [*CHUNKS.values()]


async def test_pins_end_with_their_session_which_can_read_no_more() -> None:
    async with control_plane() as server, store(server) as here:
        await here.put(CHUNKS)
        there = await another(here)
        pinned = await there.pin(*NAMES)
        server.core.sessions.by_id[there.session.id].expires_at_s = 0.0
        await until(lambda: here.plane.executor.num_sessions == 1)
        assert await num_held(here) == 0
        with pytest.raises(SessionExpiredError):
            here.plane.executor.open_pins(there.session.id, pinned.grant)
        with pytest.raises(SessionExpiredError):
            await load(there, pinned, NAMES)
        assert await here.get(b"first") == CHUNKS[b"first"]


async def test_a_file_with_a_flipped_byte_is_a_miss(tmp_path: Path) -> None:
    files = {"file_tier_dir": tmp_path, "file_tier_bytes": 2**20, "file_tier_after": 1}
    async with control_plane() as server, store(server, **files) as here:
        await here.put(CHUNKS)
        kept = here.plane.files
        assert kept is not None
        await until(lambda: kept.files.num_files == len(CHUNKS))
    for path in tmp_path.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        if CHUNKS[b"first"] in data:
            at = data.index(CHUNKS[b"first"])
            path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    async with control_plane() as server, store(server, **files) as here:
        loader = PrefixLoader(here.control, here.session, timeout_s=PATIENCE_S)
        async with loader:
            for name in NAMES:
                await loader.load(named(name))
        assert await here.get(b"first") is None
        assert await here.get(b"second") == CHUNKS[b"second"]
        assert await num_held(here) == 0


async def test_chunks_travel_on_a_stream_of_grpc_without_a_grant_of_their_own(
    chunks: Store,
) -> None:
    """As callers in other languages send them, who have no shared memory."""
    step = await chunks.session.step(
        [ops.admit(i, named(name), ends_with_plan=True) for i, name in enumerate(NAMES[:2], 1)]
    )
    pages = Tensor("uint8", (1, 2, PAGE_BYTES), bytes([1] * PAGE_BYTES + [2] * PAGE_BYTES))
    async with grpc.aio.insecure_channel(chunks.plane.address) as channel:
        stream = Stream(execution_pb2_grpc.ExecutionServiceStub(channel).Execute())
        write = epb.WriteBlocksRequest(
            plan=step.plan,
            sequence_ids=columns.pack(INT64, [1, 2]),
            entries=columns.pack(INT32, [0, 0]),
            blocks=pages.to_proto(),
            num_bytes=columns.pack(INT32, [3, PAGE_BYTES]),
        )
        assert (await stream.ask(write=write)).error.field == "open"
        await stream.ask(open=epb.OpenExecution(grant=chunks.session.grant))
        granted = epb.WriteBlocksRequest(grant=chunks.session.grant)
        assert (await stream.ask(write=granted)).error.field == "grant"
        chunks.session.add_receipt((await stream.ask(write=write)).written.receipt)
        await chunks.session.submit_receipts()
        pinned = await chunks.pin(*NAMES[:2])
        read = epb.ReadBlocksRequest(pin_grant=pinned.grant, entries=columns.pack(INT32, [1, 0]))
        answer = (await stream.ask(read=read)).read
        assert columns.read(INT32, answer.num_bytes, "").tolist() == [PAGE_BYTES, 3]
        assert answer.blocks.data == bytes([2] * PAGE_BYTES + [1] * 3).ljust(2 * PAGE_BYTES, b"\0")
        read.output.region_id = 1
        assert (await stream.ask(read=read)).error.field == "output"
        read.entries = columns.pack(INT32, [2])
        read.ClearField("output")
        assert (await stream.ask(read=read)).error.field == "entries[0]"
        stream.call.cancel()


async def test_keys_and_values_are_pinned_in_both_tiers_and_read_as_they_are(
    tmp_path: Path,
) -> None:
    layout = write_layout(tmp_path)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(control_plane())
        given = settings_of("pool", server.address, layout, num_device_blocks=4)
        plane = await stack.enter_async_context(data_plane(**given))
        control = await stack.enter_async_context(ControlClient(server.address))
        await control.wait_ready("pool", timeout_s=60)
        session = await stack.enter_async_context(control.open_session("pool"))
        execution = await stack.enter_async_context(session.open_execution())

        async def compute(sequence_id: int, tokens: list[int]) -> None:
            plan = (await session.run(ops.admit(sequence_id, tokens))).plan
            await execution.start(plan)
            for layer in execution.layers:
                rows = Tensor.from_array(torch.randn(execution.key_shape(layer)))
                await execution.layer(layer, rows, rows, rows)

        tokens = [*range(24)]
        await compute(1, tokens)
        (whole,) = await execution.read_blocks(1, range(3))
        await execution.start((await session.run(ops.free(1))).plan)
        await compute(2, [*range(100, 116)])  # takes two blocks, whose contents go to the host
        await session.submit_receipts()
        pinned = (await session.run(ops.pin(1, [tokens]))).results[0].pinned
        tiers = {*plan_pb2.PinGrant.FromString(pinned.grant.payload).tiers}
        assert tiers == {pb.TIER_DEVICE, pb.TIER_HOST}
        (found,) = await execution.read_blocks(pinned, pinned.entries(0))
        assert found.blocks == whole.blocks
        (some,) = await execution.read_blocks(pinned, [2, 0], first_layer=1, num_layers=1)
        assert torch.equal(some.blocks.torch()[0], whole.blocks.torch()[1][[2, 0]])
        plane.executor.check_integrity()
