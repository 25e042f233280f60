"""Measures how fast blocks get from one data plane to another, beside what the machine could do.

    python -m benchmarks.block_transfer [--mebibytes 64] [--rounds 7] [--json OUT]

The same bytes go by turns, over loopback, between two processes:

    raw TCP        sendall and recv_into, nothing else
    plain gRPC     a synchronous stream of messages as large as a push's chunks, which are dropped
    pushed         SendBlocks, from the call to its answer: read from a pool, checksums, written
    by a client    ReadBlocks here and WriteBlocks there, by a third process
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks.common.cpu import cpu_name
from data_plane.server.push.chunks import CHUNK_BYTES
from kvplane import ControlClient, DataClient, LayerGroup, Layout, Session, Tensor, ops
from kvplane.v1 import push_pb2, push_pb2_grpc
from kvplane.wire.protocol import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES

LAYOUT: Final = Layout(
    "block-transfer", 16, "float32", "float32", (LayerGroup("full", (0, 1, 2, 3), 8, 64),)
)
BLOCK_BYTES: Final = 4 * 2 * 8 * 16 * 64 * 4
POOLS: Final = ("prefill", "decode")
SEQUENCE: Final = 1
# What a client reads and writes at a time.
CLIENT_BYTES: Final = 4 * 1024 * 1024


def tcp_sink(pipe: Connection) -> None:
    """Take what comes, and answer with a byte each time that the number told before has come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            while header := connection.recv(8, socket.MSG_WAITALL):
                buffer = memoryview(bytearray(int.from_bytes(header, "little")))
                while buffer:
                    buffer = buffer[connection.recv_into(buffer) :]
                connection.sendall(b"!")


class _Drop(push_pb2_grpc.BlockPushServiceServicer):
    def PushBlocks(self, request_iterator: Iterator[Any], context: Any) -> Any:
        return push_pb2.PushBlocksResponse(num_bytes=sum(1 for _ in request_iterator))


def grpc_sink(pipe: Connection) -> None:
    """Take messages and drop them, until the pipe has something."""
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    server = grpc.server(ThreadPoolExecutor(1), options=options)
    push_pb2_grpc.add_BlockPushServiceServicer_to_server(_Drop(), server)
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    pipe.recv()
    server.stop(0).wait()


