"""Measures how fast opaque chunks go into a pool and come back, as a cache plug-in moves them.

    python -m benchmarks.blocks [--remote] [--turns 9] [--json OUT]

Both planes are processes. A prompt of 12 blocks is stored and loaded through shared memory, by
turns: by a step with ``ends_with_plan`` and ``write_pages``, and by pins and ``read_pages``; beside
"memcpy", a copy of the same bytes in this process. Medians of the turns.

``--remote``: loads over gRPC instead, by 1, 4 and 8 channels at one time, beside as many TCP
connections on which another process sends the same number of bytes to the same buffers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import selectors
import socket
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from benchmarks.common.report import machine, markdown, said, save
from kvplane import ControlClient, Execution, Session, ops
from scripts.planes import run_planes

NUM_CHUNKS = 12
BLOCK_TOKENS = 16
SIZES = (64 << 10, 2 << 20)
CHANNELS = (1, 4, 8)
POOL = "default"


@dataclass
class Side:
    """One engine: a session, its executions, and the buffers of its chunks."""

    session: Session
    execution: Execution
    page_bytes: int
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    pin_id: int = 0

    def __post_init__(self) -> None:
        self.pages = [memoryview(bytearray(self.page_bytes)) for _ in range(NUM_CHUNKS)]
        for i, page in enumerate(self.pages):
            page[:] = bytes([i]) * self.page_bytes
        self.into = [memoryview(bytearray(self.page_bytes)) for _ in range(NUM_CHUNKS)]

    def prompt(self, turn: int) -> list[int]:
        """Return tokens that no earlier turn had."""
        return [turn, *range(1, NUM_CHUNKS * BLOCK_TOKENS)]

    async def store(self, turn: int) -> None:
        """A step, and the write; the receipt goes with the next step."""
        i = next(self.ids)
        step = await self.session.step([ops.admit(i, self.prompt(turn), ends_with_plan=True)])
        assert step.plan is not None
        await self.execution.write_pages(step.plan, [i] * NUM_CHUNKS, self.pages, range(NUM_CHUNKS))

    async def load(self, turn: int) -> None:
        """Pins, and the read. The pins of the load before are undone by the same step."""
        last, self.pin_id = self.pin_id, next(self.ids)
        pins = ops.unpin(last), ops.pin(self.pin_id, [self.prompt(turn)])
        step = await self.session.step(pins)
        found = await self.execution.read_pages(step.results[1].pinned, self.into)
        assert found == [self.page_bytes] * NUM_CHUNKS

    async def memcpy(self, turn: int) -> None:
        for room, page in zip(self.into, self.pages, strict=True):
            room[:] = page

    def check(self) -> None:
        """Check that what was loaded last is what was stored."""
        assert self.into == self.pages, "other bytes came back"
        for room in self.into:
            room[:] = bytes(self.page_bytes)


async def opened(stack: AsyncExitStack, control: ControlClient, page_bytes: int) -> Side:
    session = await stack.enter_async_context(control.open_session(POOL))
    execution = await stack.enter_async_context(session.open_execution())
    return Side(session, execution, page_bytes)


async def by_turns(address: str, page_bytes: int, num_turns: int) -> dict[str, list[float]]:
    """Return the seconds of each call, turn by turn."""
    times: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(ControlClient(address, timeout_s=60))
        await control.wait_ready(POOL, timeout_s=60)
        side = await opened(stack, control, page_bytes)
        calls: dict[str, Callable[[int], Awaitable[None]]] = {
            "memcpy": side.memcpy,
            "store": side.store,
            "load": side.load,
        }
        for turn in range(num_turns + 2):  # the first two warm up
            for name, call in calls.items():
                began = time.perf_counter()
                await call(turn)
                spent_s = time.perf_counter() - began
                if turn > 1:
                    times.setdefault(name, []).append(spent_s)
                if name == "load":
                    side.check()
                elif name == "store":
                    await side.session.submit_receipts()  # as the next step would
    return times


async def remote(address: str, page_bytes: int, num_turns: int) -> dict[str, list[float]]:
    """Return the seconds of loads over gRPC, and of as many bytes over TCP into the same buffers,
    turn by turn.
    """
    times: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        peers = stack.enter_context(senders(NUM_CHUNKS * page_bytes))
        client = ControlClient(address, timeout_s=60, shared_memory=False)
        control = await stack.enter_async_context(client)
        await control.wait_ready(POOL, timeout_s=60)
        sides = [await opened(stack, control, page_bytes) for _ in range(max(CHANNELS))]
        await sides[0].store(1)
        await sides[0].session.submit_receipts()
        for turn in range(num_turns + 1):
            for num in CHANNELS:
                began = time.perf_counter()
                await asyncio.gather(*(side.load(1) for side in sides[:num]))
                spent_s = time.perf_counter() - began
                raw_s = receive([*zip(peers, (side.into for side in sides[:num]), strict=False)])
                for name, seconds in ((f"load by {num}", spent_s), (f"TCP by {num}", raw_s)):
                    if turn:
                        times.setdefault(name, []).append(seconds / num)
    return times


@contextmanager
def senders(num_bytes: int) -> Iterator[list[socket.socket]]:
    """Yield connections on each of which another process sends so many bytes when it is asked."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        arguments = server.getsockname()[1], max(CHANNELS), num_bytes
        # Not forked: that would make each page of this process cost a fault when it is written.
        sender = multiprocessing.get_context("spawn").Process(target=send, args=arguments)
        sender.start()
        stack.callback(sender.join)
        yield [stack.enter_context(server.accept()[0]) for _ in range(max(CHANNELS))]


