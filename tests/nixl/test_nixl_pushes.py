"""Blocks are pushed by NIXL, with the promises of every push, and by gRPC where it fails."""

from __future__ import annotations

import asyncio
import importlib
import os
import queue
import signal
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from killed_pushes import receiver_is_killed, sender_is_killed
from two_pools import LAYOUT, NUM_BLOCKS, PROMPT, SEQUENCE, Side, TwoPools, two_pools

from data_plane.server.push import chunks
from data_plane.server.push.nixl import agent
from data_plane.server.push.nixl.outgoing import Outgoing
from data_plane.server.push.nixl.process import AgentProcess
from data_plane.server.push.nixl.staging import Staging
from kvplane import PrefixMover, ops
from kvplane.errors import (
    ChecksumMismatchError,
    InvalidRequestError,
    KvplaneError,
    PlaneUnavailableError,
    UnavailableError,
)
from kvplane.shard import Shard
from kvplane.v1 import push_pb2, push_pb2_grpc
from kvplane.v1.data_pb2 import PushTicket
from kvplane.v1.push_pb2 import BlockChunk, PushStagedBlocksRequest, PushStagedBlocksResponse
from kvplane.wire.error_codec import from_rpc_error

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
BY_NIXL = {"push_transfer": "nixl"}
AUTO = {"push_transfer": "auto"}
BLOCK_BYTES = 3 * 2 * 8 * 8 * 4
ADMIT = ops.admit(SEQUENCE, PROMPT, max_total_tokens=64)
PATIENCE_S = 60.0


def staging_of(side: Side) -> Staging:
    assert side.plane.push is not None
    staging = side.plane.push._staging
    assert staging is not None
    return staging


def ready(staging: Staging) -> Staging:
    staging._running().wait_until_ready(PATIENCE_S)
    return staging


def agent_of(side: Side) -> AgentProcess:
    return staging_of(side)._running()


def nixl_bytes(side: Side, direction: str) -> int:
    assert side.plane.push is not None
    return side.plane.push.counts.num_nixl_bytes[direction]


async def moved(pools: TwoPools) -> int:
    for side in (pools.here, pools.there):
        if side.plane.push is not None and side.plane.push.takes_nixl:
            with suppress(PlaneUnavailableError):  # it has just ended, so they go by gRPC
                await asyncio.to_thread(ready, staging_of(side))
    async with PrefixMover(pools.here.session, pools.there.session) as mover:
        done = await mover.move(SEQUENCE, PROMPT, max_total_tokens=64)
    assert await pools.there.num_cached() == 24
    read = [
        (await s.data.read_blocks(s.session.grant, SEQUENCE, num_blocks=NUM_BLOCKS - 1)).blocks
        for s in (pools.here, pools.there)
    ]
    assert read[0] == read[1]
    return done.num_bytes


@pytest.fixture
def staging() -> Iterator[Staging]:
    """Of the tests' own: one push at a time."""
    staging = Staging(1, chunks.max_chunk_bytes(LAYOUT, Shard.whole(LAYOUT)), only_loopback=True)
    with closing(staging):
        yield ready(staging)


@pytest.fixture
async def pools(tmp_path: Path) -> AsyncIterator[TwoPools]:
    async with two_pools(tmp_path, here_settings=BY_NIXL, **BY_NIXL) as pools:
        yield pools


