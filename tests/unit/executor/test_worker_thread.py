"""The worker thread: commands of the event loop and of sockets, in turns."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from data_plane.server.fair_queue import Lane
from data_plane.server.worker_thread import NOTHING, WaitResult, WorkerThread
from kvplane.slices import Slices
from tests.helpers.waiting import until


@asynccontextmanager
async def watched(
    worker: WorkerThread,
    lane: Lane,
    serve: Callable[[socket.socket], Slices[None]],
    wait: Callable[[socket.socket, int], WaitResult] | None = None,
) -> AsyncIterator[socket.socket]:
    """Have the worker watch a socket, and yield its other end. ``serve`` and ``wait`` get the
    worker's end.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    waits = () if wait is None else (partial(wait, theirs),)
    with ours, theirs:
        await worker.run(
            lambda: worker.watch(theirs.fileno(), lane, partial(serve, theirs), *waits)
        )
        yield ours
        await worker.run(lambda: worker.unwatch(theirs.fileno()))


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

    def take(caller: str, theirs: socket.socket | None = None) -> Slices[None]:
        if theirs is not None:
            theirs.recv(100)
        turns.append(caller)
        time.sleep(0.0002)
        yield from ()

    async with (
        watched(worker, Lane("one"), partial(take, "one")) as one,
        watched(worker, Lane("two"), partial(take, "two")) as two,
    ):
        may_go = threading.Event()
        held = asyncio.create_task(worker.run(lambda: may_go.wait(10)))
        for ours in (one, two):
            for _ in range(100):
                ours.send(b"packet")
        waiting = [
            asyncio.create_task(worker.run_slices(partial(take, "loop"), Lane("event loop")))
            for _ in range(100)
        ]
        await asyncio.sleep(0)
        may_go.set()
        await asyncio.gather(held, *waiting)
        await until(lambda: len(turns) == 300)
    # By time, which a busy machine spreads unevenly.
    assert min(Counter(turns[:150]).values()) >= 20
    assert len(Counter(turns[:150])) == 3
    await asyncio.to_thread(worker.close)


async def test_others_come_between_the_slices_of_a_sockets_command(worker: WorkerThread) -> None:
    seen: list[str] = []

    def serve(theirs: socket.socket) -> Slices[None]:
        theirs.recv(100)
        for _ in range(5):
            seen.append("slice")
            time.sleep(0.002)
            yield

    async with watched(worker, Lane("socket"), serve) as ours:
        ours.send(b"packet")
        async with asyncio.timeout(10):
            while not seen:
                await asyncio.sleep(0)
        await worker.run(lambda: seen.append("other"), Lane("other"))
        await until(lambda: seen.count("slice") == 5)
    assert seen.index("other") < 5


async def test_a_thread_that_slept_is_woken_by_a_socket(worker: WorkerThread) -> None:
    came = threading.Event()

    def serve(theirs: socket.socket) -> Slices[None]:
        theirs.recv(100)
        came.set()
        yield from ()

    async with watched(worker, Lane("socket"), serve) as ours:
        for _ in range(3):
            await asyncio.sleep(0.01)
            came.clear()
            ours.send(b"packet")
            assert await asyncio.to_thread(came.wait, 10)


async def test_a_socket_that_waits_for_its_packets_takes_one_that_has_come_already(
    worker: WorkerThread,
) -> None:
    """It costs no turn of the queue where nobody else wants one."""
    taken: list[str] = []
    peers: list[socket.socket] = []

    def serve(theirs: socket.socket) -> Slices[None]:
        theirs.recv(100)
        taken.append("served")
        if len(taken) == 1:
            peers[0].send(b"another")
        yield from ()

    def wait(theirs: socket.socket, epoll: int) -> WaitResult:
        try:
            theirs.recv(100)
        except BlockingIOError:
            ready = select.poll()
            ready.register(epoll, select.POLLIN)
            ready.poll()
            return NOTHING
        taken.append("waited for")
        return WaitResult(1e-6, has_packet=False)

    async with watched(worker, Lane("socket"), serve, wait) as ours:
        peers.append(ours)
        ours.send(b"packet")
        await until(lambda: len(taken) == 2)
    assert taken == ["served", "waited for"]
