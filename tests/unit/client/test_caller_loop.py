"""A loop that runs in the thread that waits for it, and in one of its own when nobody does."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from kvplane import process
from kvplane.errors import InvalidRequestError
from kvplane.sync.caller_loop import CallerLoop
from kvplane.sync.loop_thread import wait
from kvplane.sync.short_thread import call_in_short_thread

LONG_S = 0.4  # after which the loop runs by itself


@pytest.fixture
def loop() -> Iterator[CallerLoop]:
    made = CallerLoop("test-loop")
    yield made
    made.close()


def test_a_forked_process_is_refused_whatever_it_calls(
    loop: CallerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_USERS", [os.getpid() + 1])
    for call in (loop.run, loop.send, loop.begin):
        with pytest.raises(InvalidRequestError, match="was forked"):
            call(thread_after(0))
    monkeypatch.undo()
    assert loop.run(thread_after(0))


async def thread_after(turns: int) -> str:
    for _ in range(turns):
        await asyncio.sleep(0)
    return threading.current_thread().name


def test_a_coroutine_runs_in_the_thread_that_waits_for_it(loop: CallerLoop) -> None:
    assert loop.run(thread_after(3)) == threading.current_thread().name


def test_what_it_raises_is_raised_to_the_caller(loop: CallerLoop) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("so")

    with pytest.raises(ValueError, match="so"):
        loop.run(fail())
    with pytest.raises(ValueError, match="so"):
        wait(loop.send(fail()))


def test_a_request_is_sent_at_once_and_the_rest_runs_when_it_is_waited_for(
    loop: CallerLoop,
) -> None:
    seen: list[tuple[str, str]] = []

    async def ask() -> str:
        seen.append(("sent", threading.current_thread().name))
        await asyncio.sleep(0)
        seen.append(("asked for the answer", threading.current_thread().name))
        await asyncio.sleep(0)
        seen.append(("answered", threading.current_thread().name))
        return "answer"

    here = threading.current_thread().name
    sent = loop.send(ask())
    assert seen == [("sent", here), ("asked for the answer", here)]
    assert wait(sent) == "answer"
    assert seen[2:] == [("answered", here)]
    assert wait(sent) == "answer"


def test_it_runs_by_itself_while_nobody_waits(loop: CallerLoop) -> None:
    async def ask() -> str:
        await asyncio.sleep(0.01)
        return threading.current_thread().name

    sent = loop.send(ask())
    time.sleep(LONG_S)
    assert wait(sent) == "test-loop"
    assert loop.begin(thread_after(1)).result(10) == "test-loop"


def test_a_caller_takes_it_back_again_and_again(loop: CallerLoop) -> None:
    here = threading.current_thread().name
    for i in range(30):
        assert loop.run(thread_after(2)) == here
        time.sleep(0.195 + 0.0005 * i)  # about when it begins to run by itself
        assert wait(loop.send(thread_after(4))) == here


def test_callers_of_several_threads_all_have_their_results(loop: CallerLoop) -> None:
    async def echo(i: int) -> int:
        await asyncio.sleep(0.001)
        return i

    found: list[int] = []

    def call(first: int) -> None:
        found.extend(loop.run(echo(first + i)) for i in range(40))

    threads = [threading.Thread(target=call, args=(100 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [100 * i + j for i in range(4) for j in range(40)]


async def wait_long(ended: threading.Event) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        ended.set()


def test_an_interrupt_cancels_what_is_waited_for(loop: CallerLoop) -> None:
    ended = threading.Event()
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(wait_long(ended))
    assert ended.wait(10)
    assert loop.run(thread_after(1)) == threading.current_thread().name


def test_a_request_that_was_sent_can_be_given_up(loop: CallerLoop) -> None:
    ended = threading.Event()
    loop.send(wait_long(ended)).cancel()
    assert ended.wait(10)


def test_a_caller_that_runs_a_loop_of_its_own_is_served_by_the_thread(loop: CallerLoop) -> None:
    before = loop.send(thread_after(4))

    async def call() -> list[str]:
        sent = loop.send(thread_after(2))
        return [loop.run(thread_after(2)), wait(sent), wait(before)]

    assert asyncio.run(call()) == ["test-loop"] * 3


def test_closing_ends_what_runs_and_the_thread() -> None:
    loop = CallerLoop("test-loop")
    task = loop.begin(asyncio.sleep(60))
    loop.close()
    assert task.cancelled()
    assert "test-loop" not in [thread.name for thread in threading.enumerate()]
    loop.close()


def test_a_call_in_passing_leaves_no_thread() -> None:
    threads: list[threading.Thread] = []

    def call() -> str:
        threads.append(threading.current_thread())
        return "made"

    assert call_in_short_thread(call) == "made"
    assert threads[0] is not threading.current_thread()
    assert not threads[0].is_alive()
    with pytest.raises(ZeroDivisionError):
        call_in_short_thread(lambda: 1 // 0)


def test_an_interrupt_ends_a_call_in_passing() -> None:
    given_up = threading.Event()

    def call() -> None:
        try:
            for _ in range(1000):
                time.sleep(0.02)
        finally:
            given_up.set()

    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call_in_short_thread(call)
    assert given_up.is_set()
    assert time.monotonic() - began_s < 4.0
