"""A data plane is killed while blocks go from one to another: nothing half-written is found."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from two_pools import HERE, PUSHING, THERE, data_plane, push_of, settings_of, variables

from data_plane.blocks_from_outside import BlockRange
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, Execution, LayerGroup, Layout, Session, Tensor, ops
from kvplane.errors import KvplaneError, UnavailableError
from kvplane.integrations.push import chunks
from kvplane.integrations.push.client import PushClient
from kvplane.integrations.push.push_pb2 import BlockChunk, PushTicket
from tests.helpers.planes_in_process import control_plane, write_layout
from tests.helpers.waiting import until

ROOT = Path(__file__).parents[3]
LAYOUT = Layout("m", 16, "float32", "float32", (LayerGroup("full", (0, 1), 8, 64),))
NUM_BLOCKS = 256
PROMPT = list(range(16 * NUM_BLOCKS))
# 32 MiB, in 16 chunks.
NUM_BYTES = NUM_BLOCKS * 2 * 2 * 8 * 16 * 64 * 4
PATIENCE_S = 60.0


@contextmanager
def process(folder: Path, pool_id: str, control: str) -> Iterator[subprocess.Popen[bytes]]:
    """A data plane in a process of its own."""
    layout = write_layout(folder, LAYOUT)
    settings = settings_of(pool_id, control, layout, num_device_blocks=300)
    flags = [x for name, at in settings.items() for x in (f"--{name.replace('_', '-')}", str(at))]
    started = subprocess.Popen(
        [sys.executable, "-m", "data_plane", *flags],
        cwd=ROOT,
        env=os.environ | variables(**PUSHING),
    )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


async def compute(session: Session, execution: Execution) -> None:
    """The prompt, without attention."""
    plan = (await session.run(ops.admit(1, PROMPT))).plan
    assert plan is not None
    shape = (len(PROMPT), 8, 64)
    key = Tensor("float32", shape, os.urandom(Tensor.size_bytes("float32", shape)))
    await execution.start(plan)
    for layer in (0, 1):
        await execution.layer(layer, None, key, key)
    await session.submit_receipts()


async def ticket_of(session: Session) -> PushTicket:
    plan = (await session.run(ops.admit(1, PROMPT))).plan
    assert plan is not None
    async with PushClient(session.shards[0].address, timeout_s=PATIENCE_S) as pushes:
        return (await pushes.receive_blocks(session.grant, plan, 1)).ticket


async def send(session: Session, ticket: PushTicket) -> None:
    async with PushClient(session.shards[0].address, timeout_s=PATIENCE_S) as pushes:
        await pushes.send_blocks(session.grant, 1, ticket)


async def num_cached(control: ControlClient, pool_id: str) -> int:
    (found,) = await control.find_prefix(PROMPT, pool_ids=[pool_id])
    return found.num_cached_tokens


async def opened(control: ControlClient, pool_id: str) -> tuple[Session, Execution]:
    session = await control.open_session(pool_id, timeout_s=PATIENCE_S)
    return session, await session.open_execution(timeout_s=PATIENCE_S)


def moved(plane: DataPlaneServer, direction: str) -> int:
    return push_of(plane).counts.num_bytes[direction]


async def test_the_receiver_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, original = threading.Event(), chunks.chunk_of

    def chunk_of(blocks: BlockRange, *data: Any) -> BlockChunk:
        if blocks.first_block >= NUM_BLOCKS // 2:
            assert may_go_on.wait(PATIENCE_S)
        return original(blocks, *data)

    monkeypatch.setattr(chunks, "chunk_of", chunk_of)
    layout = write_layout(tmp_path, LAYOUT)
    async with control_plane() as server, ControlClient(server.address) as control:
        settings = settings_of(HERE, server.address, layout, num_device_blocks=300)
        async with data_plane(**settings) as plane:
            here, source = await opened(control, HERE)
            async with here, source:
                await compute(here, source)
                with process(tmp_path, THERE, server.address) as receiver:
                    there, target = await opened(control, THERE)
                    async with target:
                        ticket = await ticket_of(there)
                        sending = asyncio.create_task(send(here, ticket))
                        await until(lambda: moved(plane, "sent") > NUM_BYTES // 2)
                        receiver.kill()
                        with pytest.raises(UnavailableError):
                            await sending
                        may_go_on.set()
                        await there.detach()
                (read,) = await source.read_blocks(1, range(1))
                assert len(read.blocks.data) == NUM_BYTES // NUM_BLOCKS
                assert await num_cached(control, HERE) == len(PROMPT)


async def test_the_sender_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, original = threading.Event(), chunks.check

    def check(chunk: BlockChunk) -> None:
        if chunk.first_block:
            assert may_go_on.wait(PATIENCE_S)
        original(chunk)

    monkeypatch.setattr(chunks, "check", check)
    layout = write_layout(tmp_path, LAYOUT)
    async with control_plane() as server, ControlClient(server.address) as control:
        settings = settings_of(THERE, server.address, layout, num_device_blocks=300)
        async with data_plane(**settings) as plane:
            there, target = await opened(control, THERE)
            async with there, target:
                with process(tmp_path, HERE, server.address) as sender:
                    here, source = await opened(control, HERE)
                    async with source:
                        await compute(here, source)
                        ticket = await ticket_of(there)
                        sending = asyncio.create_task(send(here, ticket))
                        await until(lambda: moved(plane, "received") > 0)
                        sender.kill()
                        with pytest.raises(KvplaneError):
                            await sending
                        await here.detach()
                may_go_on.set()
                counts = push_of(plane).counts
                await until(lambda: counts.num_pushes.total() == 1)
                assert not counts.num_pushes["received", "OK"]
                assert 0 < moved(plane, "received") < NUM_BYTES
            await until(lambda: plane.executor.num_sessions == 0)
            again, target = await opened(control, THERE)
            async with again, target:
                assert await num_cached(control, THERE) == 0
                await compute(again, target)  # all blocks are there again
                assert await num_cached(control, THERE) == len(PROMPT)
