"""The worker thread: commands of the event loop and of sockets, in turns."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

from data_plane.server.fair_queue import Lane
from data_plane.server.worker_thread import NOTHING, WaitResult, WorkerThread
from kvplane.slices import Slices


@pytest.fixture
def worker() -> Iterator[WorkerThread]:
    worker = WorkerThread(spin_s=0.001)
    yield worker
    worker.close()


async def test_commands_run_in_order_on_one_thread(worker: WorkerThread) -> None:
    seen: list[tuple[int, str]] = []

    def note(number: int) -> None:
        seen.append((number, threading.current_thread().name))

    await asyncio.gather(*(worker.run(partial(note, i)) for i in range(50)))
    assert seen == [(i, "data-plane") for i in range(50)]
    assert worker.num_waiting == 0


async def test_an_error_is_raised_to_who_gave_the_command(worker: WorkerThread) -> None:
    with pytest.raises(KeyError):
        await worker.run(lambda: {}["missing"])
    assert await worker.run(lambda: 5) == 5


async def test_a_command_whose_caller_stopped_waiting_runs_to_its_end(worker: WorkerThread) -> None:
    may_go, done = threading.Event(), threading.Event()
    task = asyncio.create_task(worker.run(lambda: (may_go.wait(10), done.set())))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_go.set()
    await asyncio.to_thread(done.wait, 10)
    assert done.is_set()


async def test_what_cannot_begin_is_told_at_once() -> None:
    def fail() -> None:
        raise OSError("no device")

    with pytest.raises(OSError, match="no device"):
        WorkerThread(fail)


async def test_a_closed_worker_has_done_what_it_was_given_and_takes_no_more() -> None:
    worker = WorkerThread()
    running = [asyncio.create_task(worker.run(lambda i=i: i)) for i in range(20)]
    await asyncio.sleep(0)
    await asyncio.to_thread(worker.close)
    worker.close()
    assert await asyncio.gather(*running) == [*range(20)]
    with pytest.raises(RuntimeError):
        await worker.run(lambda: 1)


@pytest.mark.parametrize("spin_s", [0.0, 0.001])
async def test_sockets_take_turns_with_each_other_and_with_the_event_loop(spin_s: float) -> None:
    """Each caller has a hundred commands waiting, and none of them gets far ahead of another."""
    worker, turns = WorkerThread(spin_s=spin_s), []
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for ours, _ in pairs:
        for _ in range(100):
            ours.send(b"packet")

    def take(caller: str, theirs: socket.socket | None = None) -> Slices[None]:
        if theirs is not None:
            theirs.recv(100)
        turns.append(caller)
        time.sleep(0.0002)
        yield from ()

    def watch() -> None:
        for i, (_, theirs) in enumerate(pairs):
            worker.watch(theirs.fileno(), Lane(f"socket {i}"), partial(take, f"socket {i}", theirs))

    loop = Lane("event loop")
    await worker.run(watch)
    await asyncio.gather(
        *(worker.run_slices(partial(take, "event loop"), loop) for _ in range(100))
    )
    async with asyncio.timeout(10):
        while len(turns) < 300:
            await asyncio.sleep(0.001)
    # By time, which a busy machine spreads unevenly.
    assert min(Counter(turns[:150]).values()) >= 20
    assert len(Counter(turns[:150])) == 3
    await worker.run(lambda: [worker.unwatch(theirs.fileno()) for _, theirs in pairs])
    await asyncio.to_thread(worker.close)
    for pair in pairs:
        for end_of in pair:
            end_of.close()


async def test_others_come_between_the_slices_of_a_sockets_command(worker: WorkerThread) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    seen: list[str] = []

    def serve() -> Slices[None]:
        theirs.recv(100)
        for _ in range(5):
            seen.append("slice")
            time.sleep(0.002)
            yield

    lane = Lane("socket")
    await worker.run(lambda: worker.watch(theirs.fileno(), lane, serve))
    ours.send(b"packet")
    async with asyncio.timeout(10):
        while not seen:
            await asyncio.sleep(0)
    await worker.run(lambda: seen.append("other"), Lane("other"))
    async with asyncio.timeout(10):
        while seen.count("slice") < 5:
            await asyncio.sleep(0.001)
    assert seen.index("other") < 5
    await worker.run(lambda: worker.unwatch(theirs.fileno()))
    ours.close()
    theirs.close()


async def test_a_thread_that_slept_is_woken_by_a_socket(worker: WorkerThread) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    came = threading.Event()

    def serve() -> Slices[None]:
        theirs.recv(100)
        came.set()
        yield from ()

    await worker.run(lambda: worker.watch(theirs.fileno(), Lane("socket"), serve))
    for _ in range(3):
        await asyncio.sleep(0.01)
        came.clear()
        os.write(ours.fileno(), b"packet")
        assert await asyncio.to_thread(came.wait, 10)
    await worker.run(lambda: worker.unwatch(theirs.fileno()))
    ours.close()
    theirs.close()


async def test_a_socket_that_waits_for_its_packets_takes_one_that_has_come_already(
    worker: WorkerThread,
) -> None:
    """It costs no turn of the queue where nobody else wants one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    taken: list[str] = []

    def serve() -> Slices[None]:
        theirs.recv(100)
        taken.append("served")
        if len(taken) == 1:
            ours.send(b"another")
        yield from ()

    def wait(epoll: int) -> WaitResult:
        try:
            theirs.recv(100)
        except BlockingIOError:
            ready = select.poll()
            ready.register(epoll, select.POLLIN)
            ready.poll()
            return NOTHING
        taken.append("waited for")
        return WaitResult(1e-6, has_packet=False)

    await worker.run(lambda: worker.watch(theirs.fileno(), Lane("socket"), serve, wait))
    ours.send(b"packet")
    async with asyncio.timeout(10):
        while len(taken) < 2:
            await asyncio.sleep(0.001)
    await worker.run(lambda: worker.unwatch(theirs.fileno()))
    ours.close()
    theirs.close()
    assert taken == ["served", "waited for"]
