"""Measures how fast blocks get from one data plane to another, beside the machine's limits.

    python -m integrations.push.benchmarks [--mebibytes 64] [--rounds 7] [--json OUT]

The same bytes go by turns, over loopback, between two processes:

    raw TCP        sendall and recv_into, nothing else
    plain gRPC     a synchronous stream of messages as large as a push's chunks, which are dropped
    pushed         SendBlocks, from the call to its answer: read from a pool, checksums, written
    by a client    ReadBlocks here and WriteBlocks there, by a third process
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import grpc

from kvplane import ControlClient, Execution, Session, Tensor, ops
from kvplane.wire.protocol import CHANNEL_OPTIONS

from ..client import PushClient
from .planes import BLOCK_BYTES, LAYOUT, planes
from .rates import Rates, report_rates
from .sinks import by_grpc, by_tcp, grpc_sink, sink, tcp_sink

POOLS: Final = ("prefill", "decode")
PUSHES: Final = {"KVPLANE_PUSH_BIND": "127.0.0.1:0", "KVPLANE_PUSH_TO": "127.0.0.1"}
SEQUENCE: Final = 1
# Read and written by a client at a time.
CLIENT_BYTES: Final = 4 * 1024 * 1024


class Mover:
    """A sequence in the first pool, moved to the second again and again."""

    def __init__(
        self,
        sessions: Sequence[Session],
        executions: Sequence[Execution],
        pushes: Sequence[PushClient],
        num_blocks: int,
    ) -> None:
        self._here, self._there = sessions
        self._source, self._target = executions
        self._push_source, self._push_target = pushes
        self._num_blocks = num_blocks
        self._tokens = [i % 1000 for i in range(num_blocks * LAYOUT.block_size_tokens)]

    async def prefill(self) -> None:
        """Write the sequence, without attention."""
        plan = (await self._here.run(ops.admit(SEQUENCE, self._tokens))).plan
        shape = (len(self._tokens), 8, 64)
        key = Tensor("float32", shape, os.urandom(Tensor.size_bytes("float32", shape)))
        await self._source.start(plan)
        for layer in self._source.layers:
            await self._source.layer(layer, None, key, key)
        await self._here.submit_receipts()

    async def pushed(self) -> float:
        """Push once; return the seconds."""
        plan = await self._admit()
        receiving = self._push_target.receive_blocks(self._there.grant, plan, SEQUENCE)
        ticket = (await receiving).ticket
        begin_s = time.perf_counter()
        sent = await self._push_source.send_blocks(self._here.grant, SEQUENCE, ticket)
        took_s = time.perf_counter() - begin_s
        self._there.add_receipt(sent.receipt)
        await self._free()
        return took_s

    async def by_client(self) -> float:
        """Move once by a client; return the seconds."""
        plan = await self._admit()
        at_once = CLIENT_BYTES // BLOCK_BYTES
        begin_s = time.perf_counter()
        await self._target.start(plan)
        for first in range(0, self._num_blocks, at_once):
            entries = range(first, min(first + at_once, self._num_blocks))
            read = await self._source.read_blocks(SEQUENCE, entries)
            await self._target.write_blocks(SEQUENCE, read, entries)
        took_s = time.perf_counter() - begin_s
        assert self._target.has_run
        await self._free()
        return took_s

    async def _admit(self) -> Any:
        operation = ops.admit(SEQUENCE, self._tokens, skip_prefix_lookup=True)
        return (await self._there.run(operation)).plan

    async def _free(self) -> None:
        await self._target.start((await self._there.run(ops.free(SEQUENCE))).plan)
        await self._there.submit_receipts()


async def measure(address: str, num_blocks: int, num_rounds: int) -> Rates:
    """Time all ways by turns."""
    data = os.urandom(num_blocks * BLOCK_BYTES)
    async with AsyncExitStack() as stack:
        tcp_port = stack.enter_context(sink(tcp_sink))
        grpc_port = stack.enter_context(sink(grpc_sink))
        connection = socket.create_connection(("127.0.0.1", tcp_port))
        stack.enter_context(connection)
        channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}", [*CHANNEL_OPTIONS])
        stack.enter_context(channel)
        control = await stack.enter_async_context(ControlClient(address, timeout_s=60))
        sessions, executions, pushes = [], [], []
        for pool_id in POOLS:
            await control.wait_ready(pool_id, timeout_s=180)
            opening = control.open_session(pool_id, LAYOUT)
            session = await stack.enter_async_context(opening)
            sessions.append(session)
            executions.append(await session.open_execution())
            push = PushClient(session.shards[0].address, timeout_s=60)
            pushes.append(await stack.enter_async_context(push))
        mover = Mover(sessions, executions, pushes, num_blocks)
        await mover.prefill()
        ways: dict[str, Callable[[], Any]] = {
            "raw TCP": lambda: asyncio.to_thread(timed, by_tcp, connection, data),
            "plain gRPC": lambda: asyncio.to_thread(timed, by_grpc, channel, data),
            "pushed": mover.pushed,
            "by a client": mover.by_client,
        }
        rates: Rates = {name: [] for name in ways}
        for number in range(num_rounds + 1):
            for name, move in ways.items():
                took_s = await move()
                if number:  # the first round is a warm-up
                    rates[name].append(len(data) / took_s / 1e9)
    return rates


def timed(move: Callable[..., None], *arguments: Any) -> float:
    """Return the seconds that a call takes."""
    begin_s = time.perf_counter()
    move(*arguments)
    return time.perf_counter() - begin_s


def of_raw_tcp(rates: Rates, median: float) -> str:
    """Return the median as a share of raw TCP's."""
    return f"{median / statistics.median(rates['raw TCP']):.0%}"


def main() -> None:
    def run(folder: Path, num_blocks: int, num_rounds: int) -> Rates:
        os.environ.update(PUSHES)
        with planes(folder, num_blocks, POOLS, "--plug-ins", "push") as address:
            return asyncio.run(measure(address, num_blocks, num_rounds))

    report_rates(__doc__, run, "of raw TCP", of_raw_tcp, num_rounds=7)


if __name__ == "__main__":
    main()
