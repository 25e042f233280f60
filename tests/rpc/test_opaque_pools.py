"""Pools whose blocks are bytes that only callers understand: written, found, read, swapped, kept in
files, forgotten and followed as all blocks are, and computed with by nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from data_plane.execution.opaque_pages import MAX_KEY_BYTES
from kvplane import Tensor, ops
from kvplane.errors import InvalidRequestError, LayoutMismatchError, PoolFullError
from kvplane.execution.execution import shards_of
from kvplane.layout import MAX_PAGE_BYTES, OPAQUE_HEADER_BYTES, Layout
from kvplane.prefixes import BlocksRemoved, BlocksStored, CaughtUp, PrefixEvent, PrefixLoader
from kvplane.prefixes import tokens_of as named
from kvplane.results import ShardBlocks
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.chunk_store import (
    CHUNKS,
    PAGE_BYTES,
    PATIENCE_S,
    POOL,
    Store,
    page_of,
    store,
)
from tests.helpers.planes_in_process import control_plane
from tests.helpers.refusals import refused
from tests.helpers.waiting import until


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


async def test_nothing_of_another_chunk_is_behind_a_shorter_one(chunks: Store) -> None:
    """Files and pushes carry the memory as it is."""
    tier = chunks.plane.executor.pools.device_tier
    for i in range(len(tier)):
        await chunks.put({f"{i}".encode(): b"\xff" * PAGE_BYTES})
    await chunks.put({b"short": b"s"})
    (block,) = (tier[:, 0, OPAQUE_HEADER_BYTES] == ord("s")).nonzero()
    assert not tier[block, 0, OPAQUE_HEADER_BYTES + 1 :].any()


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


async def test_chunks_are_loaded_from_files_by_one_plan(tmp_path: Path) -> None:
    """A file that is wrong costs another one, and its chunk; no room costs all of them."""
    files = {"file_tier_dir": tmp_path, "file_tier_bytes": 2**20, "file_tier_after": 1}
    chunks = {b"chunk-%d" % i: b"%d" % i * 50 for i in range(20)}
    async with control_plane() as server, store(server, **files) as here:
        await here.put(chunks)
        await until(lambda: num_files(here) == len(chunks))
    bad, *_ = (each for each in tmp_path.rglob("*") if each.is_file() and each.stat().st_size)
    content = bad.read_bytes()
    bad.write_bytes(content[:-PAGE_BYTES] + b"?" + content[1 - PAGE_BYTES :])
    names = [named(name) for name in (*chunks, b"never stored")]
    async with control_plane() as server, store(server, **files) as here:
        loader = PrefixLoader(here.control, here.session, timeout_s=PATIENCE_S)
        async with loader:
            before = here.session.last_number
            await loader.load_blocks(names)
            assert here.session.last_number - before < 10, "two plans, of which one is undone"
        found = {name: await here.get(name) for name in chunks}
        assert sum(each is None for each in found.values()) == 1
        assert all(each in (None, chunks[name]) for name, each in found.items())
    async with control_plane() as server, store(server, **files, num_device_blocks=5) as here:
        async with PrefixLoader(here.control, here.session, timeout_s=PATIENCE_S) as loader:
            await loader.load_blocks(names)
            assert not any([await here.num_cached(name) for name in chunks])
            await loader.load_blocks(names[:6])
        assert sum([await here.num_cached(name) > 0 for name in chunks]) == 5
        usage, *_ = (await here.control.get_pool(POOL)).usage
        assert usage.num_held_blocks == 0


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
