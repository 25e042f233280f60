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
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

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
        threads = stack.enter_context(ThreadPoolExecutor(max(CHANNELS)))
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
                began = time.perf_counter()
                list(threads.map(receive, peers[:num], (side.into for side in sides)))
                raw_s = time.perf_counter() - began
                for name, seconds in ((f"load by {num}", spent_s), (f"TCP by {num}", raw_s)):
                    if turn:
                        times.setdefault(name, []).append(seconds / num)
    return times


@contextmanager
def senders(num_bytes: int) -> Iterator[list[socket.socket]]:
    """Yield connections on each of which another process sends so many bytes when it is asked."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        arguments = server.getsockname()[1], num_bytes
        # Not forked: that would make each page of this process cost a fault when it is written.
        sender = multiprocessing.get_context("spawn").Process(target=send, args=arguments)
        sender.start()
        stack.callback(sender.join)
        yield [stack.enter_context(server.accept()[0]) for _ in range(max(CHANNELS))]


def receive(peer: socket.socket, into: list[memoryview]) -> None:
    """Ask a connection for its bytes, and put them into these buffers."""
    peer.send(b"g")
    for room in into:
        if peer.recv_into(room, flags=socket.MSG_WAITALL) != len(room):
            raise RuntimeError("the sender ended")


def send(port: int, num_bytes: int) -> None:
    """Connect, and send on each connection whenever it asks, until it ends."""
    data = bytearray(num_bytes)

    def answer(_: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as peer:
            while peer.recv(1):
                peer.sendall(data)

    with ThreadPoolExecutor(max(CHANNELS)) as threads:
        list(threads.map(answer, range(max(CHANNELS))))


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