@pytest.mark.parametrize("chunk_bytes", [1024, chunks.CHUNK_BYTES], ids=["small", "large"])
async def test_what_arrives_by_nixl_is_what_was_sent(
    pools: TwoPools, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    num_bytes = await moved(pools)
    assert num_bytes == NUM_BLOCKS * BLOCK_BYTES
    assert nixl_bytes(pools.here, "sent") == nixl_bytes(pools.there, "received") == num_bytes
    for position in (28, 29):
        token = ops.append(SEQUENCE, [position], num_slots=1, first_position=position)
        attended = [await side.run(token, [position]) for side in (pools.here, pools.there)]
        assert attended[0] == attended[1]


@pytest.mark.parametrize("here, there", [(AUTO, {}), ({}, AUTO), (AUTO, AUTO)])
async def test_what_both_have_is_used(
    here: dict[str, str], there: dict[str, str], tmp_path: Path
) -> None:
    async with two_pools(tmp_path, here_settings=here, **there) as pools:
        num_bytes = await moved(pools)
        wanted = num_bytes if here and there else 0
        assert nixl_bytes(pools.here, "sent") == nixl_bytes(pools.there, "received") == wanted


async def test_nothing_is_sent_by_grpc_where_that_is_not_wanted(tmp_path: Path) -> None:
    async with two_pools(tmp_path, here_settings=BY_NIXL) as pools:
        usage = (await pools.there.session.step([])).usage
        with pytest.raises(UnavailableError, match="has no NIXL"):
            await moved(pools)
        assert (await pools.there.session.step([])).usage == usage


@pytest.mark.parametrize("whose", ["here", "there"])
async def test_an_agent_that_dies_on_the_way_is_replaced_by_grpc(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1024)
    async with two_pools(tmp_path, here_settings=AUTO, **AUTO) as pools:
        dying = agent_of(getattr(pools, whose))
        write, num_writes = Outgoing.write, 0

        def die(self: Outgoing, slot: int, data: memoryview) -> None:
            nonlocal num_writes
            num_writes += 1
            if num_writes == 3:
                dying._process.kill()
                dying._process.wait()
            write(self, slot, data)

        monkeypatch.setattr(Outgoing, "write", die)
        num_bytes = await moved(pools)
        assert 0 < nixl_bytes(pools.here, "sent") < num_bytes


async def test_a_push_by_nixl_alone_fails_with_its_agent_and_gives_the_blocks_back(
    pools: TwoPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = (await pools.there.session.step([])).usage
    dying = agent_of(pools.there)
    with monkeypatch.context() as patch:
        write = Outgoing.write

        def die(self: Outgoing, slot: int, data: memoryview) -> None:
            dying._process.kill()
            dying._process.wait()
            write(self, slot, data)

        patch.setattr(Outgoing, "write", die)
        with pytest.raises(UnavailableError, match="NIXL"):
            await moved(pools)
    assert await pools.there.num_cached() == 0
    assert (await pools.there.session.step([])).usage == usage
    monkeypatch.setattr("data_plane.server.push.nixl.staging._RESTART_S", 0.0)
    assert await moved(pools) == nixl_bytes(pools.there, "received")


async def test_the_receiver_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await receiver_is_killed(tmp_path, monkeypatch, **BY_NIXL)


async def test_the_sender_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await sender_is_killed(tmp_path, monkeypatch, **BY_NIXL)


async def give_back(side: Side) -> None:
    """The blocks of a plan that was not run."""
    await side.session.abort_plan(side.session.last_number)
    plan = (await side.session.free(SEQUENCE)).plan
    assert plan is not None
    side.session.add_receipt((await side.data.copy_blocks(side.session.grant, plan)).receipt)
    await side.session.submit_receipts()


class Peer:
    """A sender made by hand, which may do what it likes."""

    def __init__(self, side: Side, staging: Staging, stack: ExitStack) -> None:
        self._source = side
        self._staging = staging
        self._stack = stack

    def open(self, ticket: PushTicket) -> None:
        executor = self._source.plane.executor
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        channel = self._stack.enter_context(grpc.insecure_channel(ticket.address))
        stub: Any = push_pb2_grpc.BlockPushServiceStub(channel)
        self._call = stub.PushStagedBlocks(iter(self._requests.get, None))
        self._stack.callback(self._requests.put, None)
        self._requests.put(
            PushStagedBlocksRequest(
                open=push_pb2.OpenPush(
                    secret=ticket.secret,
                    source=executor.block_source(),
                    shard=executor.shard.to_proto(),
                )
            )
        )
        self.staging = self.next().staging
        self.outgoing = self._stack.enter_context(self._staging.outgoing(self.staging))

    def next(self) -> PushStagedBlocksResponse:
        try:
            answer: PushStagedBlocksResponse = next(self._call)
        except grpc.RpcError as error:
            raise from_rpc_error(self._call) from error
        return answer

    def say(self, chunk: BlockChunk | None) -> PushStagedBlocksResponse:
        self._requests.put(chunk and PushStagedBlocksRequest(chunk=chunk))
        return self.next()


def in_slot(chunk: BlockChunk, slot: int, **fields: Any) -> BlockChunk:
    """The chunk without its data, with other fields and the checksum of both."""
    told = BlockChunk()
    told.CopyFrom(chunk)
    for name, value in fields.items():
        setattr(told, name, value)
    told.checksum = chunks._checksum(told, chunk.data)
    told.slot = slot
    told.data = b""
    return told


WRONG: list[tuple[dict[str, Any], type[KvplaneError]]] = [
    ({"slot": 3}, InvalidRequestError),
    ({"slot": -1}, InvalidRequestError),
    ({"slot": 0, "num_blocks": 2**40}, InvalidRequestError),
    ({"slot": 0, "num_layers": -1}, InvalidRequestError),
    ({"slot": 0, "num_layers": 0}, ChecksumMismatchError),
    ({"slot": 0, "group": 1}, InvalidRequestError),
    ({"slot": 0, "first_block": NUM_BLOCKS}, InvalidRequestError),
    ({"slot": 1}, ChecksumMismatchError),  # where nothing was written
]


async def test_what_is_wrong_is_refused_and_nothing_of_it_is_found(
    pools: TwoPools, staging: Staging
) -> None:
    there = pools.there
    plan = (await there.session.step([ADMIT])).raise_for_status().plan
    pieces = [request.chunk for request in (await pools.chunks())[1:]]

    def push(ticket: PushTicket, wrong: dict[str, Any]) -> PushStagedBlocksResponse:
        with ExitStack() as stack:
            peer = Peer(pools.here, staging, stack)
            peer.open(ticket)
            peer.outgoing.write(0, memoryview(pieces[0].data))
            return peer.say(in_slot(pieces[0], **wrong))

    for wrong, error in WRONG:
        ticket = await there.receive(plan)
        with pytest.raises(error):
            await asyncio.to_thread(push, ticket, wrong)
            pytest.fail(str(wrong))
    assert (await asyncio.to_thread(push, await there.receive(plan), {"slot": 0})).num_taken == 1
    assert await there.num_cached() == 0
    await give_back(there)
    assert await moved(pools) == NUM_BLOCKS * BLOCK_BYTES


@contextmanager
def busy(side: Side) -> Iterator[None]:
    """The worker thread, with something else."""
    free = threading.Event()
    side.plane._worker.submit(lambda: free.wait(PATIENCE_S), None)
    try:
        yield
    finally:
        free.set()


async def test_what_a_peer_writes_after_the_checksum_is_not_what_is_kept(
    pools: TwoPools, staging: Staging
) -> None:
    there = pools.there
    plan = (await there.session.step([ADMIT])).raise_for_status().plan
    ticket = await there.receive(plan)
    pieces = [request.chunk for request in (await pools.chunks())[1:]]

    def push() -> push_pb2.PushBlocksResponse:
        with ExitStack() as stack:
            peer = Peer(pools.here, staging, stack)
            peer.open(ticket)
            for i, piece in enumerate(pieces):
                peer.outgoing.write(0, memoryview(piece.data))
                with busy(there):
                    assert peer.say(in_slot(piece, 0)).num_taken == i + 1
                    peer.outgoing.write(0, memoryview(bytes(len(piece.data))))
            return peer.say(None).done

    done = await asyncio.to_thread(push)
    there.session.add_receipt(done.receipt)
    await there.session.submit_receipts()
    for block in range(NUM_BLOCKS):
        read = await there.data.read_blocks(there.session.grant, SEQUENCE, first_block=block)
        assert read.blocks.data == pieces[block].data


async def test_who_lies_about_an_address_writes_no_memory_of_the_data_plane(
    tmp_path: Path, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # which lets a peer write anywhere in a process
    async with two_pools(tmp_path, here_settings=AUTO, **AUTO) as pools:
        there = pools.there
        plan = (await there.session.step([ADMIT])).raise_for_status().plan
        ticket = await there.receive(plan)
        pool = there.plane.executor.pools.device_tier
        before, attacked = pool.numpy().tobytes(), agent_of(there)

        def attack() -> None:
            with ExitStack() as stack:
                peer = Peer(pools.here, staging, stack)
                peer.open(ticket)
                honest = peer.staging
                old, new = struct.pack("<Q", honest.address), struct.pack("<Q", pool.data_ptr())
                assert honest.metadata.count(old) == 1
                lie = push_pb2.Staging(
                    metadata=honest.metadata.replace(old, new),
                    address=pool.data_ptr(),
                    slot_bytes=honest.slot_bytes,
                    num_slots=honest.num_slots,
                )
                liar = stack.enter_context(
                    closing(Staging(1, honest.slot_bytes, only_loopback=True))
                )
                with ready(liar).outgoing(lie) as outgoing, pytest.raises(PlaneUnavailableError):
                    outgoing.write(0, memoryview(b"x" * 1024))

        await asyncio.to_thread(attack)
        assert pool.numpy().tobytes() == before
        assert attacked._process.wait(PATIENCE_S) < 0, "it wrote where it has no memory"
        await give_back(there)
        assert await moved(pools) == NUM_BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize("metadata", [b"", bytes(70_000), b"nixl" * 100])
def test_metadata_that_is_none_is_refused(metadata: bytes, staging: Staging) -> None:
    told = push_pb2.Staging(
        metadata=metadata, address=1, slot_bytes=staging.slot_bytes, num_slots=1
    )
    with pytest.raises(PlaneUnavailableError), staging.outgoing(told):
        pytest.fail("connected")
    with staging.incoming() as incoming:
        assert 0 < len(incoming.message.metadata) < 4096


def test_a_receiver_that_dies_ends_no_other_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # which needs the receiver's help, and it is stopped
    with ExitStack() as stack:
        staging, dying, living = (
            ready(stack.enter_context(closing(Staging(1, 64 << 20, only_loopback=True))))
            for _ in range(3)
        )
        told = stack.enter_context(dying.incoming()).message
        process = dying._running()._process
        with staging.outgoing(told) as outgoing, ThreadPoolExecutor(1) as pool:
            used = staging._agent
            outgoing.write(0, memoryview(b"x" * 16))
            process.send_signal(signal.SIGSTOP)
            writing = pool.submit(outgoing.write, 0, memoryview(bytes(64 << 20)))
            time.sleep(0.5)
            assert not writing.done()
            process.kill()
            with pytest.raises(PlaneUnavailableError, match="NIXL refuses"):
                writing.result(PATIENCE_S)
        incoming = stack.enter_context(living.incoming())
        with staging.outgoing(incoming.message) as outgoing:
            outgoing.write(0, memoryview(b"z" * 16))
        assert bytes(incoming.read(0, 16)) == b"z" * 16
        assert staging._agent is used


async def test_an_agent_without_work_takes_no_time(staging: Staging) -> None:
    with staging.incoming():
        pass
    process = staging._running()._process.pid
    used_s = [await cpu_s(process) for _ in range(2)]
    assert used_s[1] - used_s[0] < 0.1


async def cpu_s(process: int) -> float:
    """Of a process, after a second."""
    await asyncio.sleep(1)
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_library_is_the_real_one() -> None:
    name = agent.library()
    assert name is not None
    assert "UCX" in importlib.import_module(f"{name}._api").nixl_agent("test").get_plugin_list()