@contextmanager
def sink(take: Callable[[Connection], None]) -> Iterator[int]:
    """A process that takes bytes; its port."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=take, args=(there,), daemon=True)
    process.start()
    yield here.recv()
    here.send("end")
    process.join(10)
    process.kill()


def by_tcp(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(8, "little"))
    connection.sendall(data)
    connection.recv(1)


def by_grpc(channel: grpc.Channel, data: bytes) -> None:
    view = memoryview(data)
    chunks = (
        push_pb2.PushBlocksRequest(
            chunk=push_pb2.BlockChunk(data=bytes(view[at : at + CHUNK_BYTES]))
        )
        for at in range(0, len(data), CHUNK_BYTES)
    )
    push_pb2_grpc.BlockPushServiceStub(channel).PushBlocks(chunks)


@contextmanager
def planes(folder: Path, num_blocks: int) -> Iterator[str]:
    """A control plane and two pools; its address."""
    layout, port = folder / "layout.json", folder / "port"
    layout.write_text(json.dumps(asdict(LAYOUT)))
    with ExitStack() as stack:
        run(stack, "control_plane", "--bind", "127.0.0.1:0", "--port-file", str(port))
        while not port.exists():
            time.sleep(0.05)
        address = f"127.0.0.1:{port.read_text().strip()}"
        for pool_id in POOLS:
            run(
                stack,
                *("data_plane", "--bind", "127.0.0.1:0", "--control-plane", address),
                *("--layout", str(layout), "--pool-id", pool_id, "--num-threads", "1"),
                *("--num-device-blocks", str(2 * num_blocks + 8)),
                *("--push-bind", "127.0.0.1:0", "--push-to", "127.0.0.1"),
            )
        yield address


def run(stack: ExitStack, program: str, *arguments: str) -> None:
    """Start a program that ends with ``stack``."""
    command = [sys.executable, "-m", program, "--metrics-port", "-1", *arguments]
    process = subprocess.Popen([*command, "--log-level", "error"])
    stack.callback(process.wait)
    stack.callback(process.terminate)


class Mover:
    """A sequence in the first pool, moved to the second again and again."""

    def __init__(
        self, sessions: Sequence[Session], clients: Sequence[DataClient], num_blocks: int
    ) -> None:
        self._here, self._there = sessions
        self._source, self._target = clients
        self._num_blocks = num_blocks
        self._tokens = [i % 1000 for i in range(num_blocks * LAYOUT.block_size_tokens)]

    async def prefill(self) -> None:
        """Write the sequence, without attention."""
        plan = (await self._here.admit(SEQUENCE, self._tokens)).plan
        shape = (len(self._tokens), 8, 64)
        key = Tensor("float32", shape, os.urandom(Tensor.size_bytes("float32", shape)))
        for layer in range(4):
            answer = await self._source.reshape_and_cache(self._here.grant, plan, layer, key, key)
        self._here.add_receipt(answer.receipt)
        await self._here.submit_receipts()

    async def pushed(self) -> float:
        """Seconds."""
        plan = await self._admit()
        ticket = (await self._target.receive_blocks(self._there.grant, plan, SEQUENCE)).ticket
        begin_s = time.perf_counter()
        sent = await self._source.send_blocks(self._here.grant, SEQUENCE, ticket)
        took_s = time.perf_counter() - begin_s
        await self._free(sent.receipt)
        return took_s

    async def by_client(self) -> float:
        """Seconds."""
        plan = await self._admit()
        at_once = CLIENT_BYTES // BLOCK_BYTES
        begin_s = time.perf_counter()
        for first in range(0, self._num_blocks, at_once):
            read = await self._source.read_blocks(
                self._here.grant,
                SEQUENCE,
                first_block=first,
                num_blocks=min(at_once, self._num_blocks - first),
            )
            blocks = Tensor.from_proto(read.blocks)
            written = await self._target.write_blocks(
                self._there.grant, plan, SEQUENCE, blocks, first_block=first
            )
        took_s = time.perf_counter() - begin_s
        await self._free(written.receipt)
        return took_s

    async def _admit(self) -> Any:
        operation = ops.admit(SEQUENCE, self._tokens, skip_prefix_lookup=True)
        return (await self._there.step([operation])).raise_for_status().plan

    async def _free(self, receipt: Any) -> None:
        self._there.add_receipt(receipt)
        plan = (await self._there.free(SEQUENCE)).plan
        ran = await self._target.copy_blocks(self._there.grant, plan)
        self._there.add_receipt(ran.receipt)
        await self._there.submit_receipts()


async def measure(address: str, num_blocks: int, num_rounds: int) -> dict[str, list[float]]:
    """GB/s of each way, of each round."""
    data = os.urandom(num_blocks * BLOCK_BYTES)
    async with AsyncExitStack() as stack:
        tcp_port = stack.enter_context(sink(tcp_sink))
        grpc_port = stack.enter_context(sink(grpc_sink))
        connection = socket.create_connection(("127.0.0.1", tcp_port))
        stack.enter_context(connection)
        channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}", [*CHANNEL_OPTIONS])
        stack.enter_context(channel)
        control = await stack.enter_async_context(ControlClient(address, timeout_s=60))
        sessions, clients = [], []
        for pool_id in POOLS:
            await control.wait_ready(pool_id, timeout_s=180)
            session = await control.open_session(pool_id, LAYOUT)
            sessions.append(await stack.enter_async_context(session))
            client = DataClient(session.shards[0].address, timeout_s=60)
            clients.append(await stack.enter_async_context(client))
        mover = Mover(sessions, clients, num_blocks)
        await mover.prefill()
        ways: dict[str, Callable[[], Any]] = {
            "raw TCP": lambda: asyncio.to_thread(timed, by_tcp, connection, data),
            "plain gRPC": lambda: asyncio.to_thread(timed, by_grpc, channel, data),
            "pushed": mover.pushed,
            "by a client": mover.by_client,
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(num_rounds + 1):
            for name, move in ways.items():
                took_s = await move()
                if number:  # the first round is a warm-up
                    rates[name].append(len(data) / took_s / 1e9)
    return rates


def timed(move: Callable[..., None], *arguments: Any) -> float:
    """Seconds that a call takes."""
    begin_s = time.perf_counter()
    move(*arguments)
    return time.perf_counter() - begin_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=64, help="moved at a time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    num_blocks = max(1, options.mebibytes * 1024 * 1024 // BLOCK_BYTES)
    load = os.getloadavg()[0]
    machine = f"{cpu_name()}, {os.cpu_count()} virtual processors, load {load:.1f} at the beginning"
    print(f"{machine}; {num_blocks * BLOCK_BYTES / 2**20:.0f} MiB, {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder, planes(Path(folder), num_blocks) as address:
        rates = asyncio.run(measure(address, num_blocks, options.rounds))
    raw = statistics.median(rates["raw TCP"])
    print(f"{'way':<12} {'median GB/s':>12} {'best':>6} {'of raw TCP':>11}")
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:<12} {median:>12.2f} {max(values):>6.2f} {median / raw:>11.0%}")
    if options.json is not None:
        record = {"machine": machine, "num_bytes": num_blocks * BLOCK_BYTES, "gb_per_s": rates}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