def receive(peers: list[tuple[socket.socket, list[memoryview]]]) -> float:
    """Ask for the bytes of each connection, put them into its buffers, and return the seconds."""
    began = time.perf_counter()
    for peer, _ in peers:
        peer.send(b"g")
    rooms = {peer: deque(into) for peer, into in peers}
    while rooms:
        for peer, left in [*rooms.items()]:
            num = peer.recv_into(left[0])
            left[0] = left[0][num:]
            if not left[0]:
                left.popleft()
            if not left:
                del rooms[peer]
    return time.perf_counter() - began


def send(port: int, num_connections: int, num_bytes: int) -> None:
    """Connect so often. Whenever bytes are asked for on a connection, send them; until all end."""
    data = memoryview(bytearray(num_bytes))
    with selectors.DefaultSelector() as waiting:
        for _ in range(num_connections):
            waiting.register(socket.create_connection(("127.0.0.1", port)), selectors.EVENT_READ)
        left: dict[socket.socket, memoryview] = {}
        while waiting.get_map():
            for key, _ in waiting.select(0 if left else None):
                peer = cast(socket.socket, key.fileobj)
                if peer.recv(1):
                    left[peer] = data
                else:
                    waiting.unregister(peer)
            for peer, rest in [*left.items()]:
                peer.sendall(rest[: 1 << 20])
                left[peer] = rest[1 << 20 :]
                if not left[peer]:
                    del left[peer]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--remote", action="store_true")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    measure = remote if options.remote else by_turns
    record: dict[str, object] = machine(turns=options.turns, chunks=NUM_CHUNKS)
    print(said(record))
    rows = []
    for page_bytes in SIZES:
        flags = ("--opaque-page-bytes", str(page_bytes), "--model-id", "benchmark")
        flags = (*flags, "--num-device-blocks", "128", "--num-host-blocks", "0")
        with tempfile.TemporaryDirectory() as folder, run_planes(Path(folder), flags) as planes:
            times = asyncio.run(measure(planes.control.address, page_bytes, options.turns))
        record[f"{page_bytes >> 10} KiB"] = times
        for name, seconds in times.items():
            middle = statistics.median(seconds)
            rate = NUM_CHUNKS * page_bytes / middle / 1e9
            rows.append((f"{page_bytes >> 10} KiB", name, f"{1e3 * middle:.2f}", f"{rate:.2f}"))
    print("\n".join(markdown(("chunks", "what", "ms", "GB/s"), rows)))
    save(options.json, record)


if __name__ == "__main__":
    main()
