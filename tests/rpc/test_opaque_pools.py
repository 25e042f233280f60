"""Pools whose blocks are bytes that only callers understand: written, found, read, swapped, kept in
files, forgotten and followed as all blocks are, and computed with by nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from control_plane.server.server import ControlPlaneServer
from data_plane.execution.opaque_pages import MAX_KEY_BYTES
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, Execution, Session, Tensor, ops
from kvplane.errors import InvalidRequestError, LayoutMismatchError, PoolFullError
from kvplane.execution.execution import shards_of
from kvplane.layout import MAX_PAGE_BYTES, Layout
from kvplane.prefixes import BlocksRemoved, BlocksStored, CaughtUp, PrefixEvent, PrefixLoader
from kvplane.prefixes import tokens_of as named
from kvplane.results import Pinned, ShardBlocks
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.planes_in_process import control_plane, data_plane, settings_of
from tests.helpers.refusals import refused
from tests.helpers.waiting import until

POOL = "chunks"
PAGE_BYTES = 256
PATIENCE_S = 30.0
CHUNKS = {b"first": b"one" * 50, b"second": b"two" * 85 + b"!", b"third": b""}
"""By name, the bytes of three chunks: some of a page, all of one, and none."""


class Store:
    """A session that keeps chunks of bytes by their names."""

    def __init__(
        self, control: ControlClient, session: Session, execution: Execution, plane: DataPlaneServer
    ) -> None:
        self.control, self.session, self.execution, self.plane = control, session, execution, plane
        self._last_id = 0

    async def admit(self, name: bytes) -> int:
        """Admit the name's block and start its plan; returns the sequence's id."""
        self._last_id += 1
        step = await self.session.run(ops.admit(self._last_id, named(name)))
        await self.execution.start(step.plan)
        return self._last_id

    async def free(self, *sequence_ids: int) -> None:
        await self.execution.start((await self.session.run(ops.free(sequence_ids))).plan)
        await self.session.submit_receipts()

    async def put(self, chunks: Mapping[bytes, bytes]) -> None:
        """Store chunks: a step and a write, whose receipt goes with the next step."""
        ids = range(self._last_id + 1, self._last_id + 1 + len(chunks))
        self._last_id = ids[-1]
        admissions = zip(ids, chunks, strict=True)
        step = await self.session.step(
            [ops.admit(i, named(name), ends_with_plan=True) for i, name in admissions]
        )
        step.raise_for_status()
        assert step.plan is not None
        await self.execution.write_pages(step.plan, ids, [*chunks.values()], keys=[*chunks])
        await self.session.submit_receipts()

    async def pin(self, *names: bytes) -> Pinned:
        """Pin chunks by their names."""
        self._last_id += len(names)
        pins = range(self._last_id - len(names) + 1, self._last_id + 1)
        step = await self.session.run(ops.pin(pins, [*map(named, names)]))
        assert step.plan is None
        return step.results[0].pinned

    async def get(self, name: bytes, *, key: bytes | None = None) -> bytes | None:
        """The bytes of a chunk; None if it is not there. ``key``: asked for in the name's place."""
        pinned = await self.pin(name)
        if not pinned.num_blocks[0]:
            return None
        page = bytearray(b"\xee" * PAGE_BYTES)
        (num_bytes,) = await self.execution.read_pages(
            pinned, [memoryview(page)], keys=[name if key is None else key]
        )
        await self.session.step([ops.unpin(self._last_id)])
        return bytes(page[:num_bytes])

    async def num_cached(self, name: bytes) -> int:
        (match,) = await self.control.find_prefix(named(name), pool_ids=[POOL])
        return match.num_cached_tokens


def page_of(data: bytes) -> ShardBlocks:
    page = Tensor("uint8", (1, 1, PAGE_BYTES), data.ljust(PAGE_BYTES, b"\xee"))
    return ShardBlocks(page, num_bytes=(len(data),))


@asynccontextmanager
async def store(
    server: ControlPlaneServer, *, shared_memory: bool = True, **settings: Any
) -> AsyncIterator[Store]:
    """A data plane of opaque pages, registered with the control plane, and a session."""
    wanted: dict[str, Any] = {"opaque_page_bytes": PAGE_BYTES, "model_id": "engine/tiny"}
    wanted |= settings
    async with AsyncExitStack() as stack:
        given = settings_of(POOL, server.address, Path(), **wanted) | {"layout": None}
        plane = await stack.enter_async_context(data_plane(**given))
        client = ControlClient(server.address, timeout_s=PATIENCE_S, shared_memory=shared_memory)
        control = await stack.enter_async_context(client)
        await control.wait_ready(POOL, timeout_s=60)
        session = await stack.enter_async_context(control.open_session(POOL))
        execution = await stack.enter_async_context(session.open_execution())
        yield Store(control, session, execution, plane)


