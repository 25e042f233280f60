"""A caller that reads none of its answers: those wait in the data plane, as far as they may."""

from __future__ import annotations

import asyncio
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from data_plane.server.tensor_codec import tensor_to_message
from kvplane.wire import protocol
from kvplane.wire.v1 import execution_pb2 as pb
from tests.helpers.attacked_planes import (
    CALLER,
    PATIENCE_S,
    PlaneProcess,
    data_plane_process,
    environment,
)
from tests.helpers.data.plan_author import (
    BLOCK_SIZE,
    PlanAuthor,
    int32,
    set_blocks,
    span,
    tokens,
)
from tests.helpers.planes_in_process import control_plane as control_plane_here
from tests.helpers.planning.control_wire import stub_of

MIB = 1 << 20
DATA, HEADERS, SETTINGS = 0, 1, 4  # frames of HTTP/2
NUM_BLOCKS = 2048
NUM_READS = 80
HELD_BYTES = 32 * MIB
# An answer is there several times while it is on its way.
MOST_BYTES = 8 * HELD_BYTES


async def written(stub: Any, author: PlanAuthor) -> pb.ReadBlocksRequest:
    """A session has written all blocks; what reads them."""
    grant, num_tokens = author.grant(1), NUM_BLOCKS * BLOCK_SIZE
    changes = [set_blocks(1, [(block, 1) for block in range(NUM_BLOCKS)])]
    plan = author.plan(1, 1, changes=changes, spans=[span(1, 0, num_tokens)])
    part = tensor_to_message(tokens(num_tokens, seed=1))
    for layer in (0, 1):
        request = pb.RunLayerRequest(grant=grant, plan=plan, layer=layer, key=part, value=part)
        await stub.ReshapeAndCache(request)
    return pb.ReadBlocksRequest(grant=grant, sequence_id=1, entries=int32(*range(NUM_BLOCKS)))


async def quiet(plane: PlaneProcess) -> None:
    """Until its memory does not change any more."""
    until_s, before = time.monotonic() + PATIENCE_S, -1
    while before != (before := plane.peak_bytes()):
        assert time.monotonic() < until_s
        await asyncio.sleep(0.5)


async def test_answers_that_are_not_read_are_bounded(tmp_path: Path) -> None:
    # One caller may have a quarter of what is received.
    flags = ["--num-host-blocks", "0", "--max-received-bytes", str(4 * HELD_BYTES)]
    async with (
        data_plane_process(tmp_path, NUM_BLOCKS, *flags) as (plane, _, author),
        grpc.aio.insecure_channel(plane.address, options=protocol.CHANNEL_OPTIONS) as channel,
    ):
        stub = stub_of(channel)
        request = await written(stub, author)
        answer_bytes = (await stub.ReadBlocks(request)).ByteSize()
        assert NUM_READS * answer_bytes > 2 * MOST_BYTES
        file = tmp_path / "request"
        file.write_bytes(request.SerializeToString())
        begin_bytes = plane.begin_peak()
        command = [sys.executable, str(CALLER), "deaf", plane.address, str(file)]
        with subprocess.Popen(
            [*command, str(NUM_READS)], env=environment(), stdout=subprocess.PIPE
        ) as deaf:
            try:
                assert deaf.stdout is not None
                assert await asyncio.to_thread(deaf.stdout.readline) == b'"sent"\n'
                deaf.send_signal(signal.SIGSTOP)
                await quiet(plane)
                assert plane.peak_bytes() - begin_bytes < MOST_BYTES
                await stub.ReadBlocks(request, timeout=PATIENCE_S)  # of another connection
            finally:
                deaf.kill()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack(">IBBI", len(payload), kind, flags, stream)[1:] + payload


def deaf_watch() -> bytes:
    """Return what a client sends that watches a server's health and has no window for answers."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Watch",
        ":authority": "a",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    fields = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )
    no_window = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    request = frame(HEADERS, 4, 1, fields) + frame(DATA, 1, 1, bytes(5))
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + no_window + request


async def test_a_watcher_that_reads_nothing_keeps_nobody_waiting() -> None:
    asked = health_pb2.HealthCheckRequest()
    states = health_pb2.HealthCheckResponse
    async with asyncio.timeout(10), control_plane_here() as server:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(deaf_watch())
        kind = 0
        while kind != HEADERS:  # of the answer, whose message waits
            head = await reader.readexactly(9)
            kind = head[3]
            await reader.readexactly(int.from_bytes(head[:3]))
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(asked)
            assert (await watch.read()).status == states.SERVING
            await server.stop()
            assert (await watch.read()).status == states.NOT_SERVING
            assert await watch.read() is grpc.aio.EOF
        writer.close()