@pytest.fixture
async def chunks() -> AsyncIterator[Store]:
    async with control_plane() as server, store(server) as here:
        yield here


@pytest.fixture(params=["shared memory", "gRPC"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """As ``chunks``, with pages through shared memory or in messages."""
    shared = request.param == "shared memory"
    async with control_plane() as server, store(server, shared_memory=shared) as here:
        assert (shards_of(here.execution)[0].local is not None) == shared
        yield here


async def test_what_was_stored_is_read_by_its_name_and_key(either: Store) -> None:
    chunks = either
    assert await chunks.get(b"first") is None
    await chunks.put(CHUNKS)
    for name, data in CHUNKS.items():
        assert await chunks.get(name) == data
    assert await chunks.get(b"first", key=b"second") == b""  # as of another salt or adapter
    assert await chunks.get(b"first", key=b"") == b""
    assert (chunks.session.layout.is_opaque, chunks.execution.layers) == (True, [])


async def test_an_engine_of_other_pages_is_refused_when_it_opens_a_session(chunks: Store) -> None:
    for other in (
        Layout.of_opaque_pages("engine/tiny", 2 * PAGE_BYTES),
        Layout.of_opaque_pages("engine/large", PAGE_BYTES),
    ):
        with pytest.raises(LayoutMismatchError, match=r"page_bytes|model_id"):
            await chunks.control.open_session(POOL, other)


async def test_nothing_is_computed_with_opaque_pages(chunks: Store) -> None:
    await chunks.admit(b"first")
    rows = Tensor.zeros("uint8", (16, 1, 8))
    with refused(InvalidRequestError, "layer.layer", match="opaque pages"):
        await chunks.execution.layer(0, rows, rows, rows)
    with refused(InvalidRequestError, "layer.layer", match="opaque pages"):
        await chunks.execution.layer(0, None, rows, rows)
    await chunks.execution.write_blocks(1, [page_of(b"still")])
    await chunks.free(1)
    assert await chunks.get(b"first", key=b"") == b"still"


# By what is wrong: what is given of a chunk in place of its own, and the field that is named.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a longer page": ({"blocks": Tensor.zeros("uint8", (1, 1, PAGE_BYTES + 128))}, "blocks"),
    "numbers": ({"blocks": Tensor.zeros("float16", (1, 1, PAGE_BYTES))}, "blocks"),
    "more bytes than a page": ({"num_bytes": (PAGE_BYTES + 1,)}, "num_bytes[0]"),
    "fewer bytes than none": ({"num_bytes": (-1,)}, "num_bytes[0]"),
    "sizes of two": ({"num_bytes": (1, 1)}, "num_bytes"),
    "a long key": ({"keys": [b"k" * (MAX_KEY_BYTES + 1)]}, "keys[0]"),
    "keys of two": ({"keys": [b"a", b"b"]}, "keys"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_chunk_is_refused_with(chunks: Store, what: str) -> None:
    change, field = WRONG[what]
    given = {"blocks": page_of(b"").blocks, "num_bytes": (), "keys": [b"first"]} | change
    sequence_id = await chunks.admit(b"first")
    with refused(InvalidRequestError, field):
        await chunks.execution.write_blocks(
            sequence_id,
            [ShardBlocks(given["blocks"], num_bytes=given["num_bytes"])],
            keys=given["keys"],
        )
    await chunks.execution.write_blocks(
        sequence_id, [page_of(b"right")], keys=[b"k" * MAX_KEY_BYTES]
    )
    await chunks.free(sequence_id)
    assert await chunks.get(b"first", key=b"k" * MAX_KEY_BYTES) == b"right"


async def test_a_page_is_written_whole_or_not_at_all(chunks: Store) -> None:
    step = await chunks.session.run(ops.admit(1, [*named(b"first"), 1, 2, 3]))
    await chunks.execution.start(step.plan)
    pages = Tensor.zeros("uint8", (1, 2, PAGE_BYTES))
    with refused(InvalidRequestError, "entries", match="whole"):
        await chunks.execution.write_blocks(1, [ShardBlocks(pages)], entries=range(2))
    await chunks.execution.write_blocks(1, [page_of(b"x")])
    with refused(InvalidRequestError, "entries", match="whole"):
        await chunks.execution.write_blocks(1, [page_of(b"y")], entries=1)
    assert not chunks.execution.has_run


async def test_the_largest_page_fits_a_message() -> None:
    """Otherwise nobody could write it."""
    few = {"opaque_page_bytes": MAX_PAGE_BYTES, "num_device_blocks": 1, "num_host_blocks": 0}
    async with control_plane() as server, store(server, **few) as here:
        sequence_id = await here.admit(b"large")
        page = ShardBlocks(Tensor.zeros("uint8", (1, 1, MAX_PAGE_BYTES)))
        await here.execution.write_blocks(sequence_id, [page], keys=[b"large"])
        (read,) = await here.execution.read_blocks(sequence_id, keys=[b"large"])
        assert read.num_bytes == (MAX_PAGE_BYTES,)


async def test_chunks_survive_the_host_tier(chunks: Store) -> None:
    sequence_id = await chunks.admit(b"first")
    await chunks.execution.write_blocks(sequence_id, [page_of(b"kept")], keys=[b"first"])
    await chunks.session.submit_receipts()
    for operation in (ops.swap(sequence_id, "host"), ops.swap(sequence_id, "device")):
        await chunks.execution.start((await chunks.session.run(operation)).plan)
        await chunks.session.submit_receipts()
        (found,) = await chunks.execution.read_blocks(sequence_id, keys=[b"first"])
        assert bytes(found.blocks.data)[:4] == b"kept"
        assert found.num_bytes == (4,)


async def test_chunks_are_in_files_at_once_and_outlive_both_planes(tmp_path: Path) -> None:
    """Forgotten ones do not."""
    files = {"file_tier_dir": tmp_path, "file_tier_bytes": 2**20, "file_tier_after": 1}
    async with control_plane() as server, store(server, **files) as here:
        await here.put(CHUNKS)
        await until(lambda: num_files(here) == len(CHUNKS))
        await here.control.forget_prefixes(POOL, named(b"second"))
        await until(lambda: num_files(here) == len(CHUNKS) - 1)
    async with control_plane() as server, store(server, **files) as here:
        loader = PrefixLoader(here.control, here.session, timeout_s=PATIENCE_S)
        async with loader:
            loaded = {name: await loader.load(named(name)) for name in CHUNKS}
        assert {name for name, of in loaded.items() if of.num_loaded_tokens} == {b"first", b"third"}
        for name in (b"first", b"third"):
            assert await here.get(name) == CHUNKS[name]
        assert await here.get(b"second") is None


def num_files(here: Store) -> int:
    assert here.plane.files is not None
    return here.plane.files.files.num_files


async def test_chunks_are_found_again_when_the_control_plane_restarts() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(control_plane())
        address = first.address
        here = await stack.enter_async_context(store(first))
        await here.put(CHUNKS)
        await until(lambda: here.plane.executor.blocks.num_published == len(CHUNKS))
        await first.stop()
        second = await stack.enter_async_context(control_plane(bind=address))
        await here.control.wait_ready(POOL, timeout_s=60)
        again = await stack.enter_async_context(here.control.open_session(POOL))
        execution = await stack.enter_async_context(again.open_execution())
        there = Store(here.control, again, execution, here.plane)
        for name, data in CHUNKS.items():
            assert await there.get(name) == data
        second.core.check_integrity()


async def test_chunks_are_retained_and_evicted_as_prefixes_are(chunks: Store) -> None:
    await chunks.put(CHUNKS)
    await chunks.control.retain_prefix(POOL, named(b"first"), time_to_live_s=60)
    num_blocks = chunks.plane.executor.pools.num_blocks[pb.TIER_DEVICE]
    for i in range(2 * num_blocks):
        await chunks.put({f"more {i}".encode(): b"m"})
    assert await chunks.get(b"first") == CHUNKS[b"first"]
    assert await chunks.get(b"second") is None


async def test_who_follows_the_index_learns_what_comes_and_goes(chunks: Store) -> None:
    await chunks.put({b"before": b"1"})
    events = chunks.control.watch_prefixes(POOL)
    async with asyncio.timeout(PATIENCE_S):
        assert await until_caught_up(events) == {bytes(ops.pack_tokens(named(b"before")))}
        await chunks.put({b"after": b"2"})
        stored = await anext(events)
        assert isinstance(stored, BlocksStored)
        assert [bytes(x.token_ids) for x in stored.blocks] == [ops.pack_tokens(named(b"after"))]
        await chunks.control.forget_prefixes(POOL, named(b"after"))
        assert isinstance(await removed(events), BlocksRemoved)


async def until_caught_up(events: AsyncIterator[PrefixEvent]) -> set[bytes]:
    """The token ids of the blocks that are cached."""
    stored: set[bytes] = set()
    async for event in events:
        if isinstance(event, CaughtUp):
            break
        if isinstance(event, BlocksStored):
            stored |= {bytes(block.token_ids) for block in event.blocks}
    return stored


async def removed(events: AsyncIterator[PrefixEvent]) -> PrefixEvent:
    """The next event that is not a revision alone."""
    async for event in events:
        if not isinstance(event, CaughtUp):
            return event
    raise AssertionError


async def test_chunks_count_for_a_tenants_quota() -> None:
    async with control_plane(max_tenant_blocks=1) as server, store(server) as here:
        await here.admit(b"first")
        with pytest.raises(PoolFullError, match="quota"):
            await here.admit(b"second")
